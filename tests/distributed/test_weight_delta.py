"""A delta holds exactly the elements whose bits changed since the last version that every engine acknowledged."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gloo_ranks import RECEIVER, RankProcesses
from weight_links import CPU, SHORT_S, SLACK_S, TIMEOUT_S, Sync, link, same_bits, together, total, toy_sync

from rlpost.types import SyncPlan, SyncRefusedError, WeightsManifest
from rlpost.weights.baseline import Baseline
from rlpost.weights.delta import TensorChange, decode, encode, split
from rlpost.weights.fingerprint import MODULUS
from rlpost.weights.layout import LiveWeights, Place, contiguous_strides, whole
from rlpost.weights.links import LinkSettings, carrier
from rlpost.weights.shards import Shard

Weights = dict[str, torch.Tensor]
Plain = dict[str, tuple[list[int], list[int]]]
BITS: dict[str, Any] = {"float32": (torch.int32, np.uint32), "bfloat16": (torch.int16, np.uint16)}

ONE, HALF, TWO, ZERO = 0x3F800000, 0x3F000000, 0x40000000, 0x00000000
SIGN, NAN, OTHER_NAN, SIGNALLING, INFINITY = 0x80000000, 0x7FC00000, 0x7FC00001, 0x7F800001, 0x7F800000

CASES = {
    "sign": (ONE, ONE ^ SIGN),
    "times 4": (HALF, TWO),
    "minus zero": (ZERO, ZERO ^ SIGN),
    "NaN": (ONE, NAN),
    "NaN payload": (NAN, OTHER_NAN),
    "signalling NaN": (NAN, SIGNALLING),
    "no NaN any more": (NAN, ONE),
    "same NaN": (NAN, NAN),
    "infinity": (INFINITY, INFINITY ^ SIGN),
    "below bfloat16": (ONE, ONE + 1),
    "one step of bfloat16": (ONE, ONE + 0x10000),
    "same": (TWO, TWO),
}
"""Old and new float32 bits of an element. Times 4 and the sign change the top byte only; a NaN equals nothing; -0.0 equals 0.0."""

PLACES = {
    "even": [0, 5, 23], "uneven": [0, 19, 20, 34], "one_row": [0, 8], "two_rows": [2, 3], "vector": [0, 4], "short_vector": [0],
    "experts": [0, 13, 29], "scalar": [0], "transposed": [0, 4, 5, 29], "strided": [0, 2, 3, 11],
}  # fmt: skip
"""First and last elements of the tensors, and those around the ranks' cuts."""


def bits_of(weights: Weights, dtype: str) -> dict[str, np.ndarray]:
    """Flat, in the engines' dtype."""
    signed, unsigned = BITS[dtype]
    return {name: cast(tensor, dtype).view(-1).view(signed).numpy().view(unsigned) for name, tensor in weights.items()}


def cast(tensor: torch.Tensor, dtype: str) -> torch.Tensor:
    """In the engines' dtype, row by row. Of a NaN torch makes other bits where elements do not lie side by side."""
    return tensor.contiguous().view(-1).to(getattr(torch, dtype)).view(tensor.shape)


def plain_difference(before: Weights, after: Weights, dtype: str) -> Plain:
    """All elements compared at once."""
    old, new = bits_of(before, dtype), bits_of(after, dtype)
    changed = {name: np.flatnonzero(old[name] != new[name]) for name in old}
    return {name: (indices.tolist(), new[name][indices].tolist()) for name, indices in changed.items() if len(indices)}


def decoded(message: bytes, manifest: WeightsManifest, ranks: int) -> tuple[Plain, list[TensorChange]]:
    """What is in a message, by name, and as it came: one part a rank."""
    parts = split(message)
    assert len(parts) == ranks
    changes = [change for part in parts for change in decode(part)]
    found: Plain = {}
    for change in changes:
        assert change.numel == int(np.prod(manifest.shapes[change.tensor], dtype=int)) and len(change.indices)
        indices, values = found.setdefault(manifest.names[change.tensor], ([], []))
        indices += change.indices.tolist()
        values += change.values.tolist()
    return found, changes


class Deltas:
    """Trainer ranks with a baseline and a directory as link, driven as the coordinator does."""

    def __init__(self, sync: Sync, dtype: str, directory: Path) -> None:
        self.sync, self.trainers, self.manifest, self.dtype, self.directory = sync, sync.trainers, sync.manifest, dtype, directory
        self.sync.join()
        self.version = 0

    def call(self, method: str, *arguments: Any) -> list[Any]:
        return self.trainers.call("weights", method, *arguments)

    def full(self) -> Weights:
        weights: Weights = self.trainers.call("full")[0]
        return weights

    def send_full(self) -> str:
        """Not acknowledged yet; the fingerprint."""
        self.version += 1
        return total(self.call("send_weights", self.sync.plan(version=self.version)))

    def advance(self) -> None:
        self.call("advance", self.version)

    def encode(self) -> tuple[Plain, list[TensorChange], list[Any]]:
        """Encode and send a delta; what came out at the other end, and the reports."""
        reports = self.call("encode_delta", True)
        self.version += 1
        self.call("send_message", self.sync.plan("delta", version=self.version, message_bytes=reports[0].bytes))
        message = (self.directory / f"version-{self.version:08d}" / "message.bin").read_bytes()
        assert len(message) == reports[0].bytes
        found, changes = decoded(message, self.manifest, self.trainers.ranks)
        assert sum(report.changed for report in reports) == sum(len(indices) for indices, _ in found.values())
        return found, changes, reports

    def put(self, name: str, indices: Sequence[int], values: Sequence[int]) -> None:
        self.trainers.call("put", name, indices, values)

    def put_random(self, seed: int, share: float) -> None:
        """Change a share of all trained elements, NaNs among them."""
        generator = np.random.default_rng(seed)
        for name, tensor in self.full().items():
            if not name.startswith("frozen"):
                indices = np.flatnonzero(generator.random(tensor.numel()) < share)
                self.put(name, indices.tolist(), generator.integers(0, 2**32, len(indices)).tolist())


@pytest.fixture(params=[(1, "float32"), (2, "float32"), (2, "bfloat16"), (3, "bfloat16")], ids=lambda p: f"{p[0]} ranks {p[1]}")
def deltas(request: pytest.FixtureRequest, processes: RankProcesses, tmp_path: Path) -> Any:
    """A few elements are compared at once, so that tensors take several chunks."""
    ranks, dtype = request.param
    with toy_sync(
        processes, "disk", ranks=ranks, dtype=dtype, bucket_bytes=64, keep_baseline=True, chunk_elements=7, directory=str(tmp_path)
    ) as sync:
        yield Deltas(sync, dtype, tmp_path)


def places(deltas: Deltas, *, nan: bool) -> dict[str, list[int]]:
    """Where elements change. Of a NaN torch's cast to bfloat16 makes other bits where elements do not lie side by side: no more is
    promised there (a NaN among the weights ends a run, for its gradients are not finite)."""
    strided = ("strided", "transposed") if nan and deltas.dtype == "bfloat16" else ()
    return {name: list(indices) for name, indices in PLACES.items() if name not in strided}


# ---- what is in a delta ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_changes_of_every_kind_at_every_edge_are_found(deltas: Deltas, case: str) -> None:
    """As a plain comparison of all elements finds them: nothing more, nothing less."""
    old, new = CASES[case]
    for name, indices in places(deltas, nan="NaN" in case).items():
        deltas.put(name, indices, [old] * len(indices))
    deltas.send_full()
    deltas.advance()
    before = deltas.full()
    for name, indices in places(deltas, nan="NaN" in case).items():
        deltas.put(name, indices, [new] * len(indices))
    expected = plain_difference(before, deltas.full(), deltas.dtype)
    assert deltas.encode()[0] == expected
    if deltas.dtype == "float32":
        changed = {name: indices for name, (indices, _) in expected.items()}
        assert changed == ({} if old == new else PLACES)


@pytest.mark.parametrize("share", [0.0, 0.2, 1.0])
def test_a_delta_brings_engines_to_the_trainers_bits_and_proves_it(deltas: Deltas, share: float) -> None:
    """Applied to what an engine holds; the fingerprint is that of a full sync of the same weights, and covers the frozen ones."""
    deltas.put_random(1, 0.5)
    deltas.send_full()
    deltas.advance()
    before = deltas.full()
    deltas.put_random(2, share)
    after = deltas.full()
    found, changes, reports = deltas.encode()
    assert found == plain_difference(before, after, deltas.dtype)
    trained = sum(tensor.numel() for name, tensor in after.items() if not name.startswith("frozen"))
    assert sum(report.compared for report in reports) == trained, "a tensor under two names is compared once, a frozen one never"
    if share != 0.2:
        assert sum(report.changed for report in reports) >= 0.99 * share * trained

    held = {name: cast(tensor, deltas.dtype) for name, tensor in before.items()}
    places = [Place(name, whole(tensor.shape), 0, contiguous_strides(tensor.shape or (1,))) for name, tensor in held.items()]
    live = LiveWeights(deltas.manifest, dict(held), places)
    for change in changes:
        live.patch(change.tensor, torch.from_numpy(change.indices), torch.from_numpy(change.values.view(f"i{change.values.itemsize}")))
    for name, tensor in after.items():
        assert same_bits(held[name], cast(tensor, deltas.dtype)), name
    assert f"{sum(live.sums().values()) % MODULUS:032x}" == total(reports) == deltas.send_full()


def test_nothing_changed_is_an_empty_delta_whatever_the_bits(deltas: Deltas) -> None:
    """NaNs of all kinds too, which a cast must treat alike wherever they lie in a bucket, a chunk or a row."""
    deltas.put_random(3, 1.0)
    for name, indices in places(deltas, nan=True).items():
        deltas.put(name, indices, [(NAN, OTHER_NAN, SIGNALLING, NAN ^ SIGN)[i % 4] for i in range(len(indices))])
    fingerprint = deltas.send_full()
    deltas.advance()
    found, _, reports = deltas.encode()
    assert found == {} and total(reports) == fingerprint


def test_every_layout_has_the_fingerprint_of_a_full_sync(deltas: Deltas) -> None:
    parts = {"even": ((2, 5), (0, 2)), "experts": ((0, 5), (1, 2), (0, 3)), "frozen": ((1, 3), (0, 3)), "vector": ((4, 5),)}
    layouts = [tuple(None for _ in deltas.manifest.names), tuple(parts.get(name) for name in deltas.manifest.names)]
    deltas.call("set_layouts", layouts)
    deltas.send_full()
    deltas.advance()
    deltas.put_random(4, 0.3)
    _, _, reports = deltas.encode()
    deltas.version += 1
    full = deltas.call("send_weights", deltas.sync.plan(version=deltas.version))
    assert [total(reports, layout) for layout in (0, 1)] == [total(full, layout) for layout in (0, 1)]
    assert total(reports, 0) != total(reports, 1)


def test_without_verification_nothing_is_hashed(deltas: Deltas) -> None:
    deltas.send_full()
    deltas.advance()
    assert all(report.sums == () for report in deltas.call("encode_delta", False))


# ---- what it is compared with ------------------------------------------------------------------------------------------


def test_a_delta_that_was_not_acknowledged_is_contained_in_the_next(deltas: Deltas) -> None:
    """Refused, lost, or its engine died: the baseline is what all engines hold, not what was sent last."""
    deltas.send_full()
    deltas.advance()
    before = deltas.full()
    deltas.put_random(5, 0.2)
    first = deltas.encode()[0]
    assert first == plain_difference(before, deltas.full(), deltas.dtype) != {}
    assert deltas.encode()[0] == first, "once more"
    deltas.put_random(6, 0.2)
    assert deltas.encode()[0] == plain_difference(before, deltas.full(), deltas.dtype) != first
    deltas.advance()
    assert deltas.encode()[0] == {}


def test_what_changed_back_before_it_was_acknowledged_is_no_change(deltas: Deltas) -> None:
    deltas.put("uneven", [0, 34], [ONE, ONE])
    deltas.send_full()
    deltas.advance()
    deltas.put("uneven", [0, 34], [TWO, TWO])
    assert set(deltas.encode()[0]) == {"uneven"}
    deltas.put("uneven", [0, 34], [ONE, ONE])
    assert deltas.encode()[0] == {}


def test_what_changes_while_a_delta_is_on_its_way_is_in_the_next(deltas: Deltas) -> None:
    """The baseline moves to what was encoded, not to what the trainer holds when the engines have acknowledged."""
    deltas.send_full()
    deltas.advance()
    deltas.put("uneven", [0, 34], [ONE, ONE])
    deltas.encode()
    between = deltas.full()
    deltas.put("experts", [0, 29], [TWO, TWO])
    deltas.advance()
    assert deltas.encode()[0] == plain_difference(between, deltas.full(), deltas.dtype) != {}


def test_a_full_sync_in_place_of_a_delta_moves_the_whole_baseline(deltas: Deltas) -> None:
    """Too much changed, so the delta that was encoded is forgotten."""
    deltas.send_full()
    deltas.advance()
    deltas.put_random(7, 0.9)
    deltas.call("encode_delta", True)
    deltas.call("forget_delta")
    deltas.put("uneven", [0, 34], [ONE, ONE])
    deltas.send_full()
    deltas.advance()
    assert deltas.encode()[0] == {}


def test_a_full_sync_after_a_delta_that_nobody_took_moves_the_whole_baseline(deltas: Deltas) -> None:
    """The delta's sync failed, its version was never acknowledged and nobody forgot it; then a keyframe was due."""
    deltas.send_full()
    deltas.advance()
    deltas.put("uneven", [0, 34], [ONE, ONE])
    deltas.encode()
    deltas.put("uneven", [0, 34], [TWO, TWO])
    deltas.put("experts", [7], [TWO])
    deltas.send_full()
    deltas.advance()
    assert deltas.encode()[0] == {}


def test_several_deltas_in_a_row_follow_one_another(deltas: Deltas) -> None:
    deltas.send_full()
    deltas.advance()
    before = deltas.full()
    for seed in range(8, 12):
        deltas.put_random(seed, 0.1)
        after = deltas.full()
        assert deltas.encode()[0] == plain_difference(before, after, deltas.dtype)
        deltas.advance()
        before = after


# ---- on its way --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["collective", "ipc"])
@pytest.mark.parametrize("pairs", [False, True], ids=["from rank 0", "from every rank"])
def test_every_receiver_gets_the_message_as_it_was_encoded(processes: RankProcesses, kind: str, pairs: bool) -> None:
    with toy_sync(processes, kind, keep_baseline=True, receivers=2, pairs=pairs) as sync:
        sync.trainers.call("weights", "advance", 1)
        for version, count in enumerate((2, 30, 5), 2):
            before = sync.trainers.call("full")[0]
            sync.trainers.call("put", "uneven", range(count), [version] * count)
            reports = sync.trainers.call("weights", "encode_delta", True)
            plan = sync.plan("delta", version=version, message_bytes=reports[0].bytes)
            received = exchange(sync, plan)
            expected = plain_difference(before, sync.trainers.call("full")[0], "float32")
            assert all(decoded(message, sync.manifest, 2)[0] == expected for message in received)
            sync.trainers.call("weights", "advance", version)
            sync = link(sync.trainers, sync.manifest, kind, receivers=2, pairs=pairs)


def exchange(sync: Sync, plan: SyncPlan) -> list[bytes]:
    """Send the encoded message; what each receiver got."""
    receiving = sync.receiving([plan])
    sync.join()
    sync.trainers.call("weights", "send_message", plan)
    return [member[0].message for member in receiving.result(TIMEOUT_S + SLACK_S)]


def join_and_leave(members: Sequence[LinkSettings]) -> None:
    """In the receivers' process."""
    for inlet in together([partial(carrier(member.carrier).enter, member, CPU) for member in members]):
        inlet.close()


@pytest.mark.parametrize("kind", ["collective", "ipc"])
def test_a_delta_that_cannot_be_sent_is_refused_and_contained_in_the_next(processes: RankProcesses, kind: str) -> None:
    with toy_sync(processes, kind, keep_baseline=True, timeout_s=SHORT_S) as sync:
        sync.trainers.call("weights", "advance", 1)
        before = sync.trainers.call("full")[0]
        sync.trainers.call("put", "uneven", [0, 34], [ONE, ONE])
        reports = sync.trainers.call("weights", "encode_delta", True)
        leaving = sync.processes.submit(RECEIVER, join_and_leave, sync.members)
        sync.join()
        leaving.result(SLACK_S)
        sending = sync.trainers.submit("weights", "send_message", sync.plan("delta", message_bytes=reports[0].bytes))
        with pytest.raises(SyncRefusedError, match="a delta could not be sent to all engines") as caught:
            sending[0].result(SHORT_S + SLACK_S)
        assert caught.value.reason == "broken"
        sending[1].result(SLACK_S)
        assert encode_and_exchange(link(sync.trainers, sync.manifest, kind, receivers=2), before, range(30)) > reports[0].bytes


def test_every_rank_sends_what_was_encoded_last(processes: RankProcesses) -> None:
    """A first delta was never sent (an engine was lost before); the next one is larger."""
    with toy_sync(processes, "ipc", keep_baseline=True, pairs=True, receivers=2) as sync:
        sync.trainers.call("weights", "advance", 1)
        before = sync.trainers.call("full")[0]
        sync.trainers.call("put", "uneven", [0, 34], [ONE, ONE])
        sync.trainers.call("weights", "encode_delta", True)
        small = encode_and_exchange(sync, before, [20, 29])
        again = link(sync.trainers, sync.manifest, "ipc", receivers=2, pairs=True)
        assert encode_and_exchange(again, before, range(30)) > small


def encode_and_exchange(sync: Sync, before: Weights, indices: Sequence[int]) -> int:
    """Change these elements as well, encode all that changed and send it; the message's size."""
    values = np.random.default_rng(1).integers(0, 2**32, len(indices))
    sync.trainers.call("put", "experts", indices, values.tolist())
    reports = sync.trainers.call("weights", "encode_delta", True)
    expected = plain_difference(before, sync.trainers.call("full")[0], "float32")
    for message in exchange(sync, sync.plan("delta", version=2, message_bytes=reports[0].bytes)):
        assert decoded(message, sync.manifest, 2)[0] == expected
    size: int = reports[0].bytes
    return size


# ---- more than 2**31 elements ------------------------------------------------------------------------------------------


def test_an_element_beyond_2_to_the_31_has_a_64_bit_index() -> None:
    """This rank owns the last row of a tensor of 2.8e9 elements; a small tensor beside it keeps 32 bits."""
    rows, columns = 70_000, 40_000
    last, small = torch.zeros(1, columns), torch.zeros(3, 2)
    shards = [
        Shard(
            tensor=0,
            shape=(rows, columns),
            dtype=torch.bfloat16,
            start=rows - 1,
            stop=rows,
            trained=True,
            stored=False,
            rows=lambda *_: last,
        ),
        Shard(
            tensor=1,
            shape=(3, 2),
            dtype=torch.bfloat16,
            start=0,
            stop=3,
            trained=True,
            stored=False,
            rows=lambda start, stop: small[start:stop],
        ),
    ]
    manifest = WeightsManifest(
        names=("huge", "small"), shapes=((rows, columns), (3, 2)), dtypes=("bfloat16",) * 2, cuts=((0, rows - 1, rows), (0, 3, 3)),
        trained=(True, True), bucket_bytes=1,
    )  # fmt: skip
    baseline = Baseline(manifest, shards)
    baseline.advance()
    last[0, [0, columns - 1]] = 1.0
    small[2, 1] = 1.0
    changes, compared = baseline.compare(lambda *_: None)
    found = [(change.tensor, change.numel, change.indices.dtype, change.indices.tolist()) for change in decode(encode(changes))]
    assert found == [(0, rows * columns, np.int64, [(rows - 1) * columns, rows * columns - 1]), (1, 6, np.int32, [5])]
    assert compared == columns + 6 and (rows - 1) * columns > 2**31
