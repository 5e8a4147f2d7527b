"""Where an engine keeps each of the trainer's tensors, learnt from the engine's own loader, and read and written in place.

Engines fuse parameters (query, key and value in one), cut them over tensor-parallel workers, pad or transpose them. Instead of rules
for each model, the loader is run once with tensors that have a shape but no memory, and its copies are watched: the two views of a copy
say which part of the tensor this worker holds (its box), and where and at which strides it lies. A loader that computes something, or
cuts a tensor up, gives no :class:`Place`; such a model is reloaded through the engine's loader instead.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rlpost.types import Box, Layout, WeightsManifest
from rlpost.weights.baseline import BITS
from rlpost.weights.buckets import total_bytes
from rlpost.weights.fingerprint import MODULUS, TensorHashes, within

HASH_THREADS = min(4, os.cpu_count() or 1)
THREADS_FROM_BYTES = 32 << 20
"""Starting threads takes as long as hashing some ten MiB."""

Load = Callable[[list[tuple[str, torch.Tensor]]], Any]


class NotInPlaceError(Exception):
    """A tensor cannot be read and written where the engine keeps it; the message says which and why."""


@dataclass(frozen=True)
class Place:
    """A tensor's part ``box`` as a view of the engine's live parameter, of the box's shape."""

    parameter: str
    box: Box
    offset: int
    """First element of the view, counted from the parameter's first."""
    strides: tuple[int, ...]

    def view(self, parameter: torch.Tensor) -> torch.Tensor:
        """The live elements ``[*box shape]``."""
        sizes = [high - low for low, high in self.box]
        return torch.as_strided(parameter, sizes, self.strides, parameter.storage_offset() + self.offset)


class LiveWeights:
    """All tensors of a manifest in the live parameters of one engine worker."""

    def __init__(self, manifest: WeightsManifest, parameters: dict[str, torch.Tensor], places: Sequence[Place]) -> None:
        self._manifest, self._parameters, self._places = manifest, parameters, places
        self.layout: Layout = tuple(
            None if place.box == whole(shape) else place.box for place, shape in zip(places, manifest.shapes, strict=True)
        )

    def view(self, tensor: int) -> torch.Tensor:
        """This worker's part of a tensor, live."""
        place = self._places[tensor]
        return place.view(self._parameters[place.parameter])

    def write(self, tensor: int, start: int, rows: torch.Tensor) -> None:
        """Put rows from ``start`` of the whole tensor where they belong; what lies outside of the box is left out."""
        box = self._places[tensor].box
        part = within(rows, start, box)
        if part is not None:
            first = max(start, box[0][0]) - box[0][0]
            self.view(tensor)[first : first + part.shape[0]].copy_(part)

    def memory(self, tensor: int, start: int, stop: int) -> torch.Tensor | None:
        """The bytes of these rows of the whole tensor, live and in one piece; None where they do not lie so."""
        box, shape = self._places[tensor].box, self._manifest.shapes[tensor] or (1,)
        if box[1:] != whole(shape)[1:] or start < box[0][0] or stop > box[0][1]:
            return None
        rows = self.view(tensor)[start - box[0][0] : stop - box[0][0]]
        fits = rows.is_contiguous() and rows.dtype == getattr(torch, self._manifest.dtypes[tensor])
        return rows.view(-1).view(torch.uint8) if fits else None

    def patch(self, tensor: int, indices: torch.Tensor, values: torch.Tensor) -> None:
        """Overwrite single elements: flat ``indices`` of the whole tensor ``[changed]``, their new bits ``[changed]`` as integers."""
        place, shape = self._places[tensor], self._manifest.shapes[tensor] or (1,)
        parameter = self._parameters[place.parameter]
        extent = 1 + sum((high - low - 1) * stride for (low, high), stride in zip(place.box, place.strides, strict=True))
        flat = torch.as_strided(parameter, (extent,), (1,), parameter.storage_offset() + place.offset).view(BITS[parameter.dtype.itemsize])
        if place.box == whole(shape) and place.strides == contiguous_strides(shape):
            flat.scatter_(0, indices.long(), values)  # half the time of index_copy_ and put_
            return
        rest, position = indices.long(), torch.zeros_like(indices, dtype=torch.int64)
        inside = torch.ones_like(indices, dtype=torch.bool)
        for dimension in reversed(range(len(shape))):
            low, high = place.box[dimension]
            coordinate = rest % shape[dimension]
            rest = rest // shape[dimension]
            inside &= (coordinate >= low) & (coordinate < high)
            position += (coordinate - low) * place.strides[dimension]
        flat.scatter_(0, position[inside], values[inside])

    def sums(self) -> dict[str, int]:
        """The hashes of all live tensors, segment by segment as the trainer hashes them."""
        hashes = TensorHashes(self._manifest, self.layout)
        # Generation stands still meanwhile, so the cores that it leaves idle may help; hashing lets go of the interpreter.
        small = total_bytes(self._manifest) < THREADS_FROM_BYTES
        with ThreadPoolExecutor(max_workers=HASH_THREADS) as threads:
            run = map if small else threads.map
            for name, digest in run(lambda segment: hashes.hash_held(*segment), self._segments()):
                hashes.sums[name] = (hashes.sums.get(name, 0) + digest) % MODULUS
        return hashes.sums

    def _segments(self) -> Iterator[tuple[int, int, torch.Tensor | None]]:
        """Tensor, owner, and what of the segment is held here."""
        for tensor, (place, cuts) in enumerate(zip(self._places, self._manifest.cuts, strict=True)):
            view, (low, high) = self.view(tensor), place.box[0]
            for owner, (first, last) in enumerate(pairwise(cuts)):
                if first < last:
                    begin, end = max(first, low), min(last, high)
                    yield tensor, owner, view[begin - low : end - low] if begin < end else None


def whole(shape: Sequence[int]) -> Box:
    """The box that is all of a tensor."""
    return tuple((0, size) for size in (tuple(shape) or (1,)))


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a row-major tensor."""
    return tuple(math.prod(shape[dimension + 1 :]) for dimension in range(len(shape)))


@torch.no_grad()
def find_places(manifest: WeightsManifest, parameters: dict[str, torch.nn.Parameter], load: Load) -> list[Place]:
    """The place of every tensor. Raises NotInPlaceError for the first that has none, or when a parameter is filled by no tensor."""
    covered: dict[str, int] = dict.fromkeys(parameters, 0)
    places = []
    for name, shape, dtype in zip(manifest.names, manifest.shapes, manifest.dtypes, strict=True):
        source = torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
        with _watched(parameters, source) as copies:
            try:
                load([(name, source)])
            except NotInPlaceError:
                raise
            except Exception as error:
                raise NotInPlaceError(f"the engine's loader refuses {name}: {type(error).__name__}: {error}") from error
        moved = [copy for copy in copies if copy.source is not None]
        if len(moved) != 1:
            raise NotInPlaceError(f"{name} goes to {len(moved)} places in the engine: {[copy.parameter for copy in moved]}")
        places.append(_place(name, shape or (1,), moved[0], int(parameters[moved[0].parameter].storage_offset())))
        for copy in copies:
            covered[copy.parameter] += copy.target.numel()
    missing = [name for name, parameter in parameters.items() if covered[name] < parameter.numel()]
    if missing:
        raise NotInPlaceError(f"{len(missing)} parameters of the engine come from no tensor of the trainer, or only in part: {missing[:5]}")
    return places


@dataclass(frozen=True)
class _Copy:
    """Elements ``target`` (a view of a parameter) that a loader wrote, from ``source`` (a view of the tensor; None: a constant)."""

    parameter: str
    target: torch.Tensor
    source: torch.Tensor | None


class _Watcher(TorchDispatchMode):
    """Notes every write into the parameter that is being loaded, and does not carry it out."""

    def __init__(self, source: torch.Tensor) -> None:
        super().__init__()
        self._source = _storage(source)
        self.loading: tuple[str, int] = ("", 0)
        """Name and storage of that parameter."""
        self.copies: list[_Copy] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, storage = self.loading
        if func._schema.name not in ("aten::copy_", "aten::fill_", "aten::zero_") or _storage(args[0]) != storage:
            return func(*args, **(kwargs or {}))
        if func._schema.name != "aten::copy_":
            self.copies.append(_Copy(name, args[0], None))
        elif _storage(args[1]) == self._source:
            self.copies.append(_Copy(name, args[0], args[1]))
        else:
            raise NotInPlaceError(f"what is loaded into {name} is no part of the tensor as it came, but computed from it")
        return args[0]


def _storage(tensor: torch.Tensor) -> int:
    identity: int = tensor.untyped_storage()._cdata
    return identity


@contextmanager
def _watched(parameters: dict[str, torch.nn.Parameter], source: torch.Tensor) -> Iterator[list[_Copy]]:
    """While it lasts, what is loaded into parameters is listed and not written."""
    from vllm.model_executor.model_loader.weight_utils import default_weight_loader

    watcher = _Watcher(source)
    originals: list[tuple[torch.nn.Parameter, Any]] = []

    def divert(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def loader(parameter: torch.nn.Parameter, loaded: torch.Tensor, *arguments: Any, **options: Any) -> Any:
            watcher.loading = name, _storage(parameter)
            with watcher:
                return original(parameter, loaded, *arguments, **options)

        return loader

    for name, parameter in parameters.items():
        original = getattr(parameter, "weight_loader", None)
        originals.append((parameter, original))
        parameter.weight_loader = divert(name, original or default_weight_loader)  # type: ignore[attr-defined]
    try:
        yield watcher.copies
    finally:
        for parameter, original in originals:
            if original is None:
                del parameter.weight_loader  # type: ignore[attr-defined]
            else:
                parameter.weight_loader = original  # type: ignore[attr-defined]


def _place(name: str, shape: Sequence[int], copy: _Copy, first: int) -> Place:
    """From the two views of one copy: the box of the tensor, and where and at which strides it lies in the parameter.

    ``first`` is where the parameter begins in its storage.
    """
    source, target = copy.source, copy.target
    assert source is not None
    if source.shape != target.shape:
        raise NotInPlaceError(f"{name} gives {tuple(source.shape)} where {copy.parameter} takes {tuple(target.shape)}")
    if source.dtype != target.dtype:  # the bits that are held would be others than those that are sent
        raise NotInPlaceError(f"{name} comes as {source.dtype} where {copy.parameter} takes {target.dtype}")
    steps = contiguous_strides(shape)
    rest, box = source.storage_offset(), []
    for step, size in zip(steps, shape, strict=True):
        low, rest = (rest // step, rest % step) if size else (0, rest)
        box.append((low, low + 1))
    strides = list(steps)
    for size, step, stride in zip(source.shape, source.stride(), target.stride(), strict=True):
        if size == 1:
            continue
        fitting = [
            d for d, (known, (low, high)) in enumerate(zip(steps, box, strict=True)) if known == step and high - low == 1 and shape[d] > 1
        ]
        if not fitting or box[fitting[0]][0] + size > shape[fitting[0]]:
            raise NotInPlaceError(f"what {copy.parameter} gets of {name} is no block of it")
        dimension = fitting[0]
        box[dimension] = (box[dimension][0], box[dimension][0] + size)
        strides[dimension] = stride
    return Place(copy.parameter, tuple(box), int(target.storage_offset()) - first, tuple(strides))
