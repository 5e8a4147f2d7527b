"""The sync benchmark without its parts: what it refuses before Ray starts, the shapes, the change of weights, the figures."""

from __future__ import annotations

import asyncio
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch

from rlpost import bench
from rlpost.checkpoint.directory import MARK, checkpoint_root
from rlpost.models import shapes
from rlpost.types import ConfigError, InfrastructureError, SyncReport
from rlpost.weights import bench_actors, bench_plan, bench_report, bench_sync

Refused = Callable[..., str]


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Refused:
    """Runs the command, which must end with one message and exit code 2 before Ray starts; returns the message."""

    def started(*_: Any, **__: Any) -> None:
        raise AssertionError("Ray was started although the input cannot work")

    monkeypatch.setattr(ray, "init", started)
    monkeypatch.setenv("RLPOST_CACHE", str(tmp_path / "cache"))

    def run(*words: str) -> str:
        assert bench.main(["sync", *words]) == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        lines = printed.err.splitlines()
        errors = [number for number, line in enumerate(lines) if line.startswith("error: ")]
        assert len(errors) == 1
        return "\n".join(lines[errors[0] :])

    return run


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_unknown_shape_lists_the_shapes_and_their_parameters(refused: Refused) -> None:
    message = refused("--model", "77m")
    assert all(name in message for name in shapes.SHAPES)
    assert "151,028,992" in message


def test_a_directory_without_safetensors_is_refused(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert "safetensors" in refused("--model", str(tmp_path))


def test_unknown_transport_and_carrier_name_the_known_ones(refused: Refused) -> None:
    assert "collective, ipc, disk, delta" in refused("--model", "1m", "--transport", "collective,rdma")
    assert "'rdma'" in refused("--model", "1m", "--transport", "collective,rdma")
    assert "auto, collective, ipc, disk" in refused("--model", "1m", "--carrier", "rdma")


@pytest.mark.parametrize("changed", ["0", "-0.1", "1.5", "nan"])
def test_a_share_that_is_none_is_refused(refused: Refused, changed: str) -> None:
    assert "--changed" in refused("--model", "1m", "--changed", changed)


@pytest.mark.parametrize("option", ["--engines", "--ranks", "--repeats", "--bucket-mib"])
def test_counts_begin_at_one(refused: Refused, option: str) -> None:
    assert f"{option} 0" in refused("--model", "1m", option, "0")


def test_a_trainable_that_is_no_pattern_is_refused(refused: Refused) -> None:
    assert "--trainable" in refused("--model", "1m", "--trainable", "layers.(0")


def test_too_little_memory_is_said_with_the_sum_before_anything_is_built(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_plan, "free_memory_gib", lambda: 10.0)
    message = refused("--model", "1b", "--dtype", "float32")
    assert "10.0 GiB free" in message
    total = float(message.partition("needs about ")[2].partition(" GiB")[0])
    parts = [float(line.split()[0]) for line in message.splitlines() if " GiB  " in line]
    assert total == pytest.approx(sum(parts), abs=0.3)
    assert total > 11.0  # weights of the trainer, one engine and a baseline, float32
    assert not shapes.shape_path("1b").exists()


def test_a_directory_that_cannot_be_written_is_refused(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "--directory" in refused("--model", "1m", "--directory", str(tmp_path / "file" / "weights"))


def test_a_result_file_that_cannot_be_written_is_refused_before_minutes_are_spent(refused: Refused, tmp_path: Path) -> None:
    assert "--json" in refused("--model", "1m", "--json", str(tmp_path / "nowhere" / "sync.json"))
    assert "--json" in refused("--model", "1m", "--json", str(tmp_path))


def test_a_model_is_needed(refused: Refused) -> None:
    assert "--model is missing" in refused()


def test_replaying_needs_a_run_with_two_complete_checkpoints(refused: Refused, tmp_path: Path) -> None:
    assert "config.yaml" in refused("from-run", str(tmp_path))
    (tmp_path / "config.yaml").write_text("model: {path: 'embedded:tiny-sort5'}\ntraining: {trainable: all}\n")
    for step, complete in ((1, True), (2, False)):
        directory = checkpoint_root(tmp_path) / f"step_{step:06d}"
        directory.mkdir(parents=True)
        if complete:
            (directory / MARK).touch()
    assert "1 complete checkpoints" in refused("from-run", str(tmp_path))
    (checkpoint_root(tmp_path) / "step_000010").mkdir()
    (checkpoint_root(tmp_path) / "step_000010" / MARK).touch()
    assert [path.name for path in bench_plan.find_checkpoints(tmp_path)] == ["step_000001", "step_000010"]


def test_a_disk_without_room_for_two_versions_is_refused(tmp_path: Path) -> None:
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    with pytest.raises(ConfigError, match="2 versions"):
        bench_plan.check_directory(str(tmp_path), free)
    bench_plan.check_directory(str(tmp_path), 1)
    bench_plan.check_directory("memory://weights", free)


# ---- shapes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", shapes.SHAPES)
def test_a_shape_has_about_the_parameters_of_its_name(name: str) -> None:
    meant = float(name[:-1]) * {"m": 1e6, "b": 1e9}[name[-1]]
    assert shapes.SHAPES[name].parameters == pytest.approx(meant, rel=0.09)


def test_two_shapes_are_those_of_published_models() -> None:
    assert shapes.SHAPES["600m"].parameters == 596_049_920
    assert shapes.SHAPES["8b"].parameters == 8_190_735_360


@pytest.mark.parametrize("tied", [True, False])
def test_a_built_shape_is_the_model_that_was_counted(tmp_path: Path, tied: bool) -> None:
    from transformers import AutoModelForCausalLM

    shape = shapes.Shape(hidden=32, layers=2, heads=4, kv_heads=2, head_dim=16, feed_forward=48, vocabulary=96, tied=tied)
    shapes.write_model(shape, tmp_path, file_bytes=10_000)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert {name: tuple(parameter.shape) for name, parameter in model.named_parameters()} == dict(shape.tensors())
    facts = bench_plan._directory_facts("tiny", tmp_path)
    assert facts.parameters == shape.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert 0.015 < float(model.model.embed_tokens.weight.detach().std()) < 0.025
    assert bool((model.model.norm.weight == 1).all())


# ---- changes and gauges ----------------------------------------------------------------------------------------------


def test_a_change_changes_the_bits_that_an_engine_in_bfloat16_holds_however_often() -> None:
    generator = torch.Generator().manual_seed(1)
    values = torch.cat([torch.randn(5000, generator=generator) * 0.02, torch.tensor([0.0, -0.0, 1.0, -1.0, 0.999, 1e-8, 300.0, -4e4])])
    for _ in range(200):
        changed = bench_actors.moved(values, generator)
        assert bool((changed.to(torch.bfloat16).view(torch.int16) != values.to(torch.bfloat16).view(torch.int16)).all())
        values = changed
    assert bool(values.isfinite().all())
    assert float(values.abs().min()) > 1e-9
    assert float(values.abs().max()) < 4e4


def test_a_rank_changes_the_share_of_what_is_trained_and_nothing_else() -> None:
    rank = bench_actors.MeasuredRank.__new__(bench_actors.MeasuredRank)
    rank.rank, rank.device = 0, torch.device("cpu")
    rank.model = torch.nn.Sequential(torch.nn.Linear(500, 400, bias=False), torch.nn.Linear(300, 200, bias=False))
    rank.model[1].weight.requires_grad_(False)
    before = [parameter.detach().clone() for parameter in rank.model.parameters()]
    rank.change(0.01, 1)
    first = rank.model[0].weight.detach() != before[0]
    assert 0.008 < float(first.float().mean()) < 0.012
    assert torch.equal(rank.model[1].weight, before[1])
    middle = rank.model[0].weight.detach().clone()
    rank.change(0.01, 2)
    assert not torch.equal(rank.model[0].weight.detach() != middle, first)  # another turn chooses other elements


@pytest.mark.skipif(not bench_actors.CLEAR_PEAK.exists(), reason="only Linux can reset a process's peak")
def test_the_peak_is_that_since_the_last_look() -> None:
    size = 64 << 20
    before = bench_actors.settle()
    torch.ones(size, dtype=torch.uint8)
    first = bench_actors.peak()
    after = bench_actors.settle()
    second = bench_actors.peak()
    assert before is not None and first is not None and after is not None and second is not None
    assert first - before > 0.9 * size / 2**30
    assert second - after < 0.5 * size / 2**30


def test_a_machine_that_cannot_tell_its_peak_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bench_actors, "CLEAR_PEAK", tmp_path / "nowhere" / "clear_refs")
    monkeypatch.setattr(bench_actors, "STATUS", tmp_path / "status")
    assert bench_actors.settle() is None
    assert bench_actors.peak() is None


# ---- transports that cannot run here ---------------------------------------------------------------------------------


class FakeParts:
    """Trainer ranks and engines that only listen."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    async def call(self, method: str, *arguments: Any, timeout_s: float | None = None) -> list[Any]:
        self.calls.append((method, arguments))
        return [None]


class FakeTransport:
    """Its first sync fails for ipc."""

    def __init__(self, name: str, *_: Any) -> None:
        self.name, self.carrier = name, "disk"
        self.observed: list[int] = []

    async def connect(self) -> None:
        pass

    async def sync(self, version: int) -> SyncReport:
        if self.name == "ipc":
            raise InfrastructureError("engine workers [1] are on another machine")
        return report(version=version)

    async def observe(self, version: int) -> None:
        self.observed.append(version)


def report(**changes: Any) -> SyncReport:
    """A sync of 1 MB in a second."""
    return SyncReport(**{"version": 1, "mode": "full", "bytes": 1_000_000, "seconds": 1.0, "paused_s": 0.5, **changes})


def settings(**changes: Any) -> bench_plan.BenchSettings:
    """Of disk and ipc."""
    common: dict[str, Any] = {
        "model": "1m", "model_path": "", "transports": ("ipc", "disk", "delta"), "explicit": False, "carrier": "disk", "engines": 1,
        "ranks": 1, "dtype": "bfloat16", "device": "cpu", "bucket_mib": 8, "repeats": 3, "changed": 0.01,
    }  # fmt: skip
    return bench_plan.BenchSettings(**{**common, **changes})


def connected(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> bench_sync._Bench:
    monkeypatch.setattr(bench_sync, "Transport", FakeTransport)
    fakes: Any = FakeParts()
    tried = bench_sync._Bench(settings(**changes), fakes, fakes, 900_000, lambda _: None)
    asyncio.run(tried.connect())
    return tried


def test_a_transport_that_cannot_run_here_is_left_out_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = connected(monkeypatch)
    assert [one.transport for one in tried.series] == ["disk", "delta"]
    assert tried.left_out == {"ipc": "engine workers [1] are on another machine"}


def test_a_transport_that_was_asked_for_by_name_and_cannot_run_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InfrastructureError, match=r"ipc cannot run here: engine workers \[1\]"):
        connected(monkeypatch, explicit=True)


def test_after_each_sync_all_other_transports_know_what_engines_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = connected(monkeypatch)
    asyncio.run(tried.rounds())
    disk, delta = tried.transports
    versions = range(1, 1 + tried.version)
    assert isinstance(disk, FakeTransport) and isinstance(delta, FakeTransport)
    synced = [set(versions) - set(one.observed) for one in (disk, delta)]
    assert [len(one.turns) for one in tried.series] == [3, 3]
    # Version 1 was the one of ipc, which failed, and 2 was disk's first, before delta was there.
    assert synced[0] & synced[1] == {1, 2}
    changes = [arguments for method, arguments in tried.trainers.calls if method == "change"]  # type: ignore[attr-defined]
    assert changes == [(0.01, turn) for turn in range(1, 7)]


def test_checkpoints_are_replayed_in_order_with_the_delta_before_others_send_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = connected(monkeypatch, changed=None, checkpoints=("run/a", "run/b", "run/c"))
    order: list[str] = []
    for transport in tried.transports:
        monkeypatch.setattr(transport, "sync", lambda version, name=transport.name: _noted(order, name, version))
    asyncio.run(tried.replay())
    assert order == ["delta", "disk", "delta", "disk"]
    assert [turn.step for turn in tried.series[0].turns] == ["a -> b", "b -> c"]
    loads = [arguments for method, arguments in tried.trainers.calls if method == "load_model"]  # type: ignore[attr-defined]
    assert loads == [("run/a",), ("run/b",), ("run/c",)]


async def _noted(order: list[str], name: str, version: int) -> SyncReport:
    order.append(name)
    return report(version=version)


# ---- figures ---------------------------------------------------------------------------------------------------------


def measured(**changes: Any) -> bench_sync.Measured:
    """Two transports, three turns each."""
    chosen = settings(transports=("collective", "delta"), **changes)
    series = []
    for name, size, seconds in (("collective", 1_000_000, (0.2, 0.1, 0.4)), ("delta", 20_000, (0.3, 0.2, 0.6))):
        mode: Any = "delta" if name == "delta" else "full"
        fraction = 0.01 if name == "delta" else math.nan
        turns = [
            bench_sync.Turn(
                step=f"turn {number}",
                report=report(mode=mode, bytes=size, seconds=each, paused_s=each / 2, apply_s=0.05, changed_fraction=fraction),
                copy_s=0.01,
                bare_s=0.1 if name == "collective" else None,
            )
            for number, each in enumerate(seconds)
        ]
        series.append(
            bench_sync.Series(
                transport=name, carrier="collective", connect_s=1.0, first=report(seconds=2.0), kept_trainer_gib=0.25,
                kept_engine_gib=None, turns=turns, peak_trainer_gib=0.5, peak_engine_gib=None,
            )
        )  # fmt: skip
    return bench_sync.Measured(settings=chosen, parameters=900_000, trained=900_000, series=series, left_out={"ipc": "elsewhere"})


def test_figures_are_medians_over_the_turns_and_json() -> None:
    found = json.loads(json.dumps(bench_report.result(measured(), 900_000), allow_nan=False))
    collective, delta = found["transports"]["collective"], found["transports"]["delta"]
    assert (collective["seconds"], collective["paused_s"], delta["seconds"]) == (0.2, 0.1, 0.3)
    assert collective["gbytes_per_s"] == pytest.approx(1e6 / 0.2 / 1e9)
    assert collective["ratio_to_copy"] == pytest.approx(20.0)
    assert collective["ratio_to_bare_broadcast"] == pytest.approx(0.5)
    assert "ratio_to_bare_broadcast" not in delta
    assert (collective["changed_fraction"], delta["changed_fraction"]) == (None, 0.01)
    assert (collective["extra_peak_gib"], collective["engine_extra_peak_gib"]) == (0.75, None)
    assert (found["parameters"], found["changed"], found["repeats"]) == (900_000, 0.01, 3)
    assert found["left_out"] == {"ipc": "elsewhere"}
    assert set(found["machine"]) == {"processor", "cpus", "memory_gib", "system"}
    planner = {
        "bytes",
        "seconds",
        "paused_s",
        "stage_s",
        "gather_s",
        "encode_s",
        "transfer_s",
        "apply_s",
        "extra_peak_gib",
        "ratio_to_copy",
    }
    assert planner <= set(collective) and planner <= set(delta)


def test_the_table_names_every_transport_its_figures_and_what_was_left_out() -> None:
    text = bench_report.format_result(bench_report.result(measured(), 900_000))
    lines = text.splitlines()
    assert "900,000 parameters" in lines[0]
    row = next(line for line in lines if line.startswith("collective")).split()
    title = lines[1].replace("x copy", "x_copy").replace("of bare", "of_bare").split()
    assert dict(zip(title, row, strict=True)) | {"seconds": "0.200", "MB": "1.00", "of_bare": "0.50", "engine+": "-"} == dict(
        zip(title, row, strict=True)
    )
    assert "1.111% of the bytes" in text  # 20,000 of 900,000 elements of two bytes
    assert "left out: ipc: elsewhere" in text


def test_transitions_between_checkpoints_are_listed_one_by_one() -> None:
    found = bench_report.result(measured(changed=None, checkpoints=("a", "b", "c", "d")), 900_000)
    assert [entry["delta"]["seconds"] for entry in found["transitions"]] == [0.3, 0.2, 0.6]
    assert [entry["step"] for entry in found["transitions"]] == ["turn 0", "turn 1", "turn 2"]
    assert found["changed"] is None
    assert "turn 2" in bench_report.format_result(found)


def test_links_of_transports_have_names_of_their_own_at_the_engines() -> None:
    from rlpost.types import SyncPlan
    from rlpost.weights.bench_links import TransportEngines
    from rlpost.weights.links import LinkSettings

    pool: Any = SimpleNamespace(settings=[])
    engines = TransportEngines(pool, "delta")
    link = LinkSettings(name="engines-0", carrier="disk", world=2, timeout_s=1.0)
    plan = SyncPlan(version=1, mode="full", base_version=0, link="engines-0", verify=True)
    assert engines._renamed(link).name == engines._renamed(plan).link == "delta:engines-0"
    assert engines._renamed(7) == 7
