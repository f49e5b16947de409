"""Training rows: the trajectories of one batch in the form that the compute core reads.

Invariant: a row that exists is trainable: its columns have one length, every trained token has a finite
log-prob and a weight version, and its first token (which nothing predicts) is never trained. Built from
contract messages by the batch source; read by packing and the training step.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from astraflow.columns import decode_columns
from astraflow.dataflow.v1 import batch_pb2
from astraflow.plugins import VersionSpan
from astraflow.training.accepting import accepted_payload
from astraflow.trajectories import check_columns, check_reward, check_trainable
from astraflow_trainer.batches.routing import ReadBlob, recorded_routing

Group: TypeAlias = tuple[str, str]
"""Task and role: rows that are compared, and left out, together."""


@dataclass(frozen=True, slots=True)
class RowOrigin:
    """What a row comes from: by this, rows are compared with one another."""

    task_id: str
    role: str = ""
    member: int = 0
    """Which episode of the task."""
    turn: int = 0
    """Position among the rows of its episode and role."""
    source: str = ""
    """Source of the task."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainingRow:
    """One trajectory of T tokens, exactly as sampled. Raises BadTrajectory when a rule is broken."""

    trajectory_id: str
    origin: RowOrigin
    token_ids: NDArray[np.int32]
    """int32[T], prompt and observations included."""
    loss_mask: NDArray[np.bool_]
    """bool[T]; True where the policy generated the token and is trained on it."""
    behavior_logprobs: NDArray[np.float32]
    """float32[T], natural log at `temperature`; 0 where nothing was generated."""
    version_spans: tuple[VersionSpan, ...]
    """Ascending [start, end) ranges; together they cover every trained token."""
    reward: float
    temperature: float
    """Temperature that the log-probs refer to; greater than 0."""
    truncated: bool = False
    """Whether a limit of tokens cut its last answer off."""
    loss_weights: NDArray[np.float32] | None = None
    """float32[T]; what the loss of each token counts. None: 1."""
    expert_routing: NDArray[np.uint16] | None = None
    """uint16[T, layers, k]: the experts that the engine sent each token to; None where nobody recorded them."""

    def __post_init__(self) -> None:
        check_columns(
            self.trajectory_id,
            token_ids=self.token_ids,
            loss_mask=self.loss_mask,
            logprobs=self.behavior_logprobs,
            version_spans=self.version_spans,
        )
        check_reward(self.trajectory_id, self.reward)
        check_trainable(
            self.trajectory_id, first_token_trained=bool(self.loss_mask[0]), temperature=self.temperature
        )

    @property
    def group(self) -> Group:
        """The group that the row is of."""
        return self.origin.task_id, self.origin.role

    @property
    def num_tokens(self) -> int:
        """T: prompt, observations and generated tokens."""
        return len(self.token_ids)

    @property
    def num_trained_tokens(self) -> int:
        """Tokens that the loss covers; at least 1."""
        return int(np.count_nonzero(self.loss_mask))

    @property
    def num_turns(self) -> int:
        """Answers of the policy that the loss covers: runs of trained tokens. At least 1."""
        return int(np.count_nonzero(self.loss_mask[1:] & ~self.loss_mask[:-1]))

    @property
    def in_place(self) -> NDArray[np.bool_]:
        """bool[T]: tokens of calls that went on over a swap of weights with the keys and values of the old ones."""
        result = np.zeros(self.num_tokens, dtype=np.bool_)
        for before, span in pairwise(self.version_spans):
            # Between two calls stand tokens that nobody sampled: a prompt, an observation.
            goes_on = before.end == span.start and self.loss_mask[before.end - 1]
            if goes_on and not span.recomputed:
                result[span.start : span.end] = before.version != span.version or result[before.end - 1]
        return result

    @property
    def min_version(self) -> int:
        """Oldest weight version among the spans: what staleness is measured from."""
        return min(span.version for span in self.version_spans)


def accepted_row(
    item: batch_pb2.BatchItem, body: bytes | None, *, base_version: int, read_blob: ReadBlob | None = None
) -> TrainingRow:
    """Return the row of an item from its payload, None where that did not arrive. Raises BadTrajectory.

    `read_blob` reads what a payload refers to; without it expert routing is left out.
    """
    trajectory = accepted_payload(item, body, base_version=base_version)
    columns, routing = decode_columns(trajectory), None
    if read_blob is not None and trajectory.HasField("expert_routing"):
        routing = recorded_routing(
            trajectory.expert_routing,
            name=item.trajectory_id,
            num_tokens=len(columns.token_ids),
            read=read_blob,
        )
    return TrainingRow(
        trajectory_id=item.trajectory_id,
        origin=RowOrigin(item.task_id, item.role, item.member, item.turn, item.source),
        token_ids=columns.token_ids,
        loss_mask=columns.loss_mask,
        behavior_logprobs=columns.logprobs,
        version_spans=tuple(
            VersionSpan(span.start, span.end, span.version, span.recomputed)
            for span in trajectory.version_spans
        ),
        reward=item.reward,
        temperature=trajectory.sampling.temperature,
        truncated=item.truncated,
        expert_routing=routing,
    )
