"""Derived values: what ``auto`` becomes, sizes, and the resources asked from Ray."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlpost.config import derive as module
from rlpost.config.derive import Bundle, Derived, Device, derive, format_derived, resolve_device, weight_sync_line
from rlpost.config.load import load_config
from rlpost.config.schema import RewardConfig, RunConfig
from rlpost.types import ConfigError


def derived(device: Device = "cpu", row_count: int | None = None, **values: Any) -> Derived:
    config = RunConfig()
    config.schedule.steps = 10
    for key, value in values.items():
        *sections, name = key.split("__")
        target: Any = config
        for section in sections:
            target = getattr(target, section)
        setattr(target, name, value)
    return derive(config, device=device, row_count=row_count)


def test_auto_values_on_cpu() -> None:
    d = derived("cpu")
    assert (d.dtype, d.weight_carrier, d.weight_deltas, d.weight_backend) == ("float32", "collective", False, "gloo")
    assert (d.engine_process, d.attention) == ("in_actor", "padded")


@pytest.mark.parametrize(
    ("device", "mode", "transport", "carrier", "found", "deltas", "line"),
    [
        ("cpu", "split", "auto", "auto", "collective", False, "collective over gloo (weights.transport=auto: it needs neither"),
        ("gpu", "split", "auto", "auto", "collective", False, "collective over nccl (weights.transport=auto"),
        ("gpu", "colocated", "auto", "auto", "ipc", False, "ipc (weights.transport=auto: engines and trainers share GPUs)"),
        ("cpu", "split", "disk", "auto", "disk", False, "disk (weights.transport=disk)"),
        (
            "cpu",
            "split",
            "delta",
            "auto",
            "collective",
            True,
            "deltas by collective over gloo (weights.transport=delta, weights.carrier=auto",
        ),
        ("gpu", "split", "delta", "disk", "disk", True, "deltas by disk (weights.transport=delta, weights.carrier=disk)"),
    ],
)
def test_how_weights_travel_and_why(device: Device, mode: str, transport: str, carrier: str, found: str, deltas: bool, line: str) -> None:
    d = derived(device, placement__mode=mode, weights__transport=transport, weights__carrier=carrier)
    assert (d.weight_carrier, d.weight_deltas) == (found, deltas)
    assert weight_sync_line(d).startswith(line)
    assert weight_sync_line(d) in format_derived(d)


def test_auto_values_on_gpu() -> None:
    d = derived("gpu")
    assert (d.dtype, d.weight_backend, d.engine_process) == ("bfloat16", "nccl", "separate")


def test_explicit_values_are_kept() -> None:
    d = derived("gpu", model__dtype="float32", weights__backend="gloo", engine__process="in_actor", training__attention="flash")
    assert (d.dtype, d.weight_backend, d.engine_process, d.attention) == ("float32", "gloo", "in_actor", "flash")


def test_one_process_cannot_be_two_workers_so_auto_separates() -> None:
    assert derived("cpu", engine__tensor_parallel=2).engine_process == "separate"


@pytest.mark.parametrize("installed", [True, False])
def test_auto_attention_is_flash_only_where_it_can_run(monkeypatch: pytest.MonkeyPatch, installed: bool) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if installed else None)
    assert derived("gpu").attention == ("flash" if installed else "padded")
    assert derived("gpu", model__dtype="float32").attention == "padded"
    assert derived("cpu").attention == "padded"


@pytest.mark.parametrize(
    ("minibatches", "epochs", "staleness", "level", "expected"),
    [
        (1, 1, 0, "none", "current"),
        (2, 1, 0, "none", "recompute"),
        (1, 2, 0, "none", "recompute"),
        (1, 1, 1, "none", "engine"),
        (2, 2, 3, "none", "engine"),
        (1, 1, 0, "token", "current"),
        (1, 2, 0, "token", "recompute"),
        (1, 1, 1, "token", "recompute"),
        (1, 1, 2, "geometric", "recompute"),
    ],
)
def test_auto_old_logprobs(minibatches: int, epochs: int, staleness: int, level: str, expected: str) -> None:
    """With a correction never the engine's: ratio and correction are kept apart (decoupled PPO)."""
    values: dict[str, Any] = {"algorithm__minibatches": minibatches, "algorithm__epochs": epochs, "algorithm__correction__level": level}
    assert derived(schedule__max_staleness=staleness, **values).old_logprobs == expected
    for explicit in ("engine", "recompute"):
        assert derived(schedule__max_staleness=staleness, algorithm__old_logprobs=explicit, **values).old_logprobs == explicit


def test_epochs_multiply_the_optimizer_steps_and_not_the_samples() -> None:
    d = derived(algorithm__epochs=3, algorithm__minibatches=2)
    assert (d.optimizer_steps, d.samples_per_step) == (10 * 3 * 2, 256)
    assert "256 samples, in 2 optimizer step(s) of 128, 3 times" in format_derived(d)


def test_batch_sizes_add_up() -> None:
    d = derived(schedule__prompts_per_step=12, algorithm__group_size=4, algorithm__minibatches=3)
    assert d.samples_per_step == 48
    assert d.minibatch_prompts == (4, 4, 4)
    assert sum(d.minibatch_samples) == 48
    assert d.optimizer_steps == 30


@pytest.mark.parametrize(("staleness", "slots"), [(0, 32), (1, 64), (3, 128)])
def test_buffer_slots_are_staleness_plus_one_times_prompts(staleness: int, slots: int) -> None:
    assert derived(schedule__max_staleness=staleness).buffer_slots == slots


def test_length_of_a_single_turn_is_prompt_plus_continuation() -> None:
    assert derived(data__max_prompt_tokens=100, sampling__max_new_tokens=20).max_model_len == 120


def test_length_of_many_turns_holds_every_turn_and_observation() -> None:
    d = derived(environment__name="calc", environment__max_turns=3, data__max_prompt_tokens=100, sampling__max_new_tokens=20)
    assert d.max_model_len == 100 + 3 * 20 + 2 * module.OBSERVATION_ALLOWANCE_TOKENS


def test_a_longer_evaluation_makes_the_engine_longer() -> None:
    assert derived(evaluation__max_new_tokens=200, evaluation__every=1).max_model_len == 512 + 200
    assert derived(evaluation__max_new_tokens=200, evaluation__every=0).max_model_len == 512 + 64


def test_a_given_length_is_taken() -> None:
    d = derived(engine__max_model_len=700)
    assert (d.max_model_len, d.max_model_len_reason) == (700, "engine.max_model_len")


def test_a_sequence_that_fits_in_no_forward_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"training\.micro_batch_tokens=576 or more"):
        derived(training__micro_batch_tokens=575)
    assert derived(training__micro_batch_tokens=576).micro_batch_tokens == 576


def test_epochs_are_known_when_the_rows_are() -> None:
    assert derived().epochs is None
    assert derived(row_count=160).epochs == 2.0


def test_split_placement_asks_for_a_gpu_a_rank_and_all_gpus_of_an_engine_together() -> None:
    cpus: dict[str, Any] = {"placement__trainer_cpus": 1.0, "placement__engine_cpus": 2.0}
    d = derived("gpu", training__ranks=2, engine__count=2, engine__tensor_parallel=4, **cpus)
    assert d.bundles == (
        Bundle("trainer", 0, {"CPU": 1.0, "GPU": 1.0}),
        Bundle("trainer", 1, {"CPU": 1.0, "GPU": 1.0}),
        Bundle("engine", 0, {"CPU": 2.0, "GPU": 4.0}),
        Bundle("engine", 1, {"CPU": 2.0, "GPU": 4.0}),
    )
    assert d.totals == {"CPU": 6.0, "GPU": 10.0}


def test_colocated_placement_counts_each_gpu_once() -> None:
    d = derived("gpu", placement__mode="colocated", training__ranks=4, engine__count=2, engine__tensor_parallel=2)
    assert d.totals == {"CPU": 3.0, "GPU": 4.0}
    assert [bundle.role for bundle in d.bundles] == ["colocated", "colocated"]


@pytest.mark.parametrize("mode", ["split", "colocated"])
def test_on_cpu_no_gpu_is_asked_for(mode: str) -> None:
    assert derived("cpu", placement__mode=mode, training__ranks=2).totals == {"CPU": 1.5}


@pytest.mark.parametrize(
    ("kl", "reference", "actors", "shown"), [(0.1, "actor", 1, "actor"), (0.1, "initial", 0, "initial"), (0.0, "initial", 0, "none")]
)
def test_only_a_reference_actor_needs_a_place(kl: float, reference: str, actors: int, shown: str) -> None:
    d = derived("gpu", algorithm__kl_coefficient=kl, algorithm__reference=reference)
    assert sum(bundle.role == "reference" for bundle in d.bundles) == actors
    assert d.totals["GPU"] == 2 + actors
    assert d.reference == shown


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"algorithm__name": "sft", "algorithm__kl_coefficient": 0.1}, "none"),
        ({"algorithm__name": "dpo"}, "initial"),
        ({"algorithm__name": "dpo", "algorithm__reference": "precomputed"}, "precomputed"),
        ({"algorithm__name": "kto", "algorithm__reference": "actor"}, "actor"),
        ({"algorithm__name": "orpo"}, "none"),
        ({"algorithm__name": "distillation"}, "initial"),
        ({"algorithm__advantage": "teacher", "algorithm__reference": "actor"}, "actor"),
    ],
)
def test_a_reference_is_kept_where_something_reads_it(values: dict[str, Any], expected: str) -> None:
    assert derived(**values).reference == expected


def roles(d: Derived) -> dict[str, int]:
    found: dict[str, int] = {}
    for bundle in d.bundles:
        found[bundle.role] = found.get(bundle.role, 0) + 1
    return found


def test_a_critic_and_reward_models_have_places_of_their_own_and_functions_have_none() -> None:
    rewards = [RewardConfig(model="a"), RewardConfig(function="exact_match"), RewardConfig(model="b")]
    config = RunConfig()
    config.schedule.steps, config.rewards = 10, rewards
    config.algorithm.name, config.algorithm.critic.ranks = "ppo", 2
    d = derive(config, device="gpu")
    assert roles(d) == {"trainer": 1, "engine": 1, "critic": 2, "reward": 2}
    assert [bundle.index for bundle in d.bundles if bundle.role in ("critic", "reward")] == [0, 1, 0, 1]
    assert (d.totals["GPU"], d.critic_ranks) == (6, 2)
    config.algorithm.name = "grpo"
    d = derive(config, device="gpu")
    assert (roles(d), d.critic_ranks) == ({"trainer": 1, "engine": 1, "reward": 2}, 0)


@pytest.mark.parametrize("mode", ["split", "colocated"])
@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_an_offline_run_asks_for_its_trainers_alone(device: Device, mode: str) -> None:
    """Whatever stands under engine, rewards and placement."""
    config = RunConfig()
    config.schedule.steps, config.algorithm.name, config.placement.mode = 10, "dpo", mode
    config.training.ranks, config.engine.count, config.rewards = 3, 4, [RewardConfig(model="a")]
    d = derive(config, device=device)
    assert (roles(d), d.engines, d.offline) == ({"trainer": 3}, 0, True)
    config.algorithm.reference = "actor"
    assert roles(derive(config, device=device)) == {"trainer": 3, "reference": 1}


def test_offline_a_sample_is_a_row_whatever_the_group_size() -> None:
    d = derived(algorithm__name="sft", algorithm__group_size=8, schedule__prompts_per_step=12, row_count=60)
    assert (d.samples_per_step, d.minibatch_samples, d.optimizer_steps, d.epochs) == (12, (12,), 10, 2.0)


def test_offline_the_longest_sequence_is_data_max_tokens_whatever_the_engine_has() -> None:
    d = derived(algorithm__name="sft", data__max_tokens=300, engine__max_model_len=9999)
    assert (d.max_model_len, d.max_model_len_reason) == (300, "data.max_tokens")


@pytest.mark.parametrize(("name", "needed"), [("sft", 300), ("kto", 300), ("dpo", 600), ("reward_model", 600)])
@pytest.mark.parametrize("engine", [None, 300, 600])
def test_offline_both_answers_of_a_pair_must_fit_in_one_forward(name: str, needed: int, engine: int | None) -> None:
    values: dict[str, Any] = {"algorithm__name": name, "data__max_tokens": 300, "engine__max_model_len": engine}
    assert derived(training__micro_batch_tokens=needed, **values).micro_batch_tokens == needed
    with pytest.raises(ConfigError, match=rf"data\.max_tokens.*set training\.micro_batch_tokens={needed} or more"):
        derived(training__micro_batch_tokens=needed - 1, **values)


def test_the_table_of_an_offline_run_says_nothing_of_engines() -> None:
    text = format_derived(derived(algorithm__name="dpo", schedule__prompts_per_step=16, row_count=80))
    lines = {line[:20].strip(): line[20:] for line in text.splitlines() if line.startswith("  ")}
    assert lines["algorithm"] == "dpo, offline"
    assert lines["batch of a step"] == "16 rows, in 1 optimizer step(s) of 16"
    assert lines["training data"] == "80 rows, 2.00 epochs"
    assert lines["longest sequence"] == "1024 tokens (data.max_tokens)"
    assert lines["reference"] == "initial"
    for word in ("engine", "old logprobs", "rollout buffer", "weight sync", "samples", "advantage"):
        assert word not in text.replace("if every sample", "")


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("dapo", "dapo: advantage group_std, loss policy_clip clipped at -0.2 and +0.28, token_mean"),
        ("gspo", "gspo: advantage group_std, loss gspo clipped at -0.0003 and +0.0004, sequence_mean"),
        ("my.own:Class", "my.own:Class: advantage group_std, loss policy_clip clipped at -0.2 and +0.2, token_mean"),
    ],
)
def test_the_table_says_what_a_name_stands_for(name: str, line: str) -> None:
    assert line in format_derived(derived(algorithm__name=name))


@pytest.mark.parametrize(
    ("setting", "devices", "visible", "expected"),
    [
        ("auto", [], None, "cpu"),
        ("auto", ["nvidia0"], None, "gpu"),
        ("auto", ["nvidia5"], "5", "gpu"),
        ("auto", ["nvidia0"], "", "cpu"),
        ("auto", ["nvidia0"], "-1", "cpu"),
        ("auto", ["nvidiactl"], None, "cpu"),
        ("auto", [], "0", "cpu"),
        ("gpu", [], None, "gpu"),
        ("cpu", ["nvidia0"], "0", "cpu"),
    ],
)
def test_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str, devices: list[str], visible: str | None, expected: str
) -> None:
    for name in devices:
        (tmp_path / name).touch()
    monkeypatch.setattr(module, "_DEVICE_FILES", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    config = RunConfig()
    config.placement.device = setting
    assert resolve_device(config) == expected


def test_the_table_shows_what_a_user_must_know() -> None:
    text = format_derived(derived("gpu", row_count=640, training__ranks=2, engine__count=2, schedule__max_staleness=1))
    for part in ("gpu, bfloat16", "256 samples", "640 rows, 0.50 epochs", "576 tokens (prompt 512 + continuation 64)", "64 groups"):
        assert part in text
    total = next(line for line in text.splitlines() if line.split()[:1] == ["total"])
    assert total.split() == ["total", "4", "2", "4"]


@pytest.mark.parametrize(("name", "gpus", "engines"), [("grpo_qwen", 8, 4), ("grpo_qwen_multinode", 32, 8)])
def test_shipped_gpu_configs_fill_their_nodes(name: str, gpus: int, engines: int) -> None:
    config = load_config([f"config={name}"]).config
    d = derive(config, device=resolve_device(config))
    assert (d.device, d.totals["GPU"], d.engines) == ("gpu", gpus, engines)
    assert all(bundle.resources["GPU"] <= 8 for bundle in d.bundles)
    assert Path(load_config([f"config={name}"]).source).read_text(encoding="utf-8").count("Not run on a GPU yet; passes --dry-run") == 1
