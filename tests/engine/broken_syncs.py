"""The ways in which a full weight sync fails: each function makes one fail and raises what the engine answered."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from weight_sender import Sender
from weight_versions import Versions, requests_of

from rlpost.types import InfrastructureError, SyncRefusedError

SHORT_S = 2.0
"""Deadline of links on which nothing comes."""
SLACK_S = 30.0
"""Far more than the deadline, far less than gloo's half-hour default."""

Failure = Callable[[Versions, int], None]


class TrainerDiedError(Exception):
    """What kills the sender of a test."""


def sender_dies(versions: Versions, version: int, carrier: str = "collective") -> None:
    """The sender is gone after some of the buckets."""
    sender = versions.sender
    sender.join(carrier)
    shard = sender.sender.shards[5]

    def die(start: int, stop: int) -> torch.Tensor:
        raise TrainerDiedError

    sender.sender.shards[5] = replace(shard, rows=die)
    applying = versions.engine.begin("apply_weights", sender.plan(version, "full"))
    try:
        sender.sender.send_weights(sender.plan(version, "full"))
    except TrainerDiedError:
        sender.close()
    finally:
        sender.sender.shards[5] = shard
    applying.result(SLACK_S)


def sender_with_ipc_dies(versions: Versions, version: int) -> None:
    """The same over shared memory."""
    sender_dies(versions, version, "ipc")


def sender_is_silent(versions: Versions, version: int, carrier: str = "collective") -> None:
    """The link is there and nothing is ever sent."""
    versions.sender.join(carrier, SHORT_S)
    versions.engine.call("apply_weights", versions.sender.plan(version, "full"), timeout_s=SHORT_S + SLACK_S)


def sender_with_ipc_is_silent(versions: Versions, version: int) -> None:
    """The same over shared memory."""
    sender_is_silent(versions, version, "ipc")


def version_never_appears(versions: Versions, version: int) -> None:
    """The same over a directory: the message says where the engine looked."""
    with pytest.raises(SyncRefusedError, match=rf"version {version} did not appear in {versions.sender.directory}") as caught:
        sender_is_silent(versions, version, "disk")
    raise caught.value


def sender_never_joins(versions: Versions, version: int) -> None:
    """The door is open, its other member never comes."""
    versions.engine.call("enter_link", versions.sender.serve("collective", SHORT_S), 1, timeout_s=SHORT_S + SLACK_S)


def nobody_is_at_the_door(versions: Versions, version: int) -> None:
    """The sender's process is gone before the engine calls."""
    link = versions.sender.serve("collective", SHORT_S)
    versions.sender.close()
    versions.engine.call("enter_link", link, 1, timeout_s=SHORT_S + SLACK_S)


def the_link_was_never_joined(versions: Versions, version: int) -> None:
    """A sync right after a join that failed."""
    with pytest.raises(SyncRefusedError):
        sender_never_joins(versions, version)
    versions.engine.call("apply_weights", versions.sender.plan(version, "full"))


def file_is_cut(versions: Versions, version: int) -> None:
    """A directory whose disk lost the end of a file after its manifest was written."""
    file = written(versions, version)
    with file.open("r+b") as handle:
        handle.truncate(file.stat().st_size - 4096)
    with pytest.raises(SyncRefusedError, match=r"model\.safetensors is not whole") as caught:
        versions.engine.call("apply_weights", versions.sender.plan(version, "full"))
    raise caught.value


def file_is_of_another_model(versions: Versions, version: int) -> None:
    """A directory that two runs share by mistake."""
    file = written(versions, version)
    content = bytearray(file.read_bytes())
    content[100] ^= 1
    file.write_bytes(content)
    versions.engine.call("apply_weights", versions.sender.plan(version, "full"))


def written(versions: Versions, version: int) -> Path:
    """The weights' file of a version that was sent to the directory."""
    versions.sender.join("disk")
    versions.sender.load(versions.models[version])
    versions.sender.sender.send_weights(versions.sender.plan(version, "full"))
    return Path(str(versions.sender.directory)) / f"version-{version:08d}" / "model.safetensors"


def other_tensors(versions: Versions, version: int, weights: Mapping[str, torch.Tensor], names: str) -> None:
    """A trainer whose model is not the engine's; the error must have these names."""
    sender = Sender(versions.engine, weights, version=versions.current)
    assert sender.describe()[0]["proof"] == "received", "such weights cannot be written in place"
    sender.join("collective")
    try:
        with pytest.raises(SyncRefusedError, match=names) as caught:
            sender.apply(sender.plan(version, "full"))
    finally:
        sender.close()
        before = versions.sender.workers
        assert versions.sender.describe() == before, "the right tensors lie where they did"
    raise caught.value


def a_parameter_is_missing(versions: Versions, version: int) -> None:
    """All that is sent arrives; it is not all that the engine has."""
    weights = versions.models[version].weights
    other_tensors(versions, version, {name: tensor for name, tensor in weights.items() if "layers.1.mlp" not in name}, "layers.1.mlp")


def a_part_of_a_fused_parameter_is_missing(versions: Versions, version: int) -> None:
    """The engine keeps query, key and value in one tensor: two thirds of it are not all of it."""
    weights = versions.models[version].weights
    left_out = "model.layers.0.self_attn.k_proj.weight"
    other_tensors(versions, version, {name: tensor for name, tensor in weights.items() if name != left_out}, left_out)


def a_name_is_unknown(versions: Versions, version: int) -> None:
    """A tensor that the engine's model does not have."""
    stranger = "model.layers.7.mlp.down_proj.weight"
    other_tensors(versions, version, {stranger: torch.zeros(3), **versions.models[version].weights}, r"layers\.7")


def a_shape_is_wrong(versions: Versions, version: int) -> None:
    """A tensor of another size than the engine's."""
    other_tensors(versions, version, {**versions.models[version].weights, "model.norm.weight": torch.zeros(63)}, r"model\.norm\.weight")


def check_failure_and_healing(versions: Versions, fail: Failure) -> None:
    """The failure is an error of this engine, in time; running requests survive it; the next full sync heals.

    No token that half new weights sampled is handed out as one of a known version.
    """
    old, new = versions.current, versions.prepare()
    running = requests_of(8, seed=16, max_new_tokens=60, temperature=2.0)
    versions.engine.call("begin", running, 5)
    started = time.perf_counter()
    with pytest.raises(InfrastructureError, match="engine-0"):
        fail(versions, new)
    assert time.perf_counter() - started < SHORT_S + SLACK_S
    versions.engine.call("free")
    versions.sender.join("collective")
    versions.sender.sync(versions.models[new], new)
    versions.check_all(running, {old, new})
    versions.check_serves(new)


def check_refusal_when_resumed_half_new(versions: Versions) -> None:
    """After a failed sync a driver may resume an engine to end; tokens of undefined weights must not look like the old version's."""
    new = versions.prepare()
    running = requests_of(3, seed=23, max_new_tokens=60, temperature=2.0)
    versions.engine.call("begin", running, 1)
    with pytest.raises(InfrastructureError):
        sender_dies(versions, new)
    versions.engine.call("free")
    versions.engine.call("resume")
    fresh = requests_of(3, seed=19)
    for outcome in [*versions.engine.finish(running), *versions.engine.outcomes(fresh)]:
        assert isinstance(outcome, InfrastructureError) and "no policy version" in str(outcome)
    versions.sender.join("collective")
    versions.sender.sync(versions.models[new], new)
    versions.check_serves(new)
