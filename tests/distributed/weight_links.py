"""Both ends of a weight sync for tests: trainer ranks with a toy model whose shards are uneven, and receivers that keep what comes.

A receiver does what an engine worker does with a link, and knows nothing else of the trainer than the manifest.
"""

from __future__ import annotations

import datetime
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gloo_ranks import GROUP_TIMEOUT_S, RECEIVER, RankProcesses, Trainers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from rlpost.types import Layout, SyncPlan, WeightsManifest
from rlpost.weights import shards
from rlpost.weights.buckets import Bucket, piece_bytes, plan_buckets
from rlpost.weights.fingerprint import MODULUS, TensorHashes
from rlpost.weights.links import Inlet, LinkSettings, carrier
from rlpost.weights.sender import SendReport, WeightSender
from rlpost.weights.shards import ShardedWeights

TOY = "weight_links:ToyRank"
"""For ``RankProcesses.trainers(kind=...)``."""

CPU = torch.device("cpu")
TIMEOUT_S = 20.0
SHORT_S = 3.0
"""Deadline of links that must fail."""

LONG_S = 60.0
"""A deadline that must not be needed."""

SLACK_S = 25.0
"""Far more than the short deadline, far less than gloo's half-hour default."""

BITS = {2: torch.int16, 4: torch.int32}


# ---- trainer ranks -----------------------------------------------------------------------------------------------------

SHARDED = {
    "even": (6, 4),
    "uneven": (7, 5),
    "one_row": (1, 9),
    "two_rows": (2, 3),
    "vector": (5,),
    "short_vector": (1,),
    "experts": (5, 2, 3),
    "frozen": (8, 3),
    "frozen_uneven": (5, 2),
}
"""Parameters that FSDP2 shards by rows: rows that ranks cannot share evenly, and fewer rows than ranks."""


class Toy(torch.nn.Module):
    """Also a parameter under two names, and three that are not sharded: a scalar, one that lies transposed, and every second column."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        for name, shape in SHARDED.items():
            trained = not name.startswith("frozen")
            self.register_parameter(name, torch.nn.Parameter(torch.randn(shape, generator=generator), requires_grad=trained))
        self.tied = self.even
        self.scalar = torch.nn.Parameter(torch.randn((), generator=generator))
        self.transposed = torch.nn.Parameter(torch.randn((5, 6), generator=generator).t())
        self.strided = torch.nn.Parameter(torch.randn((4, 6), generator=generator)[:, ::2])

    def unsharded(self) -> set[torch.nn.Parameter]:
        """What FSDP2 would refuse."""
        return {self.scalar, self.transposed, self.strided}


class Large(torch.nn.Module):
    """One tensor of 128 MiB in float32."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((32768, 1024), float(seed)))

    def unsharded(self) -> set[torch.nn.Parameter]:
        """Nothing."""
        return set()


MODELS: dict[str, Callable[[int], Any]] = {"toy": Toy, "large": Large}


class ToyRank:
    """One trainer rank with a toy model ("toy" or "large"), as TrainerRank is with a real one."""

    def __init__(self, rank: int, world: int, settings: str) -> None:
        self.rank, self.world, self.kind = rank, world, settings
        self.sender: WeightSender | None = None

    def address(self) -> tuple[str, int]:
        """Where the ranks meet: rank 0 listens already, so that no other has to try again."""
        if self.rank:
            return "", 0
        self.store = dist.TCPStore("127.0.0.1", 0, self.world, is_master=True, wait_for_workers=False)
        return "127.0.0.1", int(self.store.port)

    def setup(self, host: str, port: int) -> None:
        """Join the other ranks and shard the model."""
        torch.set_num_threads(1)
        if self.rank:
            self.store = dist.TCPStore(host, port, self.world)
        timeout = datetime.timedelta(seconds=GROUP_TIMEOUT_S)
        dist.init_process_group("gloo", store=self.store, rank=self.rank, world_size=self.world, timeout=timeout)
        self.model: Any = MODELS[self.kind](1)
        fully_shard(self.model, mesh=init_device_mesh("cpu", (self.world,)), ignored_params=self.model.unsharded())

    def open_weights(self, engine_dtype: str, bucket_bytes: int, keep_baseline: bool, chunk_elements: int = 1 << 20) -> WeightsManifest:
        """As TrainerRank; ``chunk_elements`` are compared at once."""
        shards.CHUNK_ELEMENTS = chunk_elements
        self.sender = WeightSender(
            ShardedWeights(self.model, engine_dtype, bucket_bytes), CPU, host="127.0.0.1", keep_baseline=keep_baseline
        )
        return self.sender.manifest

    def weights(self, method: str, *arguments: Any) -> Any:
        """As TrainerRank."""
        return getattr(self.sender, method)(*arguments)

    def full(self) -> dict[str, torch.Tensor]:
        """All parameters whole, read without the code under test."""
        return {
            name: (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).detach().clone()
            for name, parameter in self.model.named_parameters()
        }

    def local(self) -> dict[str, torch.Tensor]:
        """What FSDP2 gave this rank (rank 0: also what is not sharded)."""
        return {
            name: parameter._local_tensor.detach().clone() if isinstance(parameter, DTensor) else parameter.detach().clone()
            for name, parameter in self.model.named_parameters()
            if self.rank == 0 or isinstance(parameter, DTensor)
        }

    @torch.no_grad()
    def put(self, name: str, indices: Sequence[int], values: Sequence[int]) -> None:
        """Give single elements (flat indices of the whole tensor) these float32 bits, wherever they are."""
        parameter = dict(self.model.named_parameters())[name]
        sharded = isinstance(parameter, DTensor)
        local = parameter._local_tensor if isinstance(parameter, DTensor) else parameter.data
        rows = parameter.shape[0] if parameter.ndim else 1
        mine = torch.arange(rows).chunk(self.world) if sharded else [torch.arange(rows)] * self.world
        first = int(mine[self.rank].min()) if self.rank < len(mine) else rows
        row = math.prod(parameter.shape[1:])
        new = torch.tensor(list(values), dtype=torch.int64).to(torch.int32).view(torch.float32)
        for index, value in zip(indices, new, strict=True):
            inner = index - first * row
            if 0 <= inner < local.numel():
                position = torch.unravel_index(torch.tensor(inner), local.shape) if local.ndim else ()
                local[tuple(position)] = value

    def measured_send(self, plan: SyncPlan) -> tuple[SendReport, int]:
        """Send all weights; with the report, by how many bytes this process grew meanwhile at most (Linux)."""
        Path("/proc/self/clear_refs").write_text("5")  # the peak is that of now
        before = _status_bytes("VmRSS")
        report = self.weights("send_weights", plan)
        return report, _status_bytes("VmHWM") - before


def _status_bytes(field: str) -> int:
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field + ":")]
    return int(line.split()[1]) << 10


# ---- receivers ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Received:
    """What one receiver has after one sync: whole tensors and their fingerprint, or the message."""

    fingerprint: str = ""
    tensors: dict[str, torch.Tensor] | None = None
    in_place: int = 0
    """Buffers that were written where they were wanted."""
    message: bytes = b""


@dataclass(frozen=True, kw_only=True)
class Conduct:
    """How a receiver behaves: it joins after ``delay_s``, leaves after ``buckets`` (None: all), and may drop what came.

    ``placed``: it wants every second buffer in memory of its own, as an engine that keeps a large tensor as it is sent.
    """

    delay_s: float = 0.0
    buckets: int | None = None
    keep: bool = True
    placed: bool = False
    layout: Layout | None = None


def _buffers(
    inlet: Inlet, plan: SyncPlan, manifest: WeightsManifest, placed: bool
) -> tuple[tuple[Bucket, ...], dict[int, torch.Tensor], Iterator[torch.Tensor]]:
    """The buckets (none: a message), memory in which some buffers are wanted, and the buffers."""
    if plan.mode == "delta":
        return (), {}, inlet.stream(plan, manifest, (), (plan.message_bytes,))
    buckets = plan_buckets(manifest, trained_only=plan.mode == "trained")
    wanted = {number: torch.zeros(bucket.size, dtype=torch.uint8) for number, bucket in enumerate(buckets) if placed and number % 2}
    return buckets, wanted, inlet.stream(plan, manifest, buckets, [bucket.size for bucket in buckets], wanted.get)


def _receive_sync(inlet: Inlet, plan: SyncPlan, manifest: WeightsManifest, conduct: Conduct, held: dict[str, torch.Tensor]) -> Received:
    """One sync; ``held`` is what earlier ones left and is brought up to date."""
    buckets, wanted, stream = _buffers(inlet, plan, manifest, conduct.placed)
    if not buckets:
        [message] = [buffer.numpy().tobytes() for buffer in stream]
        return Received(message=message)
    hashes = TensorHashes(manifest, conduct.layout)
    hashed, in_place = set(), 0
    for number, (bucket, buffer) in enumerate(zip(buckets, stream, strict=True)):
        if number == conduct.buckets:
            return Received()
        in_place += number in wanted and buffer.data_ptr() == wanted[number].data_ptr()
        for piece in bucket.pieces:
            name, shape = manifest.names[piece.tensor], manifest.shapes[piece.tensor]
            dtype = getattr(torch, manifest.dtypes[piece.tensor])
            rows = buffer[piece.offset : piece.offset + piece_bytes(manifest, piece)].view(dtype).view(piece.stop - piece.start, *shape[1:])
            if conduct.keep:
                hashes.add(piece.tensor, piece.owner, piece.start, rows)
                hashed.add(piece.tensor)
                held.setdefault(name, torch.zeros(shape or (1,), dtype=dtype))[piece.start : piece.stop] = rows
    for tensor in range(len(manifest.names) if conduct.keep else 0):
        if tensor not in hashed:
            _add_held(hashes, manifest, tensor, held[manifest.names[tensor]])
    tensors = {name: held[name].view(shape).clone() for name, shape in zip(manifest.names, manifest.shapes, strict=True) if name in held}
    return Received(fingerprint=f"{hashes.total():032x}", tensors=tensors, in_place=in_place)


def _add_held(hashes: TensorHashes, manifest: WeightsManifest, tensor: int, whole: torch.Tensor) -> None:
    """A tensor that this sync left as it was."""
    cuts = manifest.cuts[tensor]
    for owner in range(len(cuts) - 1):
        if cuts[owner] < cuts[owner + 1]:
            hashes.add(tensor, owner, cuts[owner], whole[cuts[owner] : cuts[owner + 1]])


def receive(
    members: Sequence[LinkSettings], manifest: WeightsManifest, plans: Sequence[SyncPlan], conducts: Sequence[Conduct] = ()
) -> list[list[Received]]:
    """In the receivers' process: each member of a link on a thread of its own takes part in ``plans``. By member and plan.

    Raises RuntimeError with what the first member met that failed, when all have ended.
    """
    conducts = conducts or [Conduct()] * len(members)

    def member(settings: LinkSettings, conduct: Conduct) -> list[Received]:
        time.sleep(conduct.delay_s)
        inlet = carrier(settings.carrier).enter(settings, CPU)
        try:
            held: dict[str, torch.Tensor] = {}
            return [_receive_sync(inlet, plan, manifest, conduct, held) for plan in plans]
        finally:
            inlet.close()

    results = together([lambda s=s, c=c: member(s, c) for s, c in zip(members, conducts, strict=True)])  # type: ignore[misc]
    for result in results:
        if isinstance(result, Exception):
            raise RuntimeError(f"{type(result).__name__}: {result}")
    return results


def outcomes(
    members: Sequence[LinkSettings], manifest: WeightsManifest, plans: Sequence[SyncPlan], conducts: Sequence[Conduct]
) -> list[str]:
    """As :func:`receive`, but says for each member how it ended: "" or the error."""

    def member(settings: LinkSettings, conduct: Conduct) -> str:
        try:
            receive([settings], manifest, plans, [conduct])
        except RuntimeError as error:
            return str(error)
        return ""

    return together([lambda s=s, c=c: member(s, c) for s, c in zip(members, conducts, strict=True)])  # type: ignore[misc]


def together(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """The results of calls on a thread each; an exception is a result."""
    results: list[Any] = [None] * len(calls)

    def run(index: int) -> None:
        try:
            results[index] = calls[index]()
        except Exception as error:  # noqa: BLE001 - for the caller to look at
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


# ---- a whole sync ------------------------------------------------------------------------------------------------------


@dataclass
class Sync:
    """A link between trainers and receivers, and the manifest that both agreed on."""

    trainers: Trainers
    manifest: WeightsManifest
    members: list[LinkSettings]

    @property
    def processes(self) -> RankProcesses:
        return self.trainers.processes

    def plan(self, mode: Any = "full", **options: Any) -> SyncPlan:
        """A plan over this link."""
        settings = {"version": 1, "base_version": 0, "verify": True, "senders": tuple({m.sender: 0 for m in self.members}) or (0,)}
        return SyncPlan(mode=mode, link=self.members[0].name, **{**settings, **options})

    def receiving(self, plans: Sequence[SyncPlan], conducts: Sequence[Conduct] = (), function: Callable[..., Any] = receive) -> Any:
        """Begin to receive; a future."""
        return self.processes.submit(RECEIVER, function, self.members, self.manifest, plans, conducts)

    def join(self) -> None:
        """The trainers' part of entering the link."""
        self.trainers.call("weights", "join", self.members[0].name)

    def run(self, plan: SyncPlan, conducts: Sequence[Conduct] = ()) -> tuple[list[SendReport], list[Received]]:
        """Send and receive once: each rank's report, what each receiver has."""
        receiving = self.receiving([plan], conducts)
        self.join()
        reports = self.trainers.call("weights", "send_weights", plan)
        return reports, [member[0] for member in receiving.result(TIMEOUT_S + SLACK_S)]


def link(
    trainers: Trainers, manifest: WeightsManifest, kind: str = "collective", *, receivers: int = 1, timeout_s: float = TIMEOUT_S,
    pairs: bool = False, directory: str = "", model_path: str = "", name: str = "engines",
) -> Sync:  # fmt: skip
    """Serve a link for ``receivers`` members; ``pairs``: rank i serves receiver i alone, as on GPUs that both share."""
    groups = [(rank, 1) for rank in range(receivers)] if pairs else [(0, receivers)]
    links = [
        LinkSettings(
            name=name, carrier=kind, world=1 + count, timeout_s=timeout_s, sender=sender, directory=directory, model_path=model_path
        )
        for sender, count in groups
    ]
    addresses = trainers.call("weights", "serve", links)
    members = []
    for settings, (sender, count) in zip(links, groups, strict=True):
        host, port = addresses[sender]
        members += [replace(settings, host=host, port=port, rank=rank) for rank in range(1, 1 + count)]
    return Sync(trainers, manifest, members)


@contextmanager
def toy_sync(
    processes: RankProcesses, kind: str = "collective", *, ranks: int = 2, dtype: str = "float32", bucket_bytes: int = 64 << 20,
    keep_baseline: bool = False, chunk_elements: int = 1 << 20, **options: Any,
) -> Iterator[Sync]:  # fmt: skip
    """Ranks with the toy model and a link from them."""
    with processes.trainers("toy", ranks=ranks, kind=TOY) as trainers:
        manifest = trainers.call("open_weights", dtype, bucket_bytes, keep_baseline, chunk_elements)[0]
        yield link(trainers, manifest, kind, **options)


def total(reports: Sequence[SendReport], layout: int = 0) -> str:
    """The trainer's fingerprint from its ranks' shares."""
    return f"{sum(report.sums[layout] for report in reports) % MODULUS:032x}"


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal dtype, shape and bits, whatever they mean."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    kind = BITS[one.dtype.itemsize]
    return torch.equal(one.contiguous().view(-1).view(kind), other.contiguous().view(-1).view(kind))
