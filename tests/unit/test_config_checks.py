"""Cross-field checks: every combination that cannot work is refused with its reason and a fix, before Ray starts."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlpost.config import checks
from rlpost.config.checks import check
from rlpost.config.derive import derive, resolve_device
from rlpost.config.fields import schema_fields
from rlpost.config.load import load_config
from rlpost.config.schema import RewardConfig, RunConfig
from rlpost.types import ConfigError


def clean_config(device: str = "cpu", /, **values: Any) -> RunConfig:
    """A config without faults; ``section__name=value`` changes it."""
    config = RunConfig()
    config.model.path, config.data.train, config.schedule.steps = "embedded:tiny", "embedded:sort5", 10
    config.rewards = [RewardConfig(function="exact_match")]
    config.placement.device = device
    for key, value in values.items():
        *sections, name = key.split("__")
        target: Any = config
        for section in sections:
            target = getattr(target, section)
        setattr(target, name, value)
    return config


def refusal(config: RunConfig) -> str:
    with pytest.raises(ConfigError) as caught:
        check(config)
    return str(caught.value)


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_a_clean_config_passes(device: str) -> None:
    check(clean_config(device))


def test_a_clean_config_has_no_warnings() -> None:
    assert check(clean_config()) == []


REFUSED: list[tuple[str, dict[str, Any], list[str]]] = [
    ("one sample has no group to compare with", {"algorithm__group_size": 1}, ["algorithm.group_size=2", "advantage would be 0"]),
    (
        "minibatches do not divide the prompts",
        {"schedule__prompts_per_step": 10, "algorithm__minibatches": 4},
        ["schedule.prompts_per_step=8 or 12", "algorithm.minibatches=5"],
    ),
    (
        "more minibatches than prompts",
        {"schedule__prompts_per_step": 3, "algorithm__minibatches": 4},
        ["schedule.prompts_per_step=4,", "algorithm.minibatches=3"],
    ),
    (
        "a rank without a trajectory",
        {"schedule__prompts_per_step": 2, "algorithm__group_size": 2, "training__ranks": 8},
        ["4 trajectories for training.ranks=8", "schedule.prompts_per_step=4", "training.ranks=4"],
    ),
    (
        "a rank without a trajectory in a minibatch",
        {"schedule__prompts_per_step": 4, "algorithm__group_size": 2, "algorithm__minibatches": 2, "training__ranks": 8},
        ["4 trajectories for training.ranks=8", "schedule.prompts_per_step=8"],
    ),
    ("evaluation without data", {"evaluation__every": 5}, ["data.evaluation is not set", "evaluation.every=0"]),
    ("greedy training", {"sampling__temperature": 0.0}, ["sampling.temperature is 0.0", "evaluation.temperature"]),
    ("negative temperature", {"sampling__temperature": -1.0}, ["sampling.temperature is -1.0"]),
    ("hotter training than vLLM takes", {"sampling__temperature": 2.01}, ["sampling.temperature is 2.01", "at most 2", "vLLM refuses"]),
    ("hotter evaluation than vLLM takes", {"evaluation__temperature": 3.0}, ["evaluation.temperature is 3.0", "at most 2", "vLLM refuses"]),
    ("a temperature that is no number", {"sampling__temperature": float("nan")}, ["sampling.temperature is nan", "at most 2"]),
    ("a reference actor that nobody asks", {"algorithm__reference": "actor"}, ["kl_coefficient above 0", "remove it"]),
    ("a reference path without KL", {"algorithm__reference_path": "embedded:tiny"}, ["algorithm.reference_path", "would not be used"]),
    (
        "a reference path that an average of the policy's own weights makes useless",
        {"algorithm__reference_path": "embedded:tiny", "algorithm__kl_coefficient": 0.1, "algorithm__reference": "moving_average"},
        ["found moving_average"],
    ),
    (
        "ratio 1 over several optimizer steps",
        {"algorithm__old_logprobs": "current", "algorithm__minibatches": 2},
        ["algorithm.minibatches=2", "ratio would be 1"],
    ),
    (
        "ratio 1 off-policy",
        {"algorithm__old_logprobs": "current", "schedule__max_staleness": 1},
        ["schedule.max_staleness=1", "ratio would be 1"],
    ),
    ("warm-up longer than the run", {"training__optimizer__warmup_steps": 11}, ["10 optimizer steps", "warmup_steps=11"]),
    ("a pattern that is none", {"training__trainable": "layers.("}, ["training.trainable='layers.('", "regular expression"]),
    ("no reward at all", {"rewards": []}, ["rewards is empty", "rewards=[{function: exact_match}]"]),
    (
        "two rewards with one name",
        {"rewards": [RewardConfig(function="a.b:score"), RewardConfig(function="c.d:score")]},
        ["2 entries are called score", "rewards.N.name"],
    ),
    ("blocks that CPU attention has not", {"engine__block_size": 16}, ["multiple of 32", "engine.block_size=32"]),
    (
        "one process for two workers",
        {"engine__process": "in_actor", "engine__tensor_parallel": 2},
        ["engine.process=in_actor with engine.tensor_parallel=2", "separate"],
    ),
    ("engines too short for prompt and turn", {"engine__max_model_len": 100}, ["512 + 64", "set it to 576"]),
    ("a sequence that fits in no forward", {"training__micro_batch_tokens": 500}, ["576 tokens", "training.micro_batch_tokens=576"]),
    (
        "staleness without overlap",
        {"placement__mode": "colocated", "schedule__max_staleness": 1},
        ["phases never overlap", "placement.mode=split"],
    ),
    ("flash attention on CPU", {"training__attention": "flash"}, ["needs a GPU", "auto or padded"]),
    ("nccl on CPU", {"weights__backend": "nccl"}, ["weights.backend=auto or gloo"]),
    ("a carrier of no deltas", {"weights__carrier": "ipc"}, ["weights.carrier=ipc is for weights.transport=delta", "that is auto"]),
    (
        "a carrier beside another transport",
        {"weights__carrier": "disk", "weights__transport": "collective"},
        ["weights.carrier=disk", "that is collective", "set weights.transport=disk or delta"],
    ),
    (
        "a directory for deltas that do not go there",
        {"weights__directory": "/shared", "weights__transport": "delta"},
        ["weights.directory=/shared would not be used", "travel by collective", "weights.carrier=disk with delta"],
    ),
    (
        "a directory that nobody writes to",
        {"weights__directory": "/shared", "weights__transport": "ipc"},
        ["weights.directory=/shared would not be used", "travel by ipc", "weights.transport=disk"],
    ),
    (
        "deltas to engines that forget their weights",
        {"placement__device": "gpu", "placement__mode": "colocated", "weights__transport": "delta"},
        ["weights.transport=delta with placement.mode=colocated", "weights.transport=auto"],
    ),
    (
        "memory shared between GPUs that are not",
        {"placement__device": "gpu", "weights__transport": "ipc"},
        ["ipc needs engines and trainers on the same GPUs", "weights.transport=collective"],
    ),
    (
        "deltas in memory shared between GPUs that are not",
        {"placement__device": "gpu", "weights__transport": "delta", "weights__carrier": "ipc"},
        ["ipc needs engines and trainers on the same GPUs", "placement.mode is split"],
    ),
    ("no change is small enough", {"weights__max_changed": 0.0}, ["weights.max_changed is 0.0"]),
    ("deltas without end", {"weights__keyframe_every": 0}, ["weights.keyframe_every is 0"]),
    ("a part that asks Ray for nothing", {"placement__engine_cpus": 0.0}, ["placement.engine_cpus is 0", "0.1 or more"]),
    ("an unknown tracker", {"observe__trackers": ["console", "mlflow"]}, ["'mlflow' is not known", "tensorboard"]),
    ("a tracker twice", {"observe__trackers": ["console", "console"]}, ["names console twice"]),
    ("chunked prefill with seeds on CPU", {"engine__extra": {"enable_chunked_prefill": True}}, ["enable_chunked_prefill", "CPU"]),
    ("an evaluation top_k that is no number of tokens", {"evaluation__top_k": 0}, ["evaluation.top_k is 0", "-1 (off)"]),
]


@pytest.mark.parametrize(("values", "expected"), [(v, e) for _, v, e in REFUSED], ids=[name for name, _, _ in REFUSED])
def test_refused(values: dict[str, Any], expected: list[str]) -> None:
    message = refusal(clean_config(**values))
    for part in expected:
        assert part in message
    assert "\n" not in message, "one fault is one problem"


GPU_REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (
        "colocated engines on fewer GPUs",
        {"placement__mode": "colocated", "training__ranks": 8},
        "set engine.count=8",
    ),
    (
        "colocated tensor-parallel engines",
        {"placement__mode": "colocated", "training__ranks": 8, "engine__count": 4, "engine__tensor_parallel": 2},
        "set it to 1, or split",
    ),
    (
        "NCCL on a shared GPU",
        {"placement__mode": "colocated", "training__ranks": 1, "engine__count": 1, "weights__backend": "nccl"},
        "two members on one GPU",
    ),
    (
        "colocated engines that are spread",
        {
            "placement__mode": "colocated",
            "training__ranks": 1,
            "engine__count": 1,
            "placement__engine_strategy": "spread",
        },
        "set placement.engine_strategy=pack",
    ),
    ("flash in float32", {"training__attention": "flash", "model__dtype": "float32"}, "no float32 kernels"),
]


@pytest.mark.parametrize(("values", "expected"), [(v, e) for _, v, e in GPU_REFUSED], ids=[name for name, _, _ in GPU_REFUSED])
def test_refused_on_gpu(values: dict[str, Any], expected: str) -> None:
    message = refusal(clean_config("gpu", **values))
    assert expected in message
    assert "\n" not in message


@pytest.mark.parametrize(
    "values",
    [
        {"training__attention": "flash"},
        {"weights__backend": "nccl"},
        {"placement__trainer_cpus": 0.0},
        {"engine__block_size": 16},
        {"placement__mode": "colocated", "training__ranks": 4, "engine__count": 4},
        {"placement__mode": "colocated", "training__ranks": 4, "engine__count": 4, "weights__transport": "ipc"},
        {"weights__transport": "delta", "weights__carrier": "disk", "weights__directory": "s3://weights"},
        {"engine__extra": {"enable_chunked_prefill": True}},
    ],
)
def test_what_only_a_cpu_cannot_do_is_allowed_on_gpu(values: dict[str, Any]) -> None:
    check(clean_config("gpu", **values))


@pytest.mark.parametrize(
    "values",
    [
        {"algorithm__name": "my_pkg.mine:Mine", "algorithm__group_size": 1},
        {"environment__name": "my_pkg.mine:Game", "rewards": []},
        {"schedule__prompts_per_step": 1, "algorithm__group_size": 2, "training__ranks": 2},
        {"training__optimizer__warmup_steps": 20, "algorithm__minibatches": 2},
        {"algorithm__kl_coefficient": 0.1},
        {"algorithm__kl_coefficient": 0.1, "algorithm__reference": "actor", "algorithm__reference_path": "embedded:tiny"},
        {"rewards": [RewardConfig(function="a:score"), RewardConfig(function="b:score", name="other")]},
        {"training__trainable": r"layers\.[12]\."},
        {"evaluation__every": 5, "data__evaluation": "embedded:sort5"},
        {"sampling__temperature": 2.0, "evaluation__temperature": 2.0},
        {"weights__transport": "disk", "weights__directory": "/shared"},
        {"weights__transport": "delta", "weights__carrier": "disk", "weights__directory": "/shared"},
        {"weights__transport": "delta", "weights__carrier": "ipc"},
        {"weights__transport": "delta", "placement__mode": "colocated"},
        {"weights__transport": "delta", "weights__max_changed": 1.0, "weights__max_consecutive_fallbacks": 0},
    ],
)
def test_neighbours_of_the_refused_are_allowed(values: dict[str, Any]) -> None:
    check(clean_config(**values))


@pytest.mark.parametrize("name", sorted(checks.ENGINE_OWNED))
def test_engine_arguments_that_rlpost_sets_are_refused_in_extra(name: str) -> None:
    message = refusal(clean_config("gpu", engine__extra={name: 1, "enforce_eager": True}))
    assert f"engine.extra.{name}: rlpost sets {name} itself" in message
    assert "enforce_eager" not in message
    key = checks.ENGINE_OWNED[name]
    if key is not None:
        assert key in {field.key for field in schema_fields()}


BOUNDS: list[tuple[tuple[str, ...], list[float]]] = [
    (checks.AT_LEAST_ONE, [0, -1]),
    (checks.AT_LEAST_ZERO, [-1]),
    (checks.ABOVE_ZERO, [0, -0.5]),
    (checks.SHARES, [-0.1, 1.1]),
    (checks.SHARES_ABOVE_ZERO, [0, 1.1]),
    (checks.BELOW_ONE, [-0.1, 1.0]),
    (checks.TEMPERATURES, [2.1, 1000.0]),
]


@pytest.mark.parametrize(("key", "value"), [(key, value) for keys, values in BOUNDS for key in keys for value in values])
def test_numbers_out_of_range_are_refused_with_their_key(key: str, value: float) -> None:
    message = refusal(clean_config(**{key.replace(".", "__"): value}))
    assert f"{key} is {value}, expected" in message


def test_every_number_of_the_schema_has_a_bound_or_a_reason_not_to() -> None:
    rewards = {f"algorithm.{name}" for name in ("shaping.clip_low", "shaping.clip_high", "filter.least_mean", "filter.most_mean")}
    unbounded = {"algorithm.entropy_coefficient", "algorithm.preference.margin", "evaluation.top_k", "rewards.N.weight", *rewards}
    kinds = ("<class 'int'>", "<class 'float'>", "int | None", "float | None")
    numbers = {field.key for field in schema_fields() if str(field.annotation) in kinds}
    bounded = {key for keys, _ in BOUNDS for key in keys}
    assert numbers - bounded - unbounded == set()


def test_all_problems_come_in_one_message() -> None:
    message = refusal(clean_config(algorithm__group_size=1, evaluation__every=1, weights__backend="nccl", schedule__max_staleness=-1))
    assert message.startswith("4 settings cannot work:")
    for key in ("algorithm.group_size", "data.evaluation", "weights.backend", "schedule.max_staleness"):
        assert key in message


@pytest.mark.parametrize("values", [{}, {"algorithm__minibatches": 2}, {"schedule__max_staleness": 2}, {"placement__mode": "colocated"}])
@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_checking_and_deriving_change_no_setting(device: str, values: dict[str, Any]) -> None:
    config = clean_config(device, **values)
    before = copy.deepcopy(config)
    if "schedule__max_staleness" not in values or device == "cpu":
        check(config)
    derive(config, device=resolve_device(config))
    assert config == before


# Inputs ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def model_directory(here: Path, **values: Any) -> str:
    directory = here / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(values), encoding="utf-8")
    return "./model"


@pytest.mark.parametrize("path", ["./nowhere", "../nowhere", "/no/such/model", "a/b/c", "~/no-such-model", "models/mine"])
def test_a_missing_model_directory_is_refused_with_its_absolute_path(here: Path, path: str) -> None:
    (here / "models").mkdir()
    message = refusal(clean_config(model__path=path))
    assert f"no directory {Path(path).expanduser().absolute()}" in message
    assert "embedded:NAME" in message


@pytest.mark.parametrize("path", ["Qwen/Qwen3-4B-Base", "embedded:anything", "gpt2", "org/name_1.5"])
def test_hub_and_embedded_names_pass(here: Path, path: str) -> None:
    check(clean_config(model__path=path))


def test_a_bare_name_that_is_no_directory_is_a_warning(here: Path) -> None:
    assert any("name on the hub" in warning for warning in check(clean_config(model__path="tiny")))


def test_a_model_path_that_is_a_file_or_no_model_is_refused(here: Path) -> None:
    (here / "file").write_text("", encoding="utf-8")
    (here / "empty").mkdir()
    assert "is a file" in refusal(clean_config(model__path="./file"))
    assert "has no config.json" in refusal(clean_config(model__path="./empty"))


def test_sequences_longer_than_the_model_s_positions_are_refused(here: Path) -> None:
    path = model_directory(here, max_position_embeddings=256)
    message = refusal(clean_config(model__path=path))
    assert "576 tokens" in message
    assert "256 positions" in message
    check(clean_config(model__path=path, data__max_prompt_tokens=192))


def test_tensor_parallel_must_divide_the_heads(here: Path) -> None:
    path = model_directory(here, num_attention_heads=4)
    assert "4 attention heads" in refusal(clean_config("gpu", model__path=path, engine__tensor_parallel=3))
    check(clean_config("gpu", model__path=path, engine__tensor_parallel=2))


@pytest.mark.parametrize("key", ["data__train", "data__evaluation"])
def test_missing_or_unreadable_data_is_refused(here: Path, key: str) -> None:
    (here / "data.csv").write_text("", encoding="utf-8")
    common: dict[str, Any] = {"evaluation__every": 1, "data__evaluation": "embedded:sort5"}
    assert str(here / "no.jsonl") in refusal(clean_config(**{**common, key: "no.jsonl"}))
    assert "expected .jsonl or .parquet" in refusal(clean_config(**{**common, key: "data.csv"}))
    assert "is a directory" in refusal(clean_config(**{**common, key: str(here)}))
    assert "names nothing" in refusal(clean_config(**{**common, key: "hf:"}))
    (here / "yes.jsonl").write_text("{}", encoding="utf-8")
    check(clean_config(**{**common, key: "yes.jsonl"}))


def test_missing_template_and_resume_directory_are_refused(here: Path) -> None:
    message = refusal(clean_config(model__chat_template="no.jinja", resume="runs/no"))
    assert str(here / "no.jinja") in message
    assert str(here / "runs/no") in message
    (here / "runs" / "no").mkdir(parents=True)
    (here / "no.jinja").write_text("x", encoding="utf-8")
    check(clean_config(model__chat_template="no.jinja", resume="runs/no"))


# Warnings -------------------------------------------------------------------------------------------------------------

WARNED: list[tuple[str, dict[str, Any], str]] = [
    ("gpu", {"engine__count": 2, "training__ranks": 2}, "engines (2 of 4 GPUs) and trainers take turns"),
    ("cpu", {"schedule__prompts_per_step": 2, "engine__count": 4}, "50% of the engines idle"),
    ("cpu", {"schedule__prompts_per_step": 5, "engine__count": 4}, "about 38% of engine time is idle"),
    ("cpu", {"schedule__max_staleness": 1, "algorithm__old_logprobs": "recompute"}, "is not corrected"),
    ("cpu", {"model__dtype": "bfloat16"}, "slower than float32"),
    ("cpu", {"engine__tensor_parallel": 2}, "slower than 2 engines"),
    ("cpu", {"data__evaluation": "embedded:sort5"}, "it is never read"),
    ("cpu", {"data__evaluation": "embedded:sort5", "evaluation__every": 1, "evaluation__samples": 4}, "greedy samples"),
    ("cpu", {"checkpoint__at_end": False}, "nothing is saved"),
]


@pytest.mark.parametrize(("device", "values", "expected"), WARNED)
def test_waste_is_warned_of(device: str, values: dict[str, Any], expected: str) -> None:
    warnings = check(clean_config(device, **values))
    assert len(warnings) == 1
    assert expected in warnings[0]


def test_a_package_that_is_not_here_is_only_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    find: Callable[[str], Any] = lambda name: None  # noqa: E731 - one expression
    monkeypatch.setattr("importlib.util.find_spec", find)
    warnings = check(clean_config("gpu", observe__trackers=["wandb"], data__train="hf:org/name:train", schedule__max_staleness=1))
    assert any("pip install wandb" in warning for warning in warnings)
    assert any("rlpost[datasets]" in warning for warning in warnings)


@pytest.mark.parametrize("name", ["grpo_qwen", "grpo_qwen_multinode"])
def test_shipped_gpu_configs_pass_anywhere(here: Path, name: str) -> None:
    warnings = check(load_config([f"config={name}"]).config)
    assert [w for w in warnings if "not installed here" not in w] == []


ELSEWHERE: dict[str, Any] = {
    "model__path": "/workspace/models/q", "model__chat_template": "/workspace/t.jinja", "data__train": "/workspace/train.jsonl",
    "data__evaluation": "/workspace/test.jsonl", "evaluation__every": 1, "resume": "/workspace/runs/a",
}  # fmt: skip


def test_what_only_the_nodes_see_is_a_warning_below_their_directories_and_refused_beside_them(tmp_path: Path) -> None:
    config = clean_config(**{key: value.replace("/workspace", f"{tmp_path}/w") if isinstance(value, str) else value
                             for key, value in ELSEWHERE.items()})  # fmt: skip
    [warning] = check(config, [f"{tmp_path}/w"])
    assert warning.startswith("not checked here, only the run sees it: ")
    keys = ("model.path", "model.chat_template", "data.train", "data.evaluation", "resume")
    assert [key for key in keys if f"{key}={tmp_path}/w/" not in warning] == []
    for elsewhere in ((), [f"{tmp_path}/other"], [f"{tmp_path}/w/mod"]):
        with pytest.raises(ConfigError, match=r"5 settings cannot work"):
            check(config, elsewhere)


def test_what_is_here_is_checked_though_the_nodes_see_it_too(tmp_path: Path) -> None:
    (tmp_path / "train.csv").touch()
    with pytest.raises(ConfigError, match=r"data.train=.* ends in \.csv"):
        check(clean_config(data__train=str(tmp_path / "train.csv")), [str(tmp_path)])
