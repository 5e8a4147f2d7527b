"""Weights written in place land where the engine's own loader would have put them, bit for bit, or are refused beforehand."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from rlpost.types import Box, WeightsManifest
from rlpost.weights.baseline import BITS, bits
from rlpost.weights.buckets import piece_bytes, plan_buckets, rows_of
from rlpost.weights.fingerprint import TensorHashes
from rlpost.weights.layout import LiveWeights, NotInPlaceError, Place, contiguous_strides, find_places, whole

Loader = Callable[..., None]
Weights = dict[str, torch.Tensor]

HIDDEN, HEAD, HEADS, KV_HEADS, MLP, VOCABULARY, PADDED, EXPERTS = 6, 2, 4, 2, 8, 11, 12, 3

SHAPES: dict[str, tuple[int, ...]] = {
    "embed": (VOCABULARY, HIDDEN),
    "q": (HEADS * HEAD, HIDDEN),
    "k": (KV_HEADS * HEAD, HIDDEN),
    "v": (KV_HEADS * HEAD, HIDDEN),
    "q_bias": (HEADS * HEAD,),
    "k_bias": (KV_HEADS * HEAD,),
    "v_bias": (KV_HEADS * HEAD,),
    "gate": (MLP, HIDDEN),
    "up": (MLP, HIDDEN),
    "down": (HIDDEN, MLP),
    "norm": (HIDDEN,),
    "scale": (),
    "turned": (5, HIDDEN),
    "turned_by_loader": (5, HIDDEN),
    "in_a_buffer": (3, 4),
    "experts_gate": (EXPERTS, 4, HIDDEN),
    "experts_up": (EXPERTS, 4, HIDDEN),
    **{f"expert_{number}_down": (HIDDEN, MLP) for number in range(EXPERTS)},
}
"""The trainer's tensors."""


@pytest.fixture(autouse=True)
def without_vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What vLLM does for parameters that bring no loader of their own; like a receiver, without gradients."""

    def default_weight_loader(parameter: torch.nn.Parameter, loaded: torch.Tensor) -> None:
        assert parameter.size() == loaded.size()
        parameter.data.copy_(loaded)

    module = ModuleType("vllm.model_executor.model_loader.weight_utils")
    module.default_weight_loader = default_weight_loader  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    with torch.no_grad():
        yield


def with_loader(tensor: torch.Tensor, loader: Loader | None = None) -> Any:
    """A parameter; its ``weight_loader`` is an attribute, as in vLLM."""
    parameter: Any = torch.nn.Parameter(tensor)
    if loader is not None:
        parameter.weight_loader = loader
    return parameter


class FakeEngine:
    """Worker ``rank`` of ``workers``: it fuses, cuts, pads, replicates and transposes as vLLM's layers do."""

    def __init__(self, rank: int, workers: int, dtype: torch.dtype) -> None:
        self.rank, self.workers = rank, workers
        query, self.kv = HEADS * HEAD // workers, max(1, KV_HEADS // workers) * HEAD
        mlp = MLP // workers

        def empty(*shape: int) -> torch.Tensor:
            return torch.full(shape, 77.0, dtype=dtype)

        self.parameters: dict[str, Any] = {
            "embed": with_loader(empty(PADDED // workers, HIDDEN), self.load_vocabulary),
            "qkv": with_loader(empty(query + 2 * self.kv, HIDDEN), self.load_qkv),
            "qkv_bias": with_loader(empty(query + 2 * self.kv), self.load_qkv),
            "gate_up": with_loader(empty(2 * mlp, HIDDEN), self.load_gate_up),
            "down": with_loader(empty(HIDDEN, mlp), self.load_columns),
            "norm": with_loader(empty(HIDDEN)),
            "scale": with_loader(empty(1), lambda parameter, loaded: parameter.data.copy_(loaded.reshape(1))),
            "turned": with_loader(empty(HIDDEN, 5).t()),
            "turned_by_loader": with_loader(empty(HIDDEN, 5), lambda parameter, loaded: parameter.data.copy_(loaded.t())),
            "in_a_buffer": with_loader(empty(5, 4)[1:4]),
            "w13": with_loader(empty(EXPERTS, 8 // workers, HIDDEN), self.load_experts),
            "w2": with_loader(empty(EXPERTS, HIDDEN, mlp), lambda parameter, loaded, i: self.load_columns(parameter, loaded, i)),
        }
        self.routes: dict[str, tuple[str, tuple[Any, ...]]] = {name: (name, ()) for name in SHAPES if name in self.parameters}
        self.routes |= {name: ("qkv", (name,)) for name in "qkv"} | {f"{name}_bias": ("qkv_bias", (name,)) for name in "qkv"}
        self.routes |= {"gate": ("gate_up", (0,)), "up": ("gate_up", (1,))}
        self.routes |= {"experts_gate": ("w13", (0,)), "experts_up": ("w13", (1,))}
        self.routes |= {f"expert_{number}_down": ("w2", (number,)) for number in range(EXPERTS)}

    def load(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        """As ``load_weights`` of a model in vLLM."""
        for name, tensor in weights:
            parameter_name, arguments = self.routes[name]
            parameter = self.parameters[parameter_name]
            default = sys.modules["vllm.model_executor.model_loader.weight_utils"].default_weight_loader
            getattr(parameter, "weight_loader", default)(parameter, tensor, *arguments)

    def load_vocabulary(self, parameter: torch.nn.Parameter, loaded: torch.Tensor) -> None:
        size = PADDED // self.workers
        rows = loaded[self.rank * size : (self.rank + 1) * size]
        parameter[: len(rows)].data.copy_(rows)
        parameter[len(rows) :].data.fill_(0)

    def load_qkv(self, parameter: torch.nn.Parameter, loaded: torch.Tensor, part: str) -> None:
        query = HEADS * HEAD // self.workers
        offset = {"q": 0, "k": query, "v": query + self.kv}[part]
        size = query if part == "q" else self.kv
        rank = self.rank if part == "q" else self.rank * KV_HEADS // max(self.workers, KV_HEADS)
        parameter.data.narrow(0, offset, size).copy_(loaded.narrow(0, rank * size, size))

    def load_gate_up(self, parameter: torch.nn.Parameter, loaded: torch.Tensor, part: int) -> None:
        size = MLP // self.workers
        parameter.data.narrow(0, part * size, size).copy_(loaded.narrow(0, self.rank * size, size))

    def load_columns(self, parameter: torch.nn.Parameter, loaded: torch.Tensor, expert: int | None = None) -> None:
        size = MLP // self.workers
        target = parameter.data if expert is None else parameter.data[expert]
        target.copy_(loaded.narrow(1, self.rank * size, size))

    def load_experts(self, parameter: torch.nn.Parameter, loaded: torch.Tensor, part: int) -> None:
        size = 4 // self.workers
        parameter.data.narrow(1, part * size, size).copy_(loaded.narrow(1, self.rank * size, size))

    def memory(self) -> dict[str, bytes]:
        """All bits of all parameters' storages, padding and what lies beside them included."""
        return {name: bytes(parameter.untyped_storage()) for name, parameter in self.parameters.items()}


def random_weights(dtype: torch.dtype, seed: int) -> Weights:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}


def manifest_of(weights: Weights, ranks: int = 3) -> WeightsManifest:
    cuts = []
    for tensor in weights.values():
        rows = rows_of(tensor.shape)
        each = -(-rows // ranks)
        cuts.append(tuple(min(rank * each, rows) for rank in range(ranks + 1)))
    return WeightsManifest(
        names=tuple(weights),
        shapes=tuple(tuple(tensor.shape) for tensor in weights.values()),
        dtypes=tuple(str(tensor.dtype).removeprefix("torch.") for tensor in weights.values()),
        cuts=tuple(cuts),
        trained=(True,) * len(weights),
        bucket_bytes=96,
    )


def live_weights(engine: FakeEngine, manifest: WeightsManifest) -> LiveWeights:
    return LiveWeights(manifest, dict(engine.parameters), find_places(manifest, engine.parameters, engine.load))


def loaded_engine(rank: int, workers: int, weights: Weights) -> FakeEngine:
    engine = FakeEngine(rank, workers, weights["q"].dtype)
    engine.load(list(weights.items()))
    return engine


WORKERS = [(rank, workers) for workers in (1, 2, 4) for rank in range(workers)]
on_every_worker = pytest.mark.parametrize(("rank", "workers"), WORKERS)
in_both_widths = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


# ---- where everything belongs ------------------------------------------------------------------------------------------


@on_every_worker
@in_both_widths
def test_rows_are_written_where_the_loader_puts_them(rank: int, workers: int, dtype: torch.dtype) -> None:
    old, new = random_weights(dtype, 1), random_weights(dtype, 2)
    engine, manifest = loaded_engine(rank, workers, old), manifest_of(new)
    live = live_weights(engine, manifest)
    pieces = [piece for bucket in plan_buckets(manifest) for piece in bucket.pieces]
    assert len(pieces) > 2 * len(SHAPES), "most tensors come in several pieces"
    for piece in reversed(pieces):
        tensor = new[manifest.names[piece.tensor]]
        rows = (tensor.view(1) if tensor.ndim == 0 else tensor)[piece.start : piece.stop]
        assert rows.nbytes == piece_bytes(manifest, piece)
        live.write(piece.tensor, piece.start, rows)
    assert engine.memory() == loaded_engine(rank, workers, new).memory() != loaded_engine(rank, workers, old).memory()


@on_every_worker
@in_both_widths
def test_rows_that_lie_in_one_piece_are_received_right_there(rank: int, workers: int, dtype: torch.dtype) -> None:
    """Bytes as they came, into the live memory; only where rows are held whole, side by side, in the trainer's order."""
    old, new = random_weights(dtype, 1), random_weights(dtype, 2)
    engine, manifest = loaded_engine(rank, workers, old), manifest_of(new)
    live = live_weights(engine, manifest)
    in_place = set()
    for bucket in plan_buckets(manifest):
        for piece in bucket.pieces:
            name = manifest.names[piece.tensor]
            rows = (new[name].view(1) if new[name].ndim == 0 else new[name])[piece.start : piece.stop]
            memory = live.memory(piece.tensor, piece.start, piece.stop)
            if memory is None:
                live.write(piece.tensor, piece.start, rows)
            else:
                assert memory.dtype == torch.uint8 and memory.numel() == piece_bytes(manifest, piece)
                memory.copy_(rows.contiguous().view(-1).view(torch.uint8))
                in_place.add(name)
    assert engine.memory() == loaded_engine(rank, workers, new).memory()
    assert {"norm", "scale", "in_a_buffer"} <= in_place
    assert not {"turned", "turned_by_loader"} & in_place, "not in the trainer's order"
    by_rows, by_columns = {"embed", "q", "k", "v", "q_bias", "v_bias", "gate", "up"}, {"down", "expert_0_down", "experts_up"}
    if workers == 1:
        assert by_rows | by_columns <= in_place
    else:
        assert by_rows & in_place and not by_columns & in_place, "pieces may reach over the edge of a worker's rows"


@on_every_worker
@in_both_widths
@pytest.mark.parametrize("share", [0.0, 0.15, 1.0])
def test_single_elements_are_patched_where_the_loader_puts_them(rank: int, workers: int, dtype: torch.dtype, share: float) -> None:
    old, other = random_weights(dtype, 1), random_weights(dtype, 2)
    generator = torch.Generator().manual_seed(3)
    new = {name: torch.where(torch.rand(old[name].shape, generator=generator) < share, other[name], old[name]) for name in old}
    engine, manifest = loaded_engine(rank, workers, old), manifest_of(new)
    live = live_weights(engine, manifest)
    for index, name in enumerate(manifest.names):
        before, after = bits(old[name]), bits(new[name])
        changed = (before != after).nonzero().view(-1)
        for owner_changed in (changed[::2], changed[1::2]):
            live.patch(index, owner_changed.to(torch.int32), after[owner_changed])
    assert engine.memory() == loaded_engine(rank, workers, new).memory()


@on_every_worker
@in_both_widths
def test_the_live_parameters_hash_to_what_the_trainer_expects(rank: int, workers: int, dtype: torch.dtype) -> None:
    weights = random_weights(dtype, 1)
    engine, manifest = loaded_engine(rank, workers, weights), manifest_of(weights)
    live = live_weights(engine, manifest)
    expected = TensorHashes(manifest, live.layout)
    for index, tensor in enumerate(weights.values()):
        for owner, (first, last) in enumerate(pairwise(manifest.cuts[index])):
            if first < last:
                expected.add(index, owner, first, (tensor.view(1) if tensor.ndim == 0 else tensor)[first:last])
    expected.total()
    assert live.sums() == expected.sums and len(expected.sums) == len(SHAPES)
    for name, parameter in engine.parameters.items():
        before = live.sums()
        parameter.view(BITS[dtype.itemsize]).select(0, 0).view(-1)[0] ^= 1
        assert live.sums() != before, f"a bit of {name} that was flipped in the engine"


@pytest.mark.parametrize(
    ("rank", "workers", "expected"),
    [
        (0, 1, {}),
        (1, 2, {
            "embed": ((6, 11), (0, 6)), "q": ((4, 8), (0, 6)), "k": ((2, 4), (0, 6)), "v_bias": ((2, 4),),
            "up": ((4, 8), (0, 6)), "down": ((0, 6), (4, 8)), "experts_up": ((0, 3), (2, 4), (0, 6)), "expert_2_down": ((0, 6), (4, 8)),
            "norm": None, "scale": None, "turned": None,
        }),
        (2, 4, {"q": ((4, 6), (0, 6)), "k": ((2, 4), (0, 6)), "v_bias": ((2, 4),), "embed": ((6, 9), (0, 6))}),
        (3, 4, {"q": ((6, 8), (0, 6)), "k": ((2, 4), (0, 6)), "v_bias": ((2, 4),), "embed": ((9, 11), (0, 6))}),
    ],
)  # fmt: skip
def test_each_worker_knows_its_part(rank: int, workers: int, expected: dict[str, Box | None]) -> None:
    """Written out: a layout that was only consistent with itself would pass the other tests. Workers 2 and 3 share a key-value head."""
    manifest = manifest_of(random_weights(torch.bfloat16, 1))
    layout = dict(zip(manifest.names, live_weights(FakeEngine(rank, workers, torch.bfloat16), manifest).layout, strict=True))
    assert {name: layout[name] for name in expected} == expected
    if workers == 1:
        assert set(layout.values()) == {None}


def test_to_look_changes_nothing() -> None:
    engine = loaded_engine(1, 2, random_weights(torch.bfloat16, 1))
    memory, loaders = engine.memory(), {name: vars(parameter) for name, parameter in engine.parameters.items()}
    places = find_places(manifest_of(random_weights(torch.bfloat16, 1)), engine.parameters, engine.load)
    assert len(places) == len(SHAPES)
    assert engine.memory() == memory
    for name, parameter in engine.parameters.items():
        assert vars(parameter) == loaders[name] and parameter.requires_grad and parameter.dtype == torch.bfloat16
    assert not hasattr(engine.parameters["norm"], "weight_loader")


def test_a_loader_that_fails_leaves_the_parameters_as_they_were() -> None:
    engine = loaded_engine(0, 1, random_weights(torch.float32, 1))
    memory = engine.memory()
    loader = engine.parameters["embed"].weight_loader
    weights = {**random_weights(torch.float32, 1), "embed": torch.zeros(VOCABULARY, HIDDEN + 1)}
    with pytest.raises(NotInPlaceError, match=r"embed gives \(.*\) where embed takes \("):
        find_places(manifest_of(weights), engine.parameters, engine.load)
    assert engine.memory() == memory and engine.parameters["embed"].weight_loader == loader
    assert all(parameter.requires_grad for parameter in engine.parameters.values())


# ---- what cannot be written in place -----------------------------------------------------------------------------------


def places_of(loader: Loader, shape: Sequence[int] = (6, 4), *, held: torch.Tensor | None = None) -> list[Place]:
    """The place of one tensor in one parameter (of its shape) that has this loader."""
    parameter = with_loader(torch.zeros(tuple(shape)) if held is None else held, loader)
    manifest = manifest_of({"w": torch.zeros(tuple(shape))})

    def load(weights: list[tuple[str, torch.Tensor]]) -> None:
        for _, tensor in weights:
            parameter.weight_loader(parameter, tensor)

    return find_places(manifest, {"live": parameter}, load)


def interleave(parameter: torch.nn.Parameter, loaded: torch.Tensor) -> None:
    parameter.data.copy_(loaded.view(2, 3, 4).transpose(0, 1).reshape(6, 4))


def halve_rows(parameter: torch.nn.Parameter, loaded: torch.Tensor) -> None:
    parameter.data[:3].copy_(loaded[::2])


def swap_last_rows(parameter: torch.nn.Parameter, loaded: torch.Tensor) -> None:
    parameter.data.copy_(loaded[[0, 1, 2, 3, 5, 4]])


COMPUTED, NO_BLOCK = "what is loaded into live is no part of the tensor as it came", "what live gets of w is no block of it"


@pytest.mark.parametrize(
    ("loader", "shape", "says"),
    [
        (interleave, (6, 4), COMPUTED),
        (swap_last_rows, (6, 4), COMPUTED),
        (lambda parameter, loaded: parameter.data.copy_(loaded.flip(0)), (6, 4), COMPUTED),
        (lambda parameter, loaded: parameter.data.copy_(loaded.flip(0)), (6,), COMPUTED),
        (halve_rows, (6, 4), NO_BLOCK),
        (lambda parameter, loaded: parameter.data.copy_(loaded * 2), (6, 4), COMPUTED),
        (lambda parameter, loaded: parameter.data.copy_(loaded + 1), (6, 4), COMPUTED),
        (lambda parameter, loaded: parameter.data.copy_(loaded + 1), (6,), "w"),
        (lambda parameter, loaded: parameter.data.copy_(loaded * 2), (1,), "w"),
        (lambda parameter, loaded: parameter.data.copy_(-loaded), (6, 4), COMPUTED),
        (lambda parameter, loaded: None, (6, 4), "w goes to 0 places in the engine"),
    ],
    ids=[
        "interleaved", "rows swapped", "reversed", "reversed vector", "every second row", "scaled", "plus one", "vector plus one",
        "scaled number", "negated", "nothing",
    ],
)  # fmt: skip
def test_a_loader_that_computes_or_scatters_is_refused(loader: Loader, shape: tuple[int, ...], says: str) -> None:
    """Norms that store their weight plus one, rotary permutations: what the engine holds is no part of what the trainer sends."""
    with pytest.raises(NotInPlaceError, match=says):
        places_of(loader, shape)


@pytest.mark.parametrize(
    ("loader", "says"),
    [
        (lambda parameter, loaded: [parameter.data[:3].copy_(loaded[:3]), parameter.data[3:].copy_(loaded[3:])], "w goes to 2 places"),
        (lambda parameter, loaded: parameter.data.copy_(loaded[:1]), r"w gives \(1, 4\) where live takes \(6, 4\)"),
        (lambda parameter, loaded: parameter.data.copy_(loaded.view(torch.int32)), "w comes as torch.int32 where live takes torch.float32"),
        (lambda parameter, loaded: parameter.data.copy_(loaded.view(3, 8)[:, ::2].repeat(2, 1)), COMPUTED),
        (lambda parameter, loaded: parameter.data.view(3, 8).copy_(loaded.view(3, 8)), "no block of it"),
    ],
    ids=["in two parts", "repeated", "other bits", "repeated columns", "reshaped"],
)
def test_what_is_no_single_block_is_refused(loader: Loader, says: str) -> None:
    with pytest.raises(NotInPlaceError, match=says):
        places_of(loader)


def test_a_parameter_of_another_dtype_than_the_tensor_is_refused() -> None:
    """vLLM keeps some parameters in float32 beside a model in bfloat16: the bits that are sent are not the bits that are held."""
    with pytest.raises(NotInPlaceError, match=r"w comes as torch.float32 where live takes torch.float64"):
        places_of(lambda parameter, loaded: parameter.data.copy_(loaded), held=torch.zeros(6, 4, dtype=torch.float64))


def test_a_regular_loader_is_taken() -> None:
    """The refusals above are the loaders' doing."""
    [place] = places_of(lambda parameter, loaded: parameter.data.copy_(loaded))
    assert place == Place("live", ((0, 6), (0, 4)), 0, (4, 1))


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (3, 1, 2), (1, 5)])
def test_dimensions_of_one_element_have_a_place(shape: tuple[int, ...]) -> None:
    [place] = places_of(lambda parameter, loaded: parameter.data.copy_(loaded), shape)
    assert place.box == whole(shape) and place.strides == contiguous_strides(shape or (1,))


def test_a_parameter_with_gaps_between_its_elements_has_a_place_around_them() -> None:
    [place] = places_of(lambda parameter, loaded: parameter.data.copy_(loaded), held=torch.zeros(6, 8)[:, :4])
    assert place == Place("live", ((0, 6), (0, 4)), 0, (8, 1))


def two_parameters(names: Sequence[str], load: Callable[[dict[str, Any], str, torch.Tensor], None], shape: Sequence[int]) -> list[Place]:
    """Places in two parameters of four rows, whose loader takes the first of the rows to fill."""

    def loader(parameter: torch.nn.Parameter, loaded: torch.Tensor, first: int = 0) -> None:
        parameter.data[first : first + len(loaded)].copy_(loaded)

    parameters = {name: with_loader(torch.zeros(4, 2), loader) for name in ("a", "b")}

    def load_all(weights: list[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            load(parameters, name, tensor)

    return find_places(manifest_of({name: torch.zeros(tuple(shape)) for name in names}), parameters, load_all)


def test_a_tensor_that_goes_to_two_parameters_is_refused() -> None:
    def load(parameters: dict[str, Any], _: str, tensor: torch.Tensor) -> None:
        for parameter in parameters.values():
            parameter.weight_loader(parameter, tensor)

    with pytest.raises(NotInPlaceError, match=r"w goes to 2 places in the engine: \['a', 'b'\]"):
        two_parameters(["w"], load, (4, 2))


def test_a_parameter_that_no_tensor_fills_is_named() -> None:
    """An engine that would go on with what it was started with, or with garbage."""

    def load(parameters: dict[str, Any], name: str, tensor: torch.Tensor) -> None:
        parameters[name].weight_loader(parameters[name], tensor)

    assert len(two_parameters(["a", "b"], load, (4, 2))) == 2
    with pytest.raises(NotInPlaceError, match=r"1 parameters .* only in part: \['b'\]"):
        two_parameters(["a"], load, (4, 2))


def test_a_parameter_that_is_filled_only_in_part_is_named() -> None:
    """Gate without up, say."""

    def load(parameters: dict[str, Any], name: str, tensor: torch.Tensor) -> None:
        parameter = parameters[name[0]]
        parameter.weight_loader(parameter, tensor, 2 * int(name[1]))

    assert len(two_parameters(["a0", "a1", "b0", "b1"], load, (2, 2))) == 4
    with pytest.raises(NotInPlaceError, match=r"1 parameters .* only in part: \['b'\]"):
        two_parameters(["a0", "a1", "b0"], load, (2, 2))


def test_a_tensor_that_the_engine_does_not_know_is_named() -> None:
    engine = FakeEngine(0, 1, torch.float32)
    weights = {**random_weights(torch.float32, 1), "unknown": torch.zeros(2)}
    with pytest.raises(NotInPlaceError, match="the engine's loader refuses unknown: KeyError"):
        find_places(manifest_of(weights), engine.parameters, engine.load)


# ---- more than 2**31 elements ------------------------------------------------------------------------------------------

ROWS, COLUMNS = 70_000, 40_000
"""2.8e9 elements: a flat index needs 64 bits."""


def of_one_tensor(parameter: torch.Tensor, place: Place) -> LiveWeights:
    manifest = WeightsManifest(
        names=("w",), shapes=((ROWS, COLUMNS),), dtypes=("bfloat16",), cuts=((0, ROWS),), trained=(True,), bucket_bytes=1
    )
    return LiveWeights(manifest, {"live": parameter}, [place])


def values_of(*numbers: float) -> torch.Tensor:
    return bits(torch.tensor(numbers, dtype=torch.bfloat16))


def test_the_far_corner_of_a_tensor_of_more_than_2_to_the_31_elements_is_patched_in_a_small_part_of_it() -> None:
    corner = torch.zeros(2, 3, dtype=torch.bfloat16)
    place = Place("live", ((ROWS - 2, ROWS), (COLUMNS - 3, COLUMNS)), 0, (3, 1))
    last = ROWS * COLUMNS - 1
    assert last > 2**31
    inside = [last - COLUMNS - 2, last - COLUMNS, last - 1, last]
    beside = [0, last - 2**32, last - 2**31, last - 2 * COLUMNS, last - COLUMNS - 3, last - COLUMNS + 1, last - 3]
    indices = torch.tensor(sorted(inside + beside))
    values = torch.stack([values_of(float(inside.index(i) + 1) if i in inside else 9.0)[0] for i in indices.tolist()])
    of_one_tensor(corner, place).patch(0, indices, values)
    assert corner.tolist() == [[1.0, 0.0, 2.0], [0.0, 3.0, 4.0]]


@pytest.fixture
def huge(tmp_path: Path) -> Iterator[torch.Tensor]:
    """``[ROWS * COLUMNS]`` zeros in a file without content: only pages that are touched take memory or disk."""
    path = tmp_path / "sparse"
    with path.open("wb") as file:
        file.truncate(ROWS * COLUMNS * 2)
    yield torch.from_file(str(path), shared=True, size=ROWS * COLUMNS, dtype=torch.bfloat16)
    path.unlink()


@pytest.mark.parametrize("turned", [False, True], ids=["in order", "transposed"])
def test_a_live_tensor_of_more_than_2_to_the_31_elements_is_patched(huge: torch.Tensor, turned: bool) -> None:
    strides = (1, ROWS) if turned else (COLUMNS, 1)
    live = of_one_tensor(
        huge.view(COLUMNS, ROWS) if turned else huge.view(ROWS, COLUMNS), Place("live", whole((ROWS, COLUMNS)), 0, strides)
    )
    spots = [(0, 0), (1, 39_999), (53_687, 3_647), (53_687, 3_648), (69_999, 0), (69_999, 39_999)]
    indices = torch.tensor([row * COLUMNS + column for row, column in spots])
    assert 2**31 in indices and 2**31 - 1 in indices
    live.patch(0, indices, values_of(*range(1, 7)))
    for number, (row, column) in enumerate(spots, 1):
        assert huge[row * strides[0] + column * strides[1]] == number
    assert live.view(0)[53_687, 3_646:3_650].tolist() == [0.0, 3.0, 4.0, 0.0]
    assert live.view(0)[69_999, :2].tolist() == [5.0, 0.0]


def test_rows_beyond_2_to_the_31_elements_are_written(huge: torch.Tensor) -> None:
    live = of_one_tensor(huge.view(ROWS, COLUMNS), Place("live", whole((ROWS, COLUMNS)), 0, (COLUMNS, 1)))
    row = torch.arange(COLUMNS).remainder(256).to(torch.bfloat16)[None]
    live.write(0, ROWS - 1, row)
    assert torch.equal(huge[-COLUMNS:], row[0])
    assert huge[-COLUMNS - 2 : -COLUMNS].tolist() == [0.0, 0.0] and huge[:2].tolist() == [0.0, 0.0]
