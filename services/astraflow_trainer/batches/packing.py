"""Sequence packing: rows become micro-batches of lanes under a token budget.

A lane holds one or more whole rows end to end; attention never crosses from one row to another, and positions
restart at 0 with each row. Attention costs the square of a lane's length, so a long row makes no short one share its
length: rows above a bound have lanes of their own, the others share lanes of that bound.

Invariant: what is computed for a row does not depend on its neighbours, and the same rows always pack the same way.
Called by the training step once per batch.

Shape legend: B lanes, L tokens of a lane (padding included), N trained tokens of the micro-batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from astraflow_trainer.batches.rows import TrainingRow

_PADDING = -1
_PASS_TOKENS = 128
"""What one more micro-batch costs beside its tokens, as so many of them."""
_LEAST_LANE = 32
"""Shorter shared lanes gain nothing."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicroBatch:
    """What one forward pass reads. Trained tokens are flat columns: nothing downstream knows lanes."""

    token_ids_BL: torch.Tensor
    """int64; 0 in padding."""
    position_ids_BL: torch.Tensor
    """int64; restarts at 0 with each row."""
    document_ids_BL: torch.Tensor
    """int64; the row's place in its lane, -1 in padding."""
    source_N: torch.Tensor
    """int64 index into the flattened lanes: the position whose output predicts the trained token."""
    target_N: torch.Tensor
    """int64 token ids."""
    row_N: torch.Tensor
    """int64 index of the trained token's row in the step."""
    behavior_logprob_N: torch.Tensor
    """float32."""
    in_place_N: torch.Tensor
    """bool: sampled with keys and values of other weights (`TrainingRow.in_place`)."""
    temperature_N: torch.Tensor
    """float32."""
    loss_weight_N: torch.Tensor
    """float32; what the loss of the token counts."""
    num_row_tokens: int
    """Tokens of the rows, padding excluded."""
    routed_BLXK: torch.Tensor | None = None
    """int64: the experts to replay in each of X layers, −1 where none were recorded; None where no row has any."""

    @property
    def one_row_per_lane(self) -> bool:
        """Whether plain causal attention already keeps rows apart (padding comes last in a lane)."""
        return int(self.document_ids_BL.max()) <= 0


def attention_mask(document_ids_BL: torch.Tensor) -> torch.Tensor:
    """bool[B, 1, L, L] where the documents are, True where query may read key."""
    same_row = document_ids_BL[:, :, None] == document_ids_BL[:, None, :]
    return (same_row & causal_mask(same_row.shape[1], device=same_row.device)).unsqueeze(1)


def causal_mask(length: int, *, device: torch.device | None = None) -> torch.Tensor:
    """bool[length, length], True on and below the diagonal."""
    return torch.ones(length, length, dtype=torch.bool, device=device).tril()


def pack(
    rows: Sequence[TrainingRow],
    *,
    token_budget: int,
    lane_tokens: int | None = None,
    attention_tokens: float = 4096,
) -> list[MicroBatch]:
    """Micro-batches that together hold every row once, each of at most `token_budget` positions.

    `lane_tokens` is the capacity of every lane; None takes what is cheapest. `attention_tokens` is the length of a lane
    at which attention under a mask costs as much as everything else. Raises ValueError when a row exceeds a bound. An
    empty list gives an empty list.
    """
    if not rows:
        return []
    lengths = [row.num_tokens for row in rows]
    longest = max(lengths)
    capacity = longest if lane_tokens is None else lane_tokens
    if longest > capacity or capacity > token_budget:
        raise ValueError(
            f"the longest of {len(rows)} rows has {longest} tokens, a lane holds {capacity}, a micro-batch "
            f"{token_budget}; raise tokens_per_microbatch to at least {max(longest, capacity)}"
        )
    if lane_tokens is None:
        plans = [plan_lanes(lengths, shared=shared) for shared in _bounds(longest)]
        plan = min(plans, key=lambda plan: plan.cost(token_budget, attention_tokens=attention_tokens))
    else:
        plan = LanePlan([LaneClass(capacity, fill_lanes(lengths, capacity=capacity))])
    return [micro_batch(rows, lanes=chunk) for chunk in plan.chunks(token_budget)]


@dataclass(frozen=True, slots=True)
class LaneClass:
    """Lanes that are computed together."""

    capacity: int
    """Tokens of the longest."""
    lanes: list[list[int]]
    """Places of rows, by lane."""

    @property
    def is_shared(self) -> bool:
        """Whether a lane holds several rows, and so needs a mask."""
        return any(len(lane) > 1 for lane in self.lanes)


@dataclass(frozen=True, slots=True)
class LanePlan:
    """All rows of a step in lanes, longest first."""

    classes: list[LaneClass]

    def chunks(self, token_budget: int) -> list[list[list[int]]]:
        """The lanes of each micro-batch."""
        return [
            chunk
            for held in self.classes
            for chunk in _even_chunks(held.lanes, at_most=token_budget // held.capacity)
        ]

    def cost(self, token_budget: int, *, attention_tokens: float) -> float:
        """What its forward passes cost, as tokens of a model without attention. Causal attention without a mask skips
        half.
        """
        cost = float(_PASS_TOKENS * len(self.chunks(token_budget)))
        for held in self.classes:
            attention = held.capacity / (attention_tokens if held.is_shared else 2 * attention_tokens)
            cost += len(held.lanes) * held.capacity * (1 + attention)
        return cost


def plan_lanes(lengths: Sequence[int], *, shared: int) -> LanePlan:
    """Lanes of `shared` tokens for rows of at most so many, and one for each longer row, beside those of its length:
    within a factor of 2.
    """
    classes: dict[int, list[list[int]]] = {}
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        if lengths[index] > shared:
            doublings = ((lengths[index] - 1) // shared).bit_length()
            classes.setdefault(doublings, []).append([index])
    found = [LaneClass(lengths[lanes[0][0]], lanes) for lanes in classes.values()]
    short = [index for index, length in enumerate(lengths) if length <= shared]
    if short:
        lanes = fill_lanes([lengths[index] for index in short], capacity=shared)
        named = [[short[place] for place in lane] for lane in lanes]
        found.append(LaneClass(max(sum(lengths[index] for index in lane) for lane in named), named))
    return LanePlan(found)


def _bounds(longest: int) -> list[int]:
    """The bounds that are tried: the longest row, halved until short."""
    return [longest] + [
        longest >> halved for halved in range(1, longest.bit_length()) if longest >> halved >= _LEAST_LANE
    ]


def fill_lanes(lengths: Sequence[int], *, capacity: int) -> list[list[int]]:
    """First-fit decreasing: indices of `lengths` per lane. Deterministic; ties keep their order."""
    lanes: list[list[int]] = []
    free: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        length = lengths[index]
        lane = next((lane for lane, room in enumerate(free) if room >= length), len(lanes))
        if lane == len(lanes):
            lanes.append([])
            free.append(capacity)
        lanes[lane].append(index)
        free[lane] -= length
    return lanes


def filler() -> MicroBatch:
    """A micro-batch that trains nothing, for ranks with fewer than others: collectives need partners."""
    nothing = torch.zeros(0, dtype=torch.int64)
    single = torch.zeros(1, 1, dtype=torch.int64)
    return MicroBatch(
        token_ids_BL=single, position_ids_BL=single, document_ids_BL=single,
        source_N=nothing, target_N=nothing, row_N=nothing,
        behavior_logprob_N=torch.zeros(0), in_place_N=nothing.bool(), temperature_N=torch.ones(0),
        loss_weight_N=torch.ones(0), num_row_tokens=0,
    )  # fmt: skip


def _even_chunks(lanes: list[list[int]], *, at_most: int) -> list[list[list[int]]]:
    """Contiguous chunks of nearly equal size; lanes are ordered by length, so each needs little padding."""
    num_chunks = -(-len(lanes) // at_most)
    borders = [len(lanes) * chunk // num_chunks for chunk in range(num_chunks + 1)]
    return [lanes[start:end] for start, end in pairwise(borders)]


def micro_batch(rows: Sequence[TrainingRow], *, lanes: Sequence[Sequence[int]]) -> MicroBatch:
    """One micro-batch of these lanes, places in `rows` that lie end to end; as wide as the longest lane."""
    width = max(sum(rows[index].num_tokens for index in lane) for lane in lanes)
    shape = (len(lanes), width)
    token_ids = np.zeros(shape, dtype=np.int64)
    positions = np.broadcast_to(np.arange(width), shape).copy()
    documents = np.full(shape, _PADDING, dtype=np.int64)
    columns: list[_TrainedColumns] = []
    routed = _unrouted(rows, lanes, shape=shape)
    for lane_number, lane in enumerate(lanes):
        start = 0
        for document, index in enumerate(lane):
            row = rows[index]
            place = (lane_number, slice(start, start + row.num_tokens))
            token_ids[place] = row.token_ids
            positions[place] -= start
            documents[place] = document
            if routed is not None and row.expert_routing is not None:
                routed[place] = row.expert_routing
            columns.append(_trained_columns(row, index=index, offset=lane_number * width + start))
            start += row.num_tokens
    return MicroBatch(
        token_ids_BL=torch.from_numpy(token_ids),
        position_ids_BL=torch.from_numpy(positions),
        document_ids_BL=torch.from_numpy(documents),
        source_N=_joined([column.source for column in columns]),
        target_N=_joined([column.target for column in columns]),
        row_N=_joined([column.row for column in columns]),
        behavior_logprob_N=_joined([column.behavior_logprob for column in columns]),
        in_place_N=_joined([column.in_place for column in columns]),
        temperature_N=_joined([column.temperature for column in columns]),
        loss_weight_N=_joined([column.loss_weight for column in columns]),
        num_row_tokens=sum(rows[index].num_tokens for lane in lanes for index in lane),
        routed_BLXK=None if routed is None else torch.from_numpy(routed),
    )


def _unrouted(
    rows: Sequence[TrainingRow], lanes: Sequence[Sequence[int]], *, shape: tuple[int, int]
) -> np.ndarray | None:
    """What is to be replayed where a row of the lanes has recorded experts, before any is written: −1."""
    recorded = [rows[index].expert_routing for lane in lanes for index in lane]
    known = next((given for given in recorded if given is not None), None)
    return None if known is None else np.full((*shape, *known.shape[1:]), -1, dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _TrainedColumns:
    source: np.ndarray
    target: np.ndarray
    row: np.ndarray
    behavior_logprob: np.ndarray
    in_place: np.ndarray
    temperature: np.ndarray
    loss_weight: np.ndarray


def _trained_columns(row: TrainingRow, *, index: int, offset: int) -> _TrainedColumns:
    trained = np.flatnonzero(row.loss_mask)
    return _TrainedColumns(
        # The output at position t − 1 predicts token t; a row's first token is never trained.
        source=trained + (offset - 1),
        target=row.token_ids[trained].astype(np.int64),
        row=np.full(len(trained), index, dtype=np.int64),
        behavior_logprob=row.behavior_logprobs[trained].astype(np.float32),
        in_place=row.in_place[trained],
        temperature=np.full(len(trained), row.temperature, dtype=np.float32),
        loss_weight=np.ones(len(trained), dtype=np.float32)
        if row.loss_weights is None
        else row.loss_weights[trained].astype(np.float32),
    )


def _joined(columns: list[np.ndarray]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(columns))
