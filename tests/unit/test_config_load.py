"""Loading: lookup, bases, overrides, and the refusal of everything that the schema does not say."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlpost.config.fields import nearest_keys, schema_fields
from rlpost.config.load import LoadedConfig, available_configs, find_config, load_config
from rlpost.config.schema import RewardConfig, RunConfig
from rlpost.types import ConfigError

REPOSITORY = Path(__file__).resolve().parents[2]
Write = Callable[[str, str], str]

REQUIRED = ["model.path=embedded:sort5", "data.train=embedded:sort5", "schedule.steps=3"]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Writes a file into an empty working directory and returns its path as text."""
    monkeypatch.chdir(tmp_path)

    def write_file(name: str, text: str) -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write_file


@pytest.fixture
def empty(write: Write) -> str:
    return write("empty.yaml", "# nothing\n")


def load(path: str, *overrides: str) -> LoadedConfig:
    return load_config([f"config={path}", *REQUIRED, *overrides])


def refusal(*args: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(args)
    return str(caught.value)


def test_values_become_a_real_dataclass_with_defaults(write: Write) -> None:
    path = write("a.yaml", "training: {ranks: 2, optimizer: {lr: 0.5}}\nrewards: [{function: exact_match}]\n")
    loaded = load(path)
    assert isinstance(loaded.config, RunConfig)
    assert loaded.config.training.ranks == 2
    assert loaded.config.training.optimizer.lr == 0.5
    assert loaded.config.rewards == [RewardConfig(function="exact_match")]
    assert loaded.config.algorithm.group_size == 8
    assert loaded.source == Path(path)


def test_resolved_yaml_loads_again_to_the_same_config(write: Write) -> None:
    path = write("a.yaml", 'name: "007"\nseed: 5\nenvironment: {options: {a: "1e-3", b: 1e-3, c: "no", d: "012", e: [1, null]}}\n')
    loaded = load(path, "rewards=[{function: exact_match, weight: 0.5}]", "training.optimizer.lr=1e-6", "schedule.prompts_per_step=${seed}")
    again = load_config([f"config={write('resolved.yaml', loaded.yaml)}"])
    assert again.config == loaded.config
    assert again.yaml == loaded.yaml
    assert loaded.config.schedule.prompts_per_step == 5


@settings(max_examples=25, deadline=None)
@given(text=st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs", "Zl", "Zp")), min_size=1).filter(lambda t: "${" not in t))
def test_any_text_survives_the_resolved_yaml(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    directory = tmp_path_factory.mktemp("round")
    start = directory / "start.yaml"
    start.write_text("# nothing\n", encoding="utf-8")
    quoted = "'" + text.replace("'", "''") + "'"
    loaded = load(str(start), f"observe.wandb_project={quoted}")
    assert loaded.config.observe.wandb_project == text
    (directory / "again.yaml").write_text(loaded.yaml, encoding="utf-8")
    assert load_config([f"config={directory / 'again.yaml'}"]).config == loaded.config


# Lookup ---------------------------------------------------------------------------------------------------------------


def test_a_name_is_found_with_and_without_suffix_from_anywhere(write: Write) -> None:
    expected = (REPOSITORY / "configs" / "grpo_qwen.yaml").resolve()
    assert find_config("grpo_qwen") == expected
    assert find_config("grpo_qwen.yaml") == expected


def test_configs_of_the_working_directory_come_first_and_are_listed(write: Write) -> None:
    own = write("configs/grpo_qwen.yaml", "# My own.\n")
    write("configs/mine.yaml", "# Mine too.\n")
    assert find_config("grpo_qwen") == Path(own)
    listed = available_configs()
    assert listed["grpo_qwen"] == (Path(own), "My own.")
    assert listed["mine"][1] == "Mine too."
    assert "grpo_qwen_multinode" in listed


def test_a_path_is_taken_as_it_is(write: Write) -> None:
    path = write("somewhere/else.yaml", "# x\n")
    assert find_config(path) == Path(path)
    assert find_config("somewhere/else.yaml") == Path(path)
    write("grpo_qwen.yaml", "# here\n")
    assert find_config("grpo_qwen.yaml") == Path("grpo_qwen.yaml").resolve()


def test_a_missing_path_is_not_looked_up_as_a_name(write: Write) -> None:
    assert str(Path("nowhere/grpo_qwen.yaml").absolute()) in refusal("config=nowhere/grpo_qwen.yaml")


def test_an_unknown_name_says_which_is_near_and_what_there_is(write: Write) -> None:
    message = refusal("config=grpo_qwn")
    assert "did you mean grpo_qwen?" in message
    assert "grpo_qwen_multinode" in message


@pytest.mark.parametrize("args", [[], ["schedule.steps=3"], ["config="]])
def test_no_config_lists_the_available_ones(args: list[str]) -> None:
    message = refusal(*args)
    assert "no config is given" in message
    assert "grpo_qwen " in message


def test_a_name_without_its_key_is_explained(write: Write) -> None:
    assert "did you mean config=grpo_qwen?" in refusal("grpo_qwen")


def test_two_configs_are_refused(empty: str) -> None:
    assert "given 2 times" in refusal(f"config={empty}", f"config={empty}")


def test_an_installed_wheel_finds_its_own_configs(tmp_path: Path) -> None:
    package = tmp_path / "site" / "rlpost"
    (tmp_path / "work").mkdir()
    shutil.copytree(REPOSITORY / "rlpost" / "config", package / "config", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("__init__.py", "types.py"):
        shutil.copy(REPOSITORY / "rlpost" / name, package / name)
    shutil.copytree(REPOSITORY / "configs", package / "configs")
    program = "from rlpost.config.load import load_config; print(load_config(['config=grpo_qwen_multinode']).source)"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path / "work", env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert Path(done.stdout.strip()) == package / "configs" / "grpo_qwen_multinode.yaml"


def test_loading_checking_and_help_need_neither_torch_nor_ray_nor_vllm() -> None:
    program = (
        "import sys\nfrom rlpost.config import checks, derive, help, load\n"
        "config = load.load_config(['config=grpo_qwen']).config\n"
        "checks.check(config); derive.derive(config, device='gpu'); help.format_help()\n"
        "print([m for m in ('torch', 'ray', 'vllm', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# Bases ----------------------------------------------------------------------------------------------------------------


def test_a_chain_of_bases_is_merged_and_the_nearest_wins(write: Write) -> None:
    write("far.yaml", "seed: 1\nname: far\ntraining: {ranks: 4, optimizer: {lr: 0.1, eps: 0.5}}\nrewards: [{function: a}, {function: b}]\n")
    write("near.yaml", "base: far\nname: near\ntraining: {optimizer: {lr: 0.2}}\n")
    path = write("top.yaml", "base: near.yaml\nrewards: [{function: c}]\n")
    config = load(path).config
    assert (config.seed, config.name, config.training.ranks) == (1, "near", 4)
    assert (config.training.optimizer.lr, config.training.optimizer.eps) == (0.2, 0.5)
    assert [reward.function for reward in config.rewards] == ["c"], "lists are replaced, not merged"


def test_a_base_is_looked_up_beside_its_config_first(write: Write) -> None:
    write("configs/common.yaml", "seed: 1\n")
    write("mine/common.yaml", "seed: 2\n")
    assert load(write("mine/a.yaml", "base: common\n")).config.seed == 2
    assert load(write("other/a.yaml", "base: common\n")).config.seed == 1


def test_a_shipped_config_can_be_a_base(write: Write) -> None:
    assert load(write("a.yaml", "base: grpo_qwen\n")).config.placement.device == "gpu"


def test_a_cycle_of_bases_is_refused_with_its_path(write: Write) -> None:
    write("a.yaml", "# a\nbase: b\n")
    path = write("b.yaml", "base: a\n")
    message = refusal(f"config={path}")
    assert "a.yaml:2" in message
    assert "b.yaml -> a.yaml -> b.yaml" in message


def test_a_config_that_is_its_own_base_is_refused(write: Write) -> None:
    assert "cycle" in refusal(f"config={write('a.yaml', 'base: a')}")


def test_a_missing_base_names_the_file_that_asks_for_it(write: Write) -> None:
    path = write("a.yaml", "seed: 1\nbase: nowhere")
    message = refusal(f"config={path}")
    assert "a.yaml:2" in message
    assert "'nowhere'" in message


def test_base_cannot_be_given_on_the_command_line(empty: str) -> None:
    assert "base is a key of config files" in refusal(f"config={empty}", *REQUIRED, "base=grpo_qwen")


# Overrides ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["1e-3", "0.001", "1.0e-3", ".001", "1E-3", "+1e-3"])
def test_every_way_to_write_a_number_is_one(empty: str, text: str) -> None:
    assert load(empty, f"training.optimizer.lr={text}").config.training.optimizer.lr == 1e-3


def test_a_number_in_a_file_needs_no_dot_either(write: Write) -> None:
    config = load(write("a.yaml", "training: {optimizer: {lr: 1e-3, eps: 1}}\nenvironment: {options: {a: 1e-3}}")).config
    assert config.training.optimizer.lr == 1e-3
    assert isinstance(config.training.optimizer.eps, float)
    assert config.environment.options == {"a": 1e-3}


def test_overrides_follow_the_file_and_the_last_wins(write: Write) -> None:
    path = write("a.yaml", "seed: 1\n")
    assert load(path, "seed=2", "seed=3").config.seed == 3


def test_lists_and_mappings_are_overridden(write: Write) -> None:
    path = write("a.yaml", "rewards: [{function: a, weight: 5}, {function: b}]\nenvironment: {options: {x: 1, y: 2}}\n")
    overrides = ["rewards.1.weight=2", "rewards.0={function: c}", "environment.options.x=3", "environment.options.z.w=[1e-2]"]
    config = load(path, *overrides).config
    assert [(reward.function, reward.weight) for reward in config.rewards] == [("c", 5.0), ("b", 2.0)]
    assert config.environment.options == {"x": 3, "y": 2, "z": {"w": [0.01]}}
    replaced = load(path, "rewards=[{function: exact_match}]", "sampling.stop_token_ids=[1, 2]", "observe.trackers=[console]").config
    assert replaced.rewards == [RewardConfig(function="exact_match")]
    assert replaced.sampling.stop_token_ids == [1, 2]
    assert replaced.observe.trackers == ["console"]


def test_a_mapping_override_keeps_the_section_s_other_values(write: Write) -> None:
    config = load(write("a.yaml", "training: {ranks: 2, threads: 3}\n"), "training={ranks: 4}").config
    assert (config.training.ranks, config.training.threads) == (4, 3)


@pytest.mark.parametrize("text", ["007", "1e-3", "yes", "null", "2024-01-01", "a=b", "[x]", "1:30", "#tag"])
def test_text_stays_the_text_that_was_typed(empty: str, text: str) -> None:
    assert load(empty, f"name={text}").config.name == text


def test_null_is_null_only_where_null_is_allowed(empty: str) -> None:
    assert load(empty, "data.evaluation=null").config.data.evaluation is None
    assert load(empty, "data.evaluation='null'").config.data.evaluation == "null"
    assert load(empty, "engine.max_model_len=null").config.engine.max_model_len is None
    assert "training.ranks is null, expected a whole number" in refusal(f"config={empty}", *REQUIRED, "training.ranks=null")


def test_an_override_of_a_list_entry_that_is_not_there_is_refused(empty: str) -> None:
    message = refusal(f"config={empty}", *REQUIRED, "rewards.0.weight=2")
    assert "rewards has 0 entries" in message
    assert "rewards=[...]" in message


def test_an_override_below_a_plain_value_is_refused(empty: str) -> None:
    message = refusal(f"config={empty}", *REQUIRED, "environment.options.a=1", "environment.options.a.b=2")
    assert "environment.options.a is 1" in message


def test_an_override_that_is_not_yaml_is_refused_with_its_key(empty: str) -> None:
    assert "command line: rewards: cannot read '[{function'" in refusal(f"config={empty}", *REQUIRED, "rewards=[{function")


# Strictness -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("training.lr", "training.optimizer.lr"),
        ("lr", "training.optimizer.lr"),
        ("training.optimiser.lr", "training.optimizer.lr"),
        ("algorithm.groupsize", "algorithm.group_size"),
        ("algorithm.group-size", "algorithm.group_size"),
        ("schedule.staleness", "schedule.max_staleness"),
        ("rewards.1.wieght", "rewards.1.weight"),
        ("sampling.Temperature", "sampling.temperature"),
        ("enigne.count", "engine.count"),
        ("trainig", "training"),
        ("sampling.beta", "algorithm.preference.beta"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest(empty: str, key: str, meant: str) -> None:
    message = refusal(f"config={empty}", *REQUIRED, f"{key}=1")
    assert f"command line: unknown key {key}; did you mean" in message
    assert meant in nearest_keys(key)
    assert meant in message


def test_an_unknown_key_without_a_near_one_lists_its_section(empty: str) -> None:
    message = refusal(f"config={empty}", *REQUIRED, "checkpoint.qqqqq=1")
    assert "unknown key checkpoint.qqqqq; checkpoint has every, keep, at_end" in message


def test_unknown_keys_and_wrong_types_name_file_and_line_and_come_all_at_once(write: Write) -> None:
    write("base.yaml", "# base\nscheduel: {steps: 1}\n")
    path = write("a.yaml", "base: base\ntraining:\n  ranks: two\n  optimizer:\n    lrr: 1\nrewards:\n  - function: a\n    wieght: 1\n")
    message = refusal(f"config={path}", "seed=x")
    assert "base.yaml:2: unknown key scheduel; did you mean schedule?" in message
    assert "a.yaml:3: training.ranks is 'two' (text), expected a whole number" in message
    assert "a.yaml:5: unknown key training.optimizer.lrr; did you mean training.optimizer.lr?" in message
    assert "a.yaml:8: unknown key rewards.0.wieght; did you mean rewards.0.weight?" in message
    assert "command line: seed is 'x' (text), expected a whole number" in message
    assert message.startswith("5 problems")


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("training.ranks", "1.5", "a whole number"),
        ("training.ranks", "true", "a whole number"),
        ("training.ranks", "[1]", "a whole number"),
        ("training.optimizer.lr", "fast", "a number"),
        ("training.optimizer.lr", "false", "a number"),
        ("training.optimizer.lr", ".inf", "a finite number"),
        ("training.optimizer.lr", ".nan", "a finite number"),
        ("data.shuffle", "1", "true or false"),
        ("data.shuffle", "yes", "true or false"),
        ("engine.max_model_len", "long", "a whole number or null"),
        ("rewards", "exact_match", "a list of mappings"),
        ("rewards", "{function: a}", "a list of mappings"),
        ("rewards", "[exact_match]", "a mapping"),
        ("sampling.stop_token_ids", "[1, x]", "a whole number"),
        ("training", "5", "a mapping"),
        ("engine.extra", "5", "a mapping"),
        ("observe.trackers", "console", "a list of text"),
    ],
)
def test_a_wrong_type_is_refused_with_key_value_and_expected_type(empty: str, key: str, value: str, expected: str) -> None:
    message = refusal(f"config={empty}", *REQUIRED, f"{key}={value}")
    assert f"command line: {key}" in message
    assert f"expected {expected}" in message


def test_a_number_where_a_file_needs_text_is_refused_with_the_fix(write: Write) -> None:
    assert 'write it in quotes: "7"' in refusal(f"config={write('a.yaml', 'name: 007')}", *REQUIRED)


def test_a_value_outside_the_choices_names_them_and_the_nearest(empty: str) -> None:
    message = refusal(f"config={empty}", *REQUIRED, "algorithm.advantage=group_sdt")
    assert "expected one of auto, group_std, group_mean, maxrl, " in message and "; did you mean group_std?" in message


def test_the_choices_hold_for_files_and_interpolations_too(write: Write) -> None:
    assert "expected one of split, colocated" in refusal(f"config={write('a.yaml', 'placement: {mode: both}')}", *REQUIRED)
    path = write("b.yaml", "name: both\nplacement: {mode: '${name}'}\n")
    assert "placement.mode is 'both', expected one of split, colocated" in refusal(f"config={path}", *REQUIRED)


def test_all_missing_values_come_at_once_with_their_documentation(write: Write) -> None:
    message = refusal(f"config={write('a.yaml', 'rewards: [{weight: 2}]')}")
    for key in ("model.path", "data.train", "schedule.steps"):
        field = next(f for f in schema_fields() if f.key == key)
        assert f"{key}: {field.doc}" in message


def test_an_empty_section_is_no_value(write: Write) -> None:
    path = write("a.yaml", "training:\n  # ranks: 2\nenvironment:\n  options:\n")
    assert load(path).config.training.ranks == 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("seed: 1\nseed: 2\n", "a.yaml:2: not valid YAML: key seed stands twice"),
        ("seed: [1\n", "not valid YAML"),
        ("- 1\n", "holds a list, expected a mapping"),
        ("seed: ${nowhere}\n", "nowhere"),
        ("seed: ${name}\n", "seed: While dereferencing"),
    ],
)
def test_a_broken_file_is_a_config_error_with_its_place(write: Write, text: str, expected: str) -> None:
    message = refusal(f"config={write('a.yaml', text)}", *REQUIRED)
    assert "a.yaml" in message
    assert expected in message


def test_a_file_that_is_no_text_is_a_config_error(write: Write) -> None:
    path = Path(write("a.yaml", ""))
    path.write_bytes(b"\xff\xfe\x00")
    assert "not a text file in UTF-8" in refusal(f"config={path}")
