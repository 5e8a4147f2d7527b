"""Where an engine keeps each of the trainer's tensors, learnt from the engine's own loader, and read and written in place.

Engines fuse parameters (query, key and value in one), cut them over tensor-parallel workers, pad or transpose them. Instead of rules
for each model, every tensor is loaded once as a grid of numbers 1, 2, 3 ... into a scratch copy of the parameter that it belongs to:
where the numbers land says which part of the tensor this worker holds (its box) and the strides at which it lies. What does not land
as a regular grid is no :class:`Place`; such a model is reloaded through the engine's loader instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from rlpost.types import Box, Layout, WeightsManifest
from rlpost.weights.baseline import BITS
from rlpost.weights.buckets import row_elements
from rlpost.weights.fingerprint import TensorHashes, within

Load = Callable[[list[tuple[str, torch.Tensor]]], Any]
UNTOUCHED = -1


class NotInPlaceError(Exception):
    """A tensor cannot be read and written where the engine keeps it; the message says which and why."""


@dataclass(frozen=True)
class Place:
    """A tensor's part ``box`` as a view of the engine's live parameter, of the box's shape."""

    parameter: str
    box: Box
    offset: int
    """First element of the view in the parameter's storage."""
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

    def patch(self, tensor: int, indices: torch.Tensor, values: torch.Tensor) -> None:
        """Overwrite single elements: flat ``indices`` of the whole tensor ``[changed]``, their new bits ``[changed]`` as integers."""
        place, shape = self._places[tensor], self._manifest.shapes[tensor] or (1,)
        parameter = self._parameters[place.parameter]
        extent = 1 + sum((high - low - 1) * stride for (low, high), stride in zip(place.box, place.strides, strict=True))
        flat = torch.as_strided(parameter, (extent,), (1,), parameter.storage_offset() + place.offset).view(BITS[parameter.dtype.itemsize])
        if place.box == whole(shape) and place.strides == contiguous_strides(shape):
            flat.index_copy_(0, indices.long(), values)
            return
        rest, position = indices.long(), torch.zeros_like(indices, dtype=torch.int64)
        inside = torch.ones_like(indices, dtype=torch.bool)
        for dimension in reversed(range(len(shape))):
            low, high = place.box[dimension]
            coordinate = rest % shape[dimension]
            rest = rest // shape[dimension]
            inside &= (coordinate >= low) & (coordinate < high)
            position += (coordinate - low) * place.strides[dimension]
        flat.index_copy_(0, position[inside], values[inside])

    def sums(self) -> dict[str, int]:
        """The hashes of all live tensors, segment by segment as the trainer hashes them."""
        hashes = TensorHashes(self._manifest, self.layout)
        for tensor, (place, cuts) in enumerate(zip(self._places, self._manifest.cuts, strict=True)):
            view, (low, high) = self.view(tensor), place.box[0]
            for owner, (first, last) in enumerate(pairwise(cuts)):
                if first < last:
                    begin, end = max(first, low), min(last, high)
                    hashes.add_held(tensor, owner, view[begin - low : end - low] if begin < end else None)
        hashes.total()
        return hashes.sums


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
    for name, shape in zip(manifest.names, manifest.shapes, strict=True):
        with _landing(parameters) as landed:
            codes = torch.arange(1, 1 + row_elements((1, *shape)), dtype=torch.int64).view(shape)
            try:
                load([(name, codes.to(next(iter(parameters.values())).device))])
            except Exception as error:
                raise NotInPlaceError(f"the engine's loader refuses {name}: {type(error).__name__}: {error}") from error
        if len(landed) != 1:
            raise NotInPlaceError(f"{name} goes to {len(landed)} parameters of the engine ({[parameter for parameter, _ in landed]})")
        parameter, scratch = landed[0]
        places.append(_place(name, shape or (1,), parameter, scratch))
        covered[parameter] += int((scratch != UNTOUCHED).sum())
    missing = [name for name, parameter in parameters.items() if covered[name] < parameter.numel()]
    if missing:
        raise NotInPlaceError(f"{len(missing)} parameters of the engine come from no tensor of the trainer, or only in part: {missing[:5]}")
    return places


@contextmanager
def _landing(parameters: dict[str, torch.nn.Parameter]) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """While it lasts, whatever is loaded into a parameter lands in a scratch copy of integers, listed with the parameter's name."""
    from vllm.model_executor.model_loader.weight_utils import default_weight_loader

    landed: list[tuple[str, torch.Tensor]] = []
    originals: list[tuple[torch.nn.Parameter, Any]] = []

    def divert(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def loader(parameter: torch.nn.Parameter, loaded: torch.Tensor, *arguments: Any, **options: Any) -> Any:
            live, gradient = parameter.data, parameter.requires_grad
            scratch = torch.empty_strided(live.size(), live.stride(), dtype=torch.int64, device=live.device).fill_(UNTOUCHED)
            parameter.requires_grad = False  # integers cannot have gradients; vLLM leaves the default on norms
            parameter.data = scratch
            try:
                return original(parameter, loaded, *arguments, **options)
            finally:
                parameter.data = live
                parameter.requires_grad = gradient
                landed.append((name, scratch))

        return loader

    for name, parameter in parameters.items():
        original = getattr(parameter, "weight_loader", None)
        originals.append((parameter, original))
        parameter.weight_loader = divert(name, original or default_weight_loader)  # type: ignore[attr-defined]
    try:
        yield landed
    finally:
        for parameter, original in originals:
            if original is None:
                del parameter.weight_loader  # type: ignore[attr-defined]
            else:
                parameter.weight_loader = original  # type: ignore[attr-defined]


def _place(name: str, shape: Sequence[int], parameter: str, scratch: torch.Tensor) -> Place:
    """From where the numbers landed: the box, and a strided view that shows exactly the box's numbers."""
    if scratch.numel() and _extent(scratch) != scratch.numel():
        raise NotInPlaceError(f"{parameter} has gaps between its elements")
    memory = torch.as_strided(scratch, (scratch.numel(),), (1,), 0)
    positions = (memory > 0).nonzero().view(-1)
    if not len(positions):
        raise NotInPlaceError(f"nothing of {name} landed in {parameter}")
    numbers = memory[positions] - 1
    box, steps, rest = [], contiguous_strides(shape), numbers
    for step in steps:
        coordinate, rest = rest // step, rest % step
        box.append((int(coordinate.min()), int(coordinate.max()) + 1))
    sizes = [high - low for low, high in box]
    if math.prod(sizes) != len(numbers):
        raise NotInPlaceError(f"what landed of {name} in {parameter} is no block of it")
    first = sum(low * step for (low, _), step in zip(box, steps, strict=True))
    where = torch.full((int(numbers.max()) + 1,), -1, dtype=torch.int64, device=memory.device)
    where[numbers] = positions
    offset = int(where[first])
    strides = tuple(int(where[first + step]) - offset if size > 1 else step for step, size in zip(steps, sizes, strict=True))
    expected = torch.full(sizes, first + 1, dtype=torch.int64, device=memory.device)
    for dimension, (step, size) in enumerate(zip(steps, sizes, strict=True)):
        ramp = torch.arange(size, device=memory.device) * step
        expected += ramp.view([-1 if d == dimension else 1 for d in range(len(sizes))])
    if min(strides) < 0 or not torch.equal(torch.as_strided(memory, sizes, strides, offset), expected):
        raise NotInPlaceError(f"{name} does not lie in {parameter} as a regular grid")
    return Place(parameter, tuple(box), offset, strides)


def _extent(tensor: torch.Tensor) -> int:
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
