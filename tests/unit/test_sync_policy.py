"""What a sync moves, when it is proven, which fallbacks are too many; and that every setting of it reaches the run."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from rlpost.config.derive import derive, resolve_device
from rlpost.config.schema import RunConfig, WeightsConfig
from rlpost.driver.setup import engine_settings, sync_settings
from rlpost.types import InfrastructureError
from rlpost.weights.policy import Fallbacks, SyncPolicy, SyncSettings


def policy(frozen: bool = True, /, **settings: Any) -> SyncPolicy:
    common: dict[str, Any] = {"carrier": "collective", "deltas": True, "engine_dtype": "float32", "bucket_bytes": 1, "timeout_s": 1.0}
    return SyncPolicy(SyncSettings(**{**common, **settings}), frozen)


def modes(subject: SyncPolicy, syncs: int) -> list[str]:
    """Of syncs that all go well."""
    found: list[str] = []
    for _ in range(syncs):
        found.append(subject.mode())
        subject.committed(subject.mode())
    return found


@pytest.mark.parametrize(
    ("subject", "expected"),
    [
        (policy(keyframe_every=2), ["full", "delta", "delta", "trained", "delta", "delta", "trained"]),
        (policy(False, keyframe_every=1), ["full", "delta", "full", "delta"]),
        (policy(carrier="disk", keyframe_every=1), ["full", "delta", "full", "delta"]),
        (policy(deltas=False), ["full", "trained", "trained"]),
        (policy(False, deltas=False), ["full", "full", "full"]),
        (policy(deltas=False, carrier="disk"), ["full", "full", "full"]),
        (policy(deltas=False, carrier="ipc"), ["full", "trained", "trained"]),
        (policy(deltas=False, adapters=True), ["full", "adapter", "adapter"]),
        (policy(deltas=False, shared_gpu=True), ["full", "full", "full"]),
        (policy(deltas=False, adapters=True, shared_gpu=True), ["full", "full", "full"]),
    ],
)
def test_the_first_sync_is_full_and_what_follows_is_the_least_that_will_do(subject: SyncPolicy, expected: list[str]) -> None:
    assert modes(subject, len(expected)) == expected


def test_a_dense_delta_counts_as_a_keyframe() -> None:
    subject = policy(keyframe_every=2)
    modes(subject, 2)
    assert subject.mode() == "delta"
    assert subject.without_delta() == "trained"
    subject.committed("trained")
    assert modes(subject, 3) == ["delta", "delta", "trained"]


def test_a_sync_that_was_not_committed_changes_nothing() -> None:
    subject = policy(keyframe_every=1)
    assert [subject.mode(), subject.mode(), subject.without_delta()] == ["full", "full", "full"]
    subject.committed("full")
    assert [subject.mode(), subject.mode(), subject.verify("delta")] == ["delta", "delta", True]


@pytest.mark.parametrize(("changed", "compared", "pays"), [(0, 0, True), (0, 8, True), (2, 8, True), (3, 8, False), (8, 8, False)])
def test_a_delta_pays_up_to_the_share_of_changed_elements(changed: int, compared: int, pays: bool) -> None:
    assert policy(max_changed=0.25).delta_pays(changed, compared) is pays


@pytest.mark.parametrize(
    ("verify", "mode", "expected"),
    [
        ("auto", "delta", "TTTTTTT"),
        ("auto", "full", "TFFTFFT"),
        ("auto", "trained", "TFFTFFT"),
        ("auto", "adapter", "TFFTFFT"),
        ("every_sync", "full", "TTTTTTT"),
        ("every_n", "delta", "TFFTFFT"),
        ("first", "delta", "TFFFFFF"),
    ],
)
def test_which_syncs_are_proven(verify: str, mode: Any, expected: str) -> None:
    subject = policy(verify=verify, verify_every=3)
    found = ""
    for _ in expected:
        found += "T" if subject.verify(mode) else "F"
        subject.committed(mode)
    assert found == expected


# ---- fallbacks -------------------------------------------------------------------------------------------------------


def test_reasons_are_counted_for_one_sync_and_rows_for_one_engine_over_all() -> None:
    subject = Fallbacks(most=2)
    subject.count("engine-0", "timeout", "late")
    subject.count("engine-1", "timeout", "late too")
    assert subject.reasons == {"timeout": 2}
    subject.begin_sync()
    assert subject.reasons == {}
    subject.went_well("engine-1")
    subject.count("engine-0", "corrupt", "damaged")
    subject.count("engine-1", "corrupt", "damaged")
    with pytest.raises(InfrastructureError) as stop:
        subject.count("engine-0", "wrong_base", "another version")
    assert str(stop.value) == (
        "engine-0 needed a full weight sync 3 times in a row, more than weights.max_consecutive_fallbacks=2: "
        "(1) late; (2) damaged; (3) another version"
    )
    assert subject.reasons == {"corrupt": 2, "wrong_base": 1}, "the one that was too many is counted as well"
    subject.count("engine-1", "corrupt", "still allowed")


def test_no_fallback_at_all_can_be_asked_for() -> None:
    with pytest.raises(InfrastructureError, match=r"engine-0 needed a full weight sync 1 times in a row.*=0: \(1\) late"):
        Fallbacks(most=0).count("engine-0", "timeout", "late")


# ---- settings --------------------------------------------------------------------------------------------------------

GPU: dict[str, Any] = {"placement.device": "gpu"}
DELTA: dict[str, Any] = {"weights.transport": "delta"}
DISK: dict[str, Any] = {"weights.transport": "disk"}

USED: list[tuple[str, Any, dict[str, Any], dict[str, Any]]] = [
    ("weights.transport", "disk", {}, {"carrier": "disk"}),
    ("weights.transport", "delta", {}, {"deltas": True}),
    ("weights.carrier", "disk", DELTA, {"carrier": "disk"}),
    ("weights.backend", "gloo", GPU, {"backend": "gloo"}),
    ("weights.bucket_mib", 9, {}, {"bucket_bytes": 9 << 20}),
    ("weights.directory", "s3://weights", DISK, {"directory": "s3://weights"}),
    ("weights.pause", "drain", {}, {"drain_s": 900.0, "engine.pause": "drain"}),
    ("weights.pause", "abort", {}, {"engine.pause": "abort"}),
    ("weights.verify", "first", {}, {"verify": "first"}),
    ("weights.verify_every", 7, {}, {"verify_every": 7}),
    ("weights.keyframe_every", 7, DELTA, {"keyframe_every": 7}),
    ("weights.max_changed", 0.25, DELTA, {"max_changed": 0.25}),
    ("weights.max_consecutive_fallbacks", 7, {}, {"max_consecutive_fallbacks": 7}),
    ("weights.timeout_s", 77.0, {}, {"timeout_s": 77.0}),
    ("engine.request_timeout_s", 77.0, {"weights.pause": "drain"}, {"drain_s": 77.0}),
    ("model.dtype", "bfloat16", {}, {"engine_dtype": "bfloat16", "engine.dtype": "bfloat16"}),
    ("training.lora.rank", 4, {}, {"adapters": True, "engine.lora_rank": 4}),
    ("training.lora.sync", "merged", {"training.lora.rank": 4}, {"adapters": False, "engine.lora_rank": 0}),
    ("placement.mode", "colocated", GPU, {"carrier": "ipc", "backend": "gloo", "shared_gpu": True, "engine.sleep_mode": True}),
]
"""A setting, another value of it, what must be set besides, and what of the sync's and the engine's settings must follow it."""


def settings_of(values: dict[str, Any], run_dir: Path) -> dict[str, Any]:
    """The sync's settings, and as ``engine.NAME`` the engine's, of a configuration."""
    config = RunConfig()
    config.schedule.steps = 10
    config.placement.device = "cpu"
    for key, value in values.items():
        *sections, name = key.split(".")
        target: Any = config
        for section in sections:
            target = getattr(target, section)
        assert hasattr(target, name), key
        setattr(target, name, value)
    derived = derive(config, device=resolve_device(config))
    sync, engine = sync_settings(config, derived, "model", run_dir), engine_settings(config, derived, "model", 0)
    return {**vars(sync), **{f"engine.{name}": value for name, value in vars(engine).items()}}


@pytest.mark.parametrize(("key", "value", "besides", "expected"), USED)
def test_a_setting_reaches_the_sync(key: str, value: Any, besides: dict[str, Any], expected: dict[str, Any], tmp_path: Path) -> None:
    before, after = settings_of(besides, tmp_path), settings_of({**besides, key: value}, tmp_path)
    assert {name: after[name] for name in before if before[name] != after[name]} == expected


def test_no_setting_of_the_weights_is_forgotten_and_none_of_the_sync_is_left_at_its_default(tmp_path: Path) -> None:
    assert {key for key, _, _, _ in USED if key.startswith("weights.")} == {f"weights.{field.name}" for field in fields(WeightsConfig)}
    followed = {name for _, _, _, names in USED for name in names if not name.startswith("engine.")}
    assert followed | {"model_path"} == {field.name for field in fields(SyncSettings)}
    found = settings_of({}, tmp_path)
    assert (found["model_path"], found["directory"], found["bucket_bytes"]) == ("model", str(tmp_path / "weights"), 8 << 20)
