"""The process group that joins trainer rank 0 (rank 0) and every engine worker (ranks 1..n), and the sending end.

The group is made by hand from a store, beside and independent of any default group: the trainer ranks have one of their
own, and vLLM creates and destroys another. gloo on CPU and NCCL on GPU run the same lines (NCCL: not run on a GPU yet).
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from rlpost.types import InfrastructureError, WeightsManifest
from rlpost.weights.buckets import tensor_bytes
from rlpost.weights.fingerprint import Fingerprint

SENDER_RANK = 0


def serve_store(host: str, world: int, timeout_s: float) -> dist.TCPStore:
    """The sender's rendezvous point, on a port that the system picks (``store.port``)."""
    return dist.TCPStore(host, 0, world, is_master=True, wait_for_workers=False, timeout=datetime.timedelta(seconds=timeout_s))


def join_store(host: str, port: int, world: int, timeout_s: float) -> dist.TCPStore:
    """A receiver's connection to the sender's rendezvous point."""
    return dist.TCPStore(host, port, world, is_master=False, timeout=datetime.timedelta(seconds=timeout_s))


def make_group(store: dist.TCPStore, *, backend: str, rank: int, world: int, timeout_s: float) -> Any:
    """Blocks until all ``world`` members called it; raises after ``timeout_s``."""
    timeout = datetime.timedelta(seconds=timeout_s)
    if backend == "gloo":
        return dist.ProcessGroupGloo(dist.PrefixStore("rlpost-weights", store), rank, world, timeout)
    if backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(dist.PrefixStore("rlpost-weights", store), rank, world, options)
    raise AssertionError(f"unknown collective backend {backend!r}")


def broadcast(group: Any, buffer: torch.Tensor) -> None:
    """Send (rank 0) or receive ``buffer``, and wait for it."""
    options = dist.BroadcastOptions()
    options.rootRank = SENDER_RANK
    options.rootTensor = 0
    group.broadcast([buffer], options).wait()


def views(buffer: torch.Tensor, manifest: WeightsManifest, bucket: tuple[int, int]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a bucket as views of its flat byte buffer."""
    offset = 0
    for index in range(*bucket):
        shape, dtype = manifest.shapes[index], getattr(torch, manifest.dtypes[index])
        count = 1
        for size in shape:
            count *= size
        yield manifest.names[index], buffer[offset : offset + count * dtype.itemsize].view(dtype).view(shape)
        offset += tensor_bytes(shape, manifest.dtypes[index])


def bucket_bytes(manifest: WeightsManifest, bucket: tuple[int, int]) -> int:
    """Size of a bucket's buffer."""
    return sum(tensor_bytes(manifest.shapes[i], manifest.dtypes[i]) for i in range(*bucket))


def send(
    group: Any | None, manifest: WeightsManifest, tensors: Iterable[tuple[str, torch.Tensor]], device: torch.device
) -> tuple[str, int]:
    """Gather and send every tensor, a bucket at a time. Every trainer rank iterates; only the one with a group sends.

    Returns the fingerprint of what was sent (on the sender; others return an empty one) and the bytes. When a broadcast fails the
    rest is gathered all the same before the error is raised: the trainer ranks stay in step and can send again over a new group.
    """
    fingerprint, total = Fingerprint(), 0
    failure = ""
    stream = iter(tensors)
    for bucket in manifest.buckets:
        size = bucket_bytes(manifest, bucket)
        total += size
        buffer = torch.zeros(size, dtype=torch.uint8, device=device) if group is not None else torch.empty(0)
        targets = views(buffer, manifest, bucket) if group is not None else ((manifest.names[i], None) for i in range(*bucket))
        for expected, target in targets:
            name, tensor = next(stream)
            if name != expected:
                raise AssertionError(f"weights are streamed in another order than declared: {name!r} instead of {expected!r}")
            full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            if target is not None:
                target.copy_(full)
                fingerprint.add(name, target)
        if group is not None and not failure:
            try:
                broadcast(group, buffer)
            except Exception as error:  # noqa: BLE001 - raised below, when all ranks have gathered everything
                # Only its text: the exception would keep this frame, and with it the group, alive.
                failure = f"{type(error).__name__}: {error}"
    if failure:
        raise InfrastructureError(f"weights could not be sent to all engines: {failure}")
    return (fingerprint.hexdigest() if group is not None else ""), total
