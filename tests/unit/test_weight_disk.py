"""Weights through a directory: a version is a model that others can load too, and it is there whole or not at all."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import resource
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from safetensors import safe_open

from rlpost.types import InfrastructureError, SyncPlan, SyncRefusedError, WeightsManifest
from rlpost.weights import disk
from rlpost.weights.buckets import piece_bytes, plan_buckets
from rlpost.weights.links import LinkSettings, carrier
from rlpost.weights.sender import WeightSender
from rlpost.weights.shards import ShardedWeights

CPU = torch.device("cpu")
SHORT_S = 0.1
LIMIT = 4096
"""Bytes of a file that a "full disk" takes."""


class Model(torch.nn.Module):
    """Some tensors, 12 KB in bfloat16."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        shapes: dict[str, tuple[int, ...]] = {"embed": (50, 64), "experts": (3, 4, 5), "norm": (7,), "scale": (), "head": (50, 64)}
        for name, shape in shapes.items():
            self.register_parameter(name, torch.nn.Parameter(torch.randn(shape, generator=generator), requires_grad=name != "head"))


def settings_of(directory: str | Path, timeout_s: float = 20.0, model_path: str | Path = "") -> LinkSettings:
    return LinkSettings(name="engines", carrier="disk", world=2, timeout_s=timeout_s, directory=str(directory), model_path=str(model_path))


def plan_of(version: int = 1, mode: Any = "full", **options: Any) -> SyncPlan:
    return SyncPlan(version=version, mode=mode, link="engines", **{"base_version": version - 1, "verify": True, **options})


def writer(directory: str | Path, *, seed: int = 1, model_path: str | Path = "") -> WeightSender:
    """A trainer of one rank that has joined."""
    sender = WeightSender(ShardedWeights(Model(seed), "bfloat16", 1024), CPU, host="", keep_baseline=True)
    join(sender, directory, model_path)
    return sender


def join(sender: WeightSender, directory: str | Path, model_path: str | Path = "") -> None:
    sender.serve([settings_of(directory, model_path=model_path)])
    sender.join("engines")


def expected_tensors(seed: int = 1) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().to(torch.bfloat16) for name, parameter in Model(seed).named_parameters()}


def read(directory: str | Path, plan: SyncPlan, manifest: WeightsManifest, timeout_s: float = 20.0) -> dict[str, torch.Tensor]:
    """What an engine gets."""
    buckets = plan_buckets(manifest, trained_only=plan.mode == "trained")
    tensors: dict[str, torch.Tensor] = {}
    stream = carrier("disk").enter(settings_of(directory, timeout_s), CPU).stream(plan, manifest, buckets, [b.size for b in buckets])
    for bucket, buffer in zip(buckets, stream, strict=True):
        for piece in bucket.pieces:
            name, shape = manifest.names[piece.tensor], manifest.shapes[piece.tensor]
            flat = buffer[piece.offset : piece.offset + piece_bytes(manifest, piece)].view(torch.bfloat16)
            whole = tensors.setdefault(name, torch.zeros(shape or (1,), dtype=torch.bfloat16))
            whole[piece.start : piece.stop] = flat.view(piece.stop - piece.start, *shape[1:])
    return {name: tensor.view(manifest.shapes[manifest.names.index(name)]) for name, tensor in tensors.items()}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert sorted(found) == sorted(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def version_path(directory: Path, version: int = 1) -> Path:
    return directory / f"version-{version:08d}"


@pytest.fixture(autouse=True)
def scratch(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where temporary directories are made; whatever happened, nothing stays there."""
    path = tmp_path_factory.mktemp("scratch")
    monkeypatch.setattr(tempfile, "tempdir", str(path))
    yield path
    assert list(path.iterdir()) == []


@pytest.fixture(params=["local", "memory"])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A local directory, and one behind fsspec."""
    return str(tmp_path / "weights") if request.param == "local" else f"memory://weights-{uuid.uuid4().hex}"


def listed(directory: str) -> set[str]:
    """Paths of all files, below the directory."""
    system, root = fsspec.core.url_to_fs(directory)
    return {path.removeprefix(root + "/") for path in system.find(root)} if system.exists(root) else set()


# ---- what is written ---------------------------------------------------------------------------------------------------


def test_an_engine_reads_what_the_trainer_wrote(directory: str) -> None:
    sender = writer(directory)
    assert sender.send_weights(plan_of()).bytes > 12_000
    assert listed(directory) == {"version-00000001/model.safetensors", "version-00000001/MANIFEST.json"}
    assert_same(read(directory, plan_of(), sender.manifest), expected_tensors())


def test_a_message_comes_back(directory: str) -> None:
    sender = writer(directory)
    sender.send_weights(plan_of())
    sender.advance(1)
    sender.shards[0].rows(3, 5)[:] += 1
    plan = plan_of(2, "delta", message_bytes=sender.encode_delta(True).bytes)
    sender.send_message(plan)
    assert {"version-00000002/message.bin", "version-00000002/MANIFEST.json"} <= listed(directory)
    stream = carrier("disk").enter(settings_of(directory), CPU).stream(plan, sender.manifest, (), (plan.message_bytes,))
    [message] = [buffer.clone() for buffer in stream]
    assert message.dtype == torch.uint8 and message.numel() == plan.message_bytes and bytes(message[:4].numpy()) == b"RLWM"


def test_the_files_are_a_hugging_face_model(tmp_path: Path) -> None:
    """As safetensors itself reads them; with the source's configuration in the engines' dtype, and its tokenizer."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text(json.dumps({"model_type": "toy", "torch_dtype": "float32"}))
    (source / "tokenizer.json").write_text("{}")
    (source / "model.safetensors").write_text("other weights")
    writer(tmp_path / "weights", model_path=source).send_weights(plan_of())
    made = version_path(tmp_path / "weights")
    with safe_open(made / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert_same({name: file.get_tensor(name) for name in file.keys()}, expected_tensors())  # noqa: SIM118 - not a mapping
    assert json.loads((made / "config.json").read_text()) == {"model_type": "toy", "dtype": "bfloat16"}
    assert (made / "tokenizer.json").read_text() == "{}"
    manifest = json.loads((made / "MANIFEST.json").read_text())
    assert (manifest["version"], manifest["mode"], manifest["base_version"]) == (1, "full", 0)
    assert manifest["files"] == {file.name: file.stat().st_size for file in made.iterdir() if file.name != "MANIFEST.json"}


def test_a_large_model_is_several_files_with_an_index(monkeypatch: pytest.MonkeyPatch, directory: str) -> None:
    """None is larger than the limit unless one tensor is; the index says where each tensor is."""
    monkeypatch.setattr(disk, "FILE_BYTES", 200)
    sender = writer(directory)
    sender.send_weights(plan_of())
    assert_same(read(directory, plan_of(), sender.manifest), expected_tensors())
    system, root = fsspec.core.url_to_fs(directory)
    index = json.loads(system.cat_file(f"{root}/version-00000001/model.safetensors.index.json"))
    where = index["weight_map"]
    assert sorted(where) == sorted(expected_tensors())
    assert where["experts"] == where["norm"] == where["scale"] and len(set(where.values())) == 3
    assert set(where.values()) == {f"model-{number:05d}-of-00003.safetensors" for number in (1, 2, 3)}
    from safetensors.torch import load

    found: dict[str, torch.Tensor] = {}
    for file in set(where.values()):
        tensors = load(system.cat_file(f"{root}/version-00000001/{file}"))
        assert {name for name in where if where[name] == file} == set(tensors)
        found |= tensors
    assert_same(found, expected_tensors())


def test_only_what_is_trained_may_be_written(directory: str) -> None:
    sender = writer(directory)
    sender.send_weights(plan_of())
    sender.send_weights(plan_of(2, "trained"))
    expected = expected_tensors()
    del expected["head"]
    assert_same(read(directory, plan_of(2, "trained"), sender.manifest), expected)


def test_a_version_that_is_written_again_replaces_the_first(directory: str) -> None:
    """A delta of a version was refused: the full weights of the same version follow."""
    sender = writer(directory)
    sender.send_weights(plan_of(1))
    sender.advance(1)
    sender.send_message(plan_of(2, "delta", message_bytes=sender.encode_delta(True).bytes))
    sender.send_weights(plan_of(2))
    assert {path for path in listed(directory) if path.startswith("version-00000002/")} == {
        "version-00000002/model.safetensors",
        "version-00000002/MANIFEST.json",
    }
    assert_same(read(directory, plan_of(2), sender.manifest), expected_tensors())


# ---- whole or not at all -----------------------------------------------------------------------------------------------


def test_an_engine_that_looks_early_waits_for_the_whole_version(directory: str) -> None:
    sender = writer(directory)
    found: list[Any] = []
    reading = threading.Thread(target=lambda: found.append(read(directory, plan_of(), sender.manifest)))
    reading.start()
    sender.send_weights(plan_of())
    reading.join(20)
    assert_same(found[0], expected_tensors())


def test_a_version_that_does_not_come_is_an_error_in_time_that_names_it(directory: str) -> None:
    sender = writer(directory)
    sender.send_weights(plan_of())
    with pytest.raises(InfrastructureError, match=r"version 2 did not appear in .*weights.* in 0 s"):
        read(directory, plan_of(2), sender.manifest, SHORT_S)


def test_the_manifest_is_written_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Locally the name appears by a rename, when everything else is there; behind fsspec it is copied last."""
    made: list[set[str]] = []
    replace_file = os.replace

    def noted(source: Path, target: Path) -> None:
        made.append({file.name for file in Path(target).parent.iterdir()})
        replace_file(source, target)

    monkeypatch.setattr(os, "replace", noted)
    writer(tmp_path).send_weights(plan_of())
    assert made == [{"model.safetensors", "MANIFEST.json.partial"}]

    copied: list[str] = []
    put_file = MemoryFileSystem.put_file

    def copy(self: MemoryFileSystem, source: str, target: str, **options: Any) -> None:
        copied.append(Path(target).name)
        put_file(self, source, target, **options)

    monkeypatch.setattr(MemoryFileSystem, "put_file", copy)
    monkeypatch.setattr(disk, "FILE_BYTES", 200)
    writer(f"memory://weights-{uuid.uuid4().hex}").send_weights(plan_of())
    assert len(copied) == 5 and copied[-1] == "MANIFEST.json" and copied.count("MANIFEST.json") == 1


def in_a_child(function: Callable[[Connection, str], None], directory: Path) -> tuple[Any, Any]:
    """Run ``function`` in a process of its own; the process and the end of its pipe that is here."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=function, args=(there, str(directory)))
    process.start()
    return process, here


def write_half(pipe: Connection, directory: str) -> None:
    """All buckets but the end of it."""
    sender = WeightSender(ShardedWeights(Model(2), "bfloat16", 1024), CPU, host="", keep_baseline=False)
    outlet = disk.DiskOutlet(settings_of(directory))
    buckets = plan_buckets(sender.manifest)
    outlet.begin(plan_of(), sender.manifest, buckets)
    for bucket in buckets:
        outlet.send(torch.zeros(bucket.size, dtype=torch.uint8))()
    pipe.send("half")
    pipe.recv()  # never comes


def test_a_writer_that_is_killed_leaves_no_version_and_the_next_writes_it(tmp_path: Path) -> None:
    process, pipe = in_a_child(write_half, tmp_path)
    assert pipe.poll(60) and pipe.recv() == "half"
    process.kill()
    process.join()
    assert version_path(tmp_path).exists(), "its files are there"
    sender = writer(tmp_path)
    with pytest.raises(InfrastructureError, match="version 1 did not appear"):
        read(tmp_path, plan_of(), sender.manifest, SHORT_S)
    sender.send_weights(plan_of())
    assert_same(read(tmp_path, plan_of(), sender.manifest), expected_tensors())


def fill_the_disk(pipe: Connection, directory: str) -> None:
    """Weights, and a delta, under a limit on the size of files; then without it. Sends what is said and what is left, each time."""
    sender = writer(directory)
    sender.send_weights(plan_of(1))
    sender.advance(1)
    for name in ("embed", "head"):
        sender.shards[sender.manifest.names.index(name)].rows(0, 50).normal_()
    delta = plan_of(2, "delta", message_bytes=sender.encode_delta(True).bytes)
    assert delta.message_bytes > LIMIT
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for send, plan in ((sender.send_weights, plan_of(2)), (sender.send_message, delta)):
        resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, limits[1]))
        try:
            send(plan)
            pipe.send(("nothing", ""))
        except SyncRefusedError as error:
            pipe.send((str(error), sorted(listed(directory))))
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        join(sender, directory)
    sender.send_message(delta)
    pipe.send(("", sorted(listed(directory))))


def test_a_full_disk_is_said_with_what_to_do_and_nothing_half_written_stays(tmp_path: Path) -> None:
    """The kernel refuses, as it does when a quota is reached; a version that was complete before stays."""
    process, pipe = in_a_child(fill_the_disk, tmp_path)
    first = ["version-00000001/MANIFEST.json", "version-00000001/model.safetensors"]
    for _ in range(2):
        assert pipe.poll(60)
        message, left = pipe.recv()
        assert f"version 2 could not be written to {tmp_path}" in message and "File too large" in message
        assert "make room there or set weights.directory" in message
        assert left == first
    assert pipe.poll(60)
    assert pipe.recv() == ("", [*first, "version-00000002/MANIFEST.json", "version-00000002/message.bin"])
    process.join()


@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_full_bucket_behind_fsspec_is_said_and_nothing_half_written_stays(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """The first file, a later one, the manifest: a part of a version would stay there for ever, as it would be no version."""
    monkeypatch.setattr(disk, "FILE_BYTES", 7000)
    directory = f"memory://weights-{uuid.uuid4().hex}"
    sender = writer(directory)
    put_file = MemoryFileSystem.put_file
    copied: list[str] = []

    def copy(self: MemoryFileSystem, source: str, target: str, **options: Any) -> None:
        if len(copied) == after:
            raise OSError(errno.ENOSPC, "No space left on device")
        copied.append(target)
        put_file(self, source, target, **options)

    monkeypatch.setattr(MemoryFileSystem, "put_file", copy)
    with pytest.raises(SyncRefusedError, match=r"version 1 could not be written to memory://weights-.*No space left.*make room") as caught:
        sender.send_weights(plan_of())
    assert caught.value.reason == "broken"
    assert len(copied) == after and listed(directory) == set()
    monkeypatch.setattr(MemoryFileSystem, "put_file", put_file)
    join(sender, directory)
    sender.send_weights(plan_of())
    assert_same(read(directory, plan_of(), sender.manifest), expected_tensors())


def test_a_link_that_is_given_up_leaves_nothing_half_written(tmp_path: Path) -> None:
    outlet = disk.DiskOutlet(settings_of(tmp_path))
    manifest = ShardedWeights(Model(1), "bfloat16", 1024).manifest
    outlet.begin(plan_of(), manifest, plan_buckets(manifest))
    assert version_path(tmp_path).exists()
    outlet.close()
    assert not version_path(tmp_path).exists()


# ---- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        (plan_of(1, base_version=7), r"holds version 1 as full from 0, expected full from 7"),
        (plan_of(1, "delta", message_bytes=9), r"holds version 1 as full from 0, expected delta from 0"),
    ],
    ids=["base", "mode"],
)
def test_a_version_of_another_kind_or_base_is_refused(directory: str, plan: SyncPlan, says: str) -> None:
    """A delta from a base that the engine does not hold would be wrong weights for ever."""
    sender = writer(directory)
    sender.send_weights(plan_of())
    with pytest.raises(InfrastructureError, match=says):
        read(directory, plan, sender.manifest)


def test_a_file_that_is_not_whole_is_refused(tmp_path: Path) -> None:
    """Another machine may see the manifest before all of a file."""
    sender = writer(tmp_path)
    sender.send_weights(plan_of())
    path = version_path(tmp_path) / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    with pytest.raises(InfrastructureError, match=rf"{path} is not whole: the manifest says {len(content)} bytes"):
        read(tmp_path, plan_of(), sender.manifest)
    path.unlink()
    with pytest.raises(InfrastructureError, match=rf"{path} is not whole"):
        read(tmp_path, plan_of(), sender.manifest)


def test_a_file_of_other_tensors_is_refused(tmp_path: Path) -> None:
    """Of the same sizes, in another order: the bytes of one would be taken for another's."""
    sender = writer(tmp_path)
    sender.send_weights(plan_of())
    path = version_path(tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b"embed", b"table"))
    with pytest.raises(InfrastructureError, match=rf"{path} holds other tensors than the trainer's manifest says"):
        read(tmp_path, plan_of(), sender.manifest)


# ---- old versions ------------------------------------------------------------------------------------------------------


def test_versions_behind_the_newest_acknowledged_are_deleted(directory: str) -> None:
    sender = writer(directory)
    for version in (1, 2, 3):
        sender.send_weights(plan_of(version))
    assert_same(read(directory, plan_of(1), sender.manifest), expected_tensors())
    sender.advance(2)
    assert {path.partition("/")[0] for path in listed(directory)} == {"version-00000002", "version-00000003"}
    assert_same(read(directory, plan_of(2), sender.manifest), expected_tensors())


def test_what_users_put_beside_the_versions_stays(directory: str) -> None:
    """A copy of a version under a name of its own, among others that begin alike."""
    system, root = fsspec.core.url_to_fs(directory)
    sender = writer(directory)
    sender.send_weights(plan_of(1))
    kept = {f"{name}/model.safetensors" for name in ("best", "version-00000001-best", "version-of-mine")}
    for path in kept:
        system.makedirs(f"{root}/{path}".rpartition("/")[0], exist_ok=True)
        system.pipe_file(f"{root}/{path}", b"kept")
    sender.send_weights(plan_of(2))
    sender.advance(2)
    assert {path for path in listed(directory) if not path.startswith("version-00000002/")} == kept
