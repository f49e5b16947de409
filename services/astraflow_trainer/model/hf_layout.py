"""Where the elements of a trainer's parameters stand in Hugging Face tensors.

A trainer may hold several tensors in one parameter: q, k and v or gate and up one after the other, the weights
of all experts stacked. Nodes know none of that: versions consist of Hugging Face tensors. Invariant: the map is
explicit and checked: every element of every parameter has exactly one place, every element of every tensor
comes from exactly one. What a rank holds of a tensor is one range of it, in the order of the ranks. No torch;
`published` builds the map of a model and copies by it.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from astraflow_weights.codec.tensors import TensorSpec

_DTYPE = "bfloat16"
Rows = tuple[str, int]
"""A tensor and its number of rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """`count` elements of a parameter, from `start` on, are those of `tensor` from `tensor_start` on."""

    start: int
    count: int
    tensor: str
    tensor_start: int


@dataclass(frozen=True, kw_only=True)
class ParameterLayout:
    """One parameter, flat and row-major: `runs` ascend and cover it. `tensors` are those it has elements of."""

    name: str
    shape: tuple[int, ...]
    runs: tuple[Run, ...]
    tensors: tuple[TensorSpec, ...]


def alike(name: str, shape: Sequence[int]) -> ParameterLayout:
    """A parameter that is a tensor of the same name."""
    return fused(name, shape, [(name, shape[0] if shape else 1)])


def fused(name: str, shape: Sequence[int], tensors: Sequence[Rows], *, groups: int = 1) -> ParameterLayout:
    """A parameter whose rows are those of several tensors, one after the other (qkv, gate and up).

    With `groups` each of so many blocks of rows holds an equal share of every tensor in turn, as where q, k and v of
    one head stand together. Raises ValueError when the rows do not add up.
    """
    row = math.prod(shape[1:])
    for tensor, rows in tensors:
        if rows % groups:
            raise ValueError(
                f"{rows} rows of {tensor!r} cannot be spread over {groups} groups of parameter {name!r}"
            )
    shares = [
        (tensor, index * (rows // groups), rows // groups)
        for index in range(groups)
        for tensor, rows in tensors
    ]
    specs = [_spec(tensor, (rows, *shape[1:]) if shape else ()) for tensor, rows in tensors]
    return _of_rows(name, shape, shares, row=row, specs=specs)


def stacked(name: str, shape: Sequence[int], experts: Sequence[Sequence[Rows]]) -> ParameterLayout:
    """A parameter [experts, rows, …] of which each expert's rows are those of its own tensors, one after the other.

    Raises ValueError when their numbers do not fit the shape.
    """
    if (
        len(shape) < 2
        or len(experts) != shape[0]
        or any(sum(r for _, r in own) != shape[1] for own in experts)
    ):
        raise ValueError(
            f"parameter {name!r} of shape {tuple(shape)} cannot hold {len(experts)} experts of "
            f"{sorted({sum(rows for _, rows in own) for own in experts})} rows"
        )
    shares = [(tensor, 0, rows) for own in experts for tensor, rows in own]
    specs = [_spec(tensor, (rows, *shape[2:])) for own in experts for tensor, rows in own]
    return _of_rows(name, shape, shares, row=math.prod(shape[2:]), specs=specs)


class ModelLayout:
    """The map of a whole model; the same on every rank."""

    def __init__(self, parameters: Iterable[ParameterLayout]) -> None:
        """Raises ValueError where tensors are not covered exactly once, or have no elements."""
        self.parameters = tuple(parameters)
        specs = {spec.name: spec for parameter in self.parameters for spec in parameter.tensors}
        self.specs = tuple(specs[name] for name in sorted(specs))
        for spec, runs in _by_tensor(self.specs, self.parameters).items():
            _check_covered(spec, runs)


@dataclass(frozen=True, kw_only=True)
class HeldTensor:
    """What one rank holds of a tensor: elements [start, start + count).

    `sources` say where they come from, in order: parameter, first element of the rank's flat part of it, number.
    """

    start: int
    count: int
    sources: tuple[tuple[str, int, int], ...]


def held_tensors(layout: ModelLayout, ranges: Mapping[str, tuple[int, int]]) -> dict[str, HeldTensor]:
    """What a rank holds of each tensor when it holds elements [start, stop) of the flat parameters.

    Raises ValueError when that is not one range of a tensor: such a tensor cannot be published in shards.
    """
    pieces: dict[str, list[tuple[int, int, str, int]]] = {}
    for parameter in layout.parameters:
        start, stop = ranges.get(parameter.name, (0, 0))
        for run in parameter.runs:
            first, last = max(start, run.start), min(stop, run.start + run.count)
            if first < last:
                place = run.tensor_start + first - run.start
                pieces.setdefault(run.tensor, []).append((place, last - first, parameter.name, first - start))
    return {tensor: _joined(tensor, sorted(found)) for tensor, found in sorted(pieces.items())}


def _of_rows(
    name: str,
    shape: Sequence[int],
    shares: Iterable[tuple[str, int, int]],
    *,
    row: int,
    specs: Sequence[TensorSpec],
) -> ParameterLayout:
    runs, start = [], 0
    for tensor, first_row, rows in shares:
        runs.append(Run(start=start, count=rows * row, tensor=tensor, tensor_start=first_row * row))
        start += rows * row
    if start != math.prod(shape):
        raise ValueError(
            f"parameter {name!r} of shape {tuple(shape)} has {math.prod(shape)} elements; its tensors have {start}"
        )
    return ParameterLayout(name=name, shape=tuple(shape), runs=tuple(runs), tensors=tuple(specs))


def _spec(tensor: str, shape: tuple[int, ...]) -> TensorSpec:
    return TensorSpec(name=tensor, dtype=_DTYPE, shape=shape)


def _by_tensor(
    specs: Sequence[TensorSpec], parameters: Sequence[ParameterLayout]
) -> dict[TensorSpec, list[tuple[int, int]]]:
    runs: dict[str, list[tuple[int, int]]] = {spec.name: [] for spec in specs}
    for parameter in parameters:
        for run in parameter.runs:
            runs[run.tensor].append((run.tensor_start, run.count))
    return {spec: sorted(runs[spec.name]) for spec in specs}


def _check_covered(spec: TensorSpec, runs: Sequence[tuple[int, int]]) -> None:
    covered = 0
    for start, count in runs:
        if start != covered:
            raise ValueError(
                f"element {covered} of tensor {spec.name!r} comes from no parameter, or from two"
            )
        covered += count
    if covered != spec.num_elements or not covered:
        raise ValueError(
            f"parameters give {covered} elements of tensor {spec.name!r} of shape {spec.shape}; "
            "a tensor needs at least one and all of its own"
        )


def _joined(tensor: str, pieces: Sequence[tuple[int, int, str, int]]) -> HeldTensor:
    first = end = pieces[0][0]
    for place, count, _, _ in pieces:
        if place != end:
            raise ValueError(
                f"a rank holds elements up to {end} and from {place} on of tensor {tensor!r}; shard parameters so "
                "that each rank holds one range of every tensor"
            )
        end = place + count
    return HeldTensor(
        start=first,
        count=end - first,
        sources=tuple((name, start, count) for _, count, name, start in pieces),
    )
