"""One batch for several ranks: the first rank decides what happens next, the others follow it.

Invariant: only the first rank speaks to the server about a step (acquire, intent, ack, durable) and hears
operators; what it decides reaches every rank as one small message per step, and each rank fetches only its
own share of the payloads. While the first rank waits it says so every few seconds, so a follower never waits
in silence. The training loop runs the same way on every rank, over a `RankBatches`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from enum import StrEnum

import torch

from astraflow.dataflow.v1 import batch_pb2, batch_service_pb2
from astraflow.training.accepting import group_of
from astraflow_trainer.batches.fitting import groups_left_out
from astraflow_trainer.batches.precision import LogprobPrecision
from astraflow_trainer.batches.read_ahead import ReadAhead
from astraflow_trainer.batches.rows import TrainingRow
from astraflow_trainer.batches.source import NOT_MEASURED, RUN_FINISHED, BatchSource, StepBatch
from astraflow_trainer.controls import Controls, Orders
from astraflow_trainer.ranks.reductions import Ranks


class _Kind(StrEnum):
    """What the first rank sends to the others."""

    WAIT = "wait"
    STEP = "step"
    ORDERS = "orders"


@dataclass(frozen=True)
class _Decision:
    """The message of one decision: what to do, why, and the orders or the batch when there are some."""

    kind: _Kind
    reason: str = ""
    orders: Orders = field(default_factory=Orders)
    batch: bytes = b""

    def encode(self) -> bytes:
        head = {"kind": self.kind, "reason": self.reason, "orders": asdict(self.orders)}
        return json.dumps(head).encode() + b"\n" + self.batch

    @classmethod
    def decode(cls, message: bytes) -> _Decision:
        head, _, batch = message.partition(b"\n")
        fields = json.loads(head)
        return cls(_Kind(fields["kind"]), fields["reason"], Orders(**fields["orders"]), batch)


@dataclass(frozen=True)
class _Received:
    """What one rank took of a batch."""

    num_bytes: int
    num_trajectories: int
    num_tokens: int
    num_spans_max: int
    num_turns: int
    are_bf16: bool
    num_stale_tokens: int
    was_read_ahead: bool
    read_ahead_s: float


class RankBatches:
    """Batches of one policy as one rank sees them. Blocking; owned by the training thread."""

    def __init__(self, source: BatchSource, ranks: Ranks, *, ahead: ReadAhead | None = None) -> None:
        """`source` speaks for this rank; its epoch is the one that the first rank claimed. Without `ahead` a batch is
        fetched when its step begins.
        """
        self._source = source
        self._ahead = ahead
        self._ranks = ranks
        self._is_first = ranks.index == 0
        self._received: list[_Received] = []
        self._num_episodes = 0
        self._precision = LogprobPrecision()
        self.num_left_out = 0
        """Trajectories of the latest `fetch` that are left out, over all ranks."""

    def unit_of_work(self, step: int) -> AbstractContextManager[None]:
        """Log and call under the step's correlation id inside the block."""
        return self._source.unit_of_work(step)

    def acquire(
        self, step: int, *, base_version: int, waiting: Callable[[str], None], controls: Controls
    ) -> StepBatch | Orders:
        """Return the batch of `step`, or what to do before it; a collective. Only the first rank's `controls`
        count.

        `waiting` is called with the reason why there is none yet, after each empty poll of the first rank.
        """
        if not self._is_first:
            return self._follow(waiting=waiting)

        def report_waiting(reason: str) -> None:
            if reason == RUN_FINISHED:
                controls.stop_after_step()
            self._send(_Decision(_Kind.WAIT, reason))
            waiting(reason)

        while True:
            orders = controls.take(waiting=report_waiting)
            if orders is not None:
                self._send(_Decision(_Kind.ORDERS, orders=orders))
                return orders
            batch = self._source.acquire(
                step, base_version=base_version, waiting=report_waiting, stopped=controls.interrupts
            )
            if batch is not None and controls.begin(step):
                answer = batch_service_pb2.AcquireBatchResponse(batch=batch.bound, stage=batch.stage)
                self._send(_Decision(_Kind.STEP, batch=answer.SerializeToString()))
                return batch

    def trying(self, batch: StepBatch) -> AbstractContextManager[None]:
        """Note how the block, the step of a batch, ends, on each rank."""
        return nullcontext() if self._source.failed is None else self._source.failed.trying(batch.bound)

    def record_intent(self, batch: StepBatch) -> None:
        """The first rank records the intent; no rank trains before, because training is a collective."""
        if self._is_first:
            self._source.record_intent(batch)

    def fetch(self, batch: StepBatch) -> list[TrainingRow]:
        """Return this rank's rows, without groups of which a payload, of any rank, cannot be trained on; a
        collective.
        """
        read = self._ahead.taken(batch) if self._ahead is not None else None
        fetched = self._source.fetch(batch, items=self._share(batch)) if read is None else read[0]
        left_out = groups_left_out(fetched.problems, ranks=self._ranks)
        self.num_left_out = sum(group_of(item) in left_out for item in batch.bound.items) if left_out else 0
        rows = [row for row in fetched.rows if row.group not in left_out]
        mine = _Received(
            num_bytes=fetched.num_bytes,
            num_trajectories=len(rows),
            num_tokens=sum(row.num_tokens for row in rows),
            num_spans_max=max((len(row.version_spans) for row in rows), default=0),
            num_turns=sum(row.num_turns for row in rows),
            are_bf16=self._precision.look(rows),
            num_stale_tokens=fetched.num_stale_tokens,
            was_read_ahead=read is not None,
            read_ahead_s=0.0 if read is None else read[1],
        )
        everybody = self._ranks.all_gather(json.dumps(asdict(mine)).encode())
        self._received = [_Received(**json.loads(message)) for message in everybody]
        kept = (item for item in batch.bound.items if group_of(item) not in left_out)
        self._num_episodes = len({(item.task_id, item.member) for item in kept})
        return rows

    def read_ahead(self, step: int, *, base_version: int) -> None:
        """Read the batch of `step`, the one after the step in hand, beside training. No collective: each rank takes up
        what it has read when `fetch` is called for the very batch.
        """
        if self._ahead is not None:
            self._ahead.begin(step, base_version=base_version, share=self._share)

    def end_read_ahead(self, *, gives_back: bool) -> None:
        """No step follows here: what was read ahead goes back, or waits for the next trainer."""
        if self._ahead is not None and gives_back:
            self._ahead.end()
        elif self._ahead is not None:
            self._ahead.leave()

    def measured(self) -> dict[str, float]:
        """Return what the ranks received of the latest batch, as named numbers."""
        total = sum(rank.num_bytes for rank in self._received)
        named = {
            "fetched_bytes": float(total),
            "num_stale_tokens": float(sum(rank.num_stale_tokens for rank in self._received)),
            "num_version_spans_max": float(max((rank.num_spans_max for rank in self._received), default=0)),
            "turns_mean": sum(rank.num_turns for rank in self._received) / max(1, self._num_episodes),
            "bf16_logprobs": float(any(rank.are_bf16 for rank in self._received)),
            "num_quarantined_batches": float(self._source.num_quarantined),
            "read_ahead": float(all(rank.was_read_ahead for rank in self._received)),
            "read_ahead_s": max((rank.read_ahead_s for rank in self._received), default=0.0),
        }
        if len(self._received) > 1:
            for index, rank in enumerate(self._received):
                named[f"fetched_bytes_rank_{index}"] = float(rank.num_bytes)
                named[f"num_trajectories_rank_{index}"] = float(rank.num_trajectories)
            named["fetched_share_max"] = max(rank.num_bytes for rank in self._received) / max(1, total)
        return named

    def finish(
        self,
        batch: StepBatch,
        *,
        skipped: bool,
        mismatch_kl: Mapping[str, float],
        figures: Mapping[str, float] | None = None,
    ) -> bool:
        """The first rank writes the ledger and acks, with what all ranks measured and its `figures` of the step;
        returns whether the step counts as skipped. `mismatch_kl` is of this rank's rows, by trajectory. A collective.
        """
        mine = [mismatch_kl.get(item.trajectory_id, NOT_MEASURED) for item in batch.bound.items]
        of_all = self._ranks.max(torch.tensor(mine, dtype=torch.float32)).tolist()
        if self._is_first:
            return self._source.finish(batch, skipped=skipped, mismatch_kl=of_all, figures=figures)
        return batch.skipped_before if batch.finished_before else skipped

    def mark_durable(self, step: int) -> None:
        """The first rank tells the server."""
        if self._is_first:
            self._source.mark_durable(step)

    def kept_alive(self, batch: StepBatch, *, lease_s: float) -> AbstractContextManager[None]:
        """The first rank renews the batch's lease while the block runs."""
        return self._source.kept_alive(batch, lease_s=lease_s) if self._is_first else nullcontext()

    def _share(self, batch: StepBatch) -> Sequence[batch_pb2.BatchItem] | None:
        if self._ranks.size == 1:
            return None
        tokens = [item.num_tokens for item in batch.bound.items]
        mine = balanced_shares(tokens, num_ranks=self._ranks.size)[self._ranks.index]
        return [batch.bound.items[position] for position in mine]

    def _send(self, decision: _Decision) -> None:
        self._ranks.broadcast(decision.encode())

    def _follow(self, *, waiting: Callable[[str], None]) -> StepBatch | Orders:
        while True:
            decision = _Decision.decode(self._ranks.broadcast(b""))
            if decision.kind is _Kind.STEP:
                return StepBatch.of(batch_service_pb2.AcquireBatchResponse.FromString(decision.batch))
            if decision.kind is _Kind.ORDERS:
                return decision.orders
            waiting(decision.reason)


def balanced_shares(num_tokens: Sequence[int], *, num_ranks: int) -> list[list[int]]:
    """Which rank trains on which trajectories: positions of `num_tokens` for each rank, ascending.

    The longest come first, each goes to the rank with fewest tokens so far: no rank has more than another by more than
    the longest trajectory. Each rank finds the answer by itself, and a replay finds it again. Groups may be split:
    advantages are computed over the whole batch.
    """
    if num_ranks < 1:
        raise ValueError(f"num_ranks {num_ranks} must be at least 1")
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for position in sorted(range(len(num_tokens)), key=lambda position: (-num_tokens[position], position)):
        rank = min(range(num_ranks), key=lambda rank: (loads[rank], rank))
        shares[rank].append(position)
        loads[rank] += num_tokens[position]
    return [sorted(share) for share in shares]
