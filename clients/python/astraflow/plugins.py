"""The Protocols that a recipe's plug-ins satisfy, and the plain values they exchange.

A plug-in is named `module.path:Name` in the recipe; `recipe:Name` means the recipe folder's own `recipe.py`.
Every plug-in is checked against its Protocol when a daemon starts. This module imports the standard library
only, so a recipe's rewards and workflows can be tested without any service installed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from astraflow.plugin_state import PluginState

__all__ = [
    "Curator",
    "Dataset",
    "Demonstration",
    "Demonstrations",
    "Episode",
    "Filter",
    "GenerateResult",
    "Group",
    "Message",
    "MissingCapability",
    "PluginState",
    "Policy",
    "ReadyGroup",
    "Reward",
    "Selector",
    "StepRequest",
    "TaskSpec",
    "Trajectory",
    "TrajectorySummary",
    "VersionSpan",
    "Workflow",
]


@dataclass(frozen=True)
class Message:
    """One chat message: `role` is `system`, `user`, `assistant` or `tool`."""

    role: str
    content: str


@dataclass(frozen=True)
class TaskSpec:
    """One prompt, or environment start, as a dataset yields it.

    `task_id` must be a pure function of the dataset's index, so that submitting twice is harmless. `data` is
    any JSON-serialisable mapping that the workflow and the reward understand (the gold answer, for example);
    at most 64 KiB. `source` names the part of the data set it is from, for curators and selectors that mix.
    """

    task_id: str
    messages: tuple[Message, ...]
    data: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""


@runtime_checkable
class Dataset(Protocol):
    """Random access to training and held-out tasks; called by the dataflow server. Deterministic in (seed,
    index).

    A class is made with `seed` and its settings. With `__len__`, training tasks end there and `train` is asked
    for smaller indexes only.
    """

    def train(self, index: int) -> TaskSpec | None:
        """Return training task `index` (0, 1, 2, …), or None when the data set is exhausted."""

    def heldout(self, index: int) -> TaskSpec | None:
        """Return held-out task `index`, or None past the end. Never shares a problem with `train`."""


@dataclass(frozen=True)
class Demonstration:
    """One supervised example of the warm start; the loss covers `completion` only."""

    messages: tuple[Message, ...]
    completion: str


@runtime_checkable
class Demonstrations(Protocol):
    """An endless, seeded stream of supervised examples; called by the trainer's warm start."""

    def __call__(self, seed: int) -> Iterator[Demonstration]:
        """Return the stream for `seed`; equal seeds give equal streams."""


class MissingCapability(Exception):
    """Raised by a workflow or reward for a task that this machine cannot run: no sandbox, no browser.

    The node gives the task back, it is leased to another node, and it loses no attempt. A plug-in that can run
    no task at all here raises when it is made instead: then the node ends with status 2.
    """


@runtime_checkable
class Reward(Protocol):
    """Scores the text of one completion; called by a workflow on the node. Must be fast, pure and finite."""

    def __call__(self, task: TaskSpec, completion: str) -> float:
        """Return the reward. NaN and infinities are refused and fail the episode."""


@dataclass(frozen=True)
class VersionSpan:
    """Tokens [start, end) of a sequence were sampled under weight `version`; `retracted` tells whether the KV
    cache was recomputed."""

    start: int
    end: int
    version: int


@dataclass(frozen=True)
class GenerateResult:
    """What a policy sampled for one call: token ids, log-probs of exactly those ids, and the versions that
    made them."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    version_spans: tuple[VersionSpan, ...]
    text: str
    finish_reason: str


@dataclass(frozen=True)
class Trajectory:
    """One policy's token sequence from one episode, exactly as sampled (never re-tokenised).

    `token_ids`, `loss_mask` and `logprobs` have equal length T; `logprobs[t]` is 0.0 where `loss_mask[t]` is
    False. `version_spans` cover every trainable position.
    """

    policy: str
    token_ids: Sequence[int]
    loss_mask: Sequence[bool]
    logprobs: Sequence[float]
    version_spans: Sequence[VersionSpan]
    reward: float
    role: str = ""
    finish_reason: str = "stop"
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Episode:
    """The outcome of one run of a workflow: 0..k trajectories per (policy, role), and named metrics."""

    trajectories: tuple[Trajectory, ...]
    metrics: Mapping[str, float] = field(default_factory=dict)


class Policy(Protocol):
    """A workflow's handle on one policy of the run, bound to the episode and its sampling parameters."""

    name: str

    def encode(self, messages: Sequence[Message]) -> list[int]:
        """Return the prompt's token ids, chat template applied, generation prompt added."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of sampled ids, special tokens removed."""

    async def generate(
        self, prompt_ids: Sequence[int], *, max_new_tokens: int | None = None
    ) -> GenerateResult:
        """Sample one continuation; may span a weight update. Raises when the episode is cancelled or out of
        time."""


@runtime_checkable
class Workflow(Protocol):
    """Runs one episode of a task against the run's policies; called by a RaaS node, many at a time in one
    event loop."""

    async def run(self, task: TaskSpec, policies: Mapping[str, Policy]) -> Episode:
        """Return the finished episode. Exceptions fail the lease with reason `workflow_error`."""


@dataclass(frozen=True, kw_only=True)
class TrajectorySummary:
    """What the server knows of one trajectory without reading its tokens; versions are weight versions."""

    reward: float
    trajectory_id: str = ""
    num_tokens: int = 0
    num_trainable_tokens: int = 0
    min_version: int = 0
    max_version: int = 0
    finish_reason: str = "stop"
    metrics: Mapping[str, float] = field(default_factory=dict)


class _OfTrajectories:
    trajectories: tuple[TrajectorySummary, ...]

    @property
    def rewards(self) -> list[float]:
        """The rewards, in the order of `trajectories`."""
        return [trajectory.reward for trajectory in self.trajectories]

    @property
    def oldest_version(self) -> int:
        """Oldest weight version that sampled a trainable token."""
        return min(trajectory.min_version for trajectory in self.trajectories)

    @property
    def newest_version(self) -> int:
        """Newest weight version that sampled a trainable token."""
        return max(trajectory.max_version for trajectory in self.trajectories)


@dataclass(frozen=True, kw_only=True)
class Group(_OfTrajectories):
    """All trajectories of one task for one (policy, role), whole: at least one.

    `verdict` is empty while filters judge it, then `ready`, `filtered` or another reason why it was dropped
    (docs/dataflow.md lists them).
    """

    task: TaskSpec
    trajectories: tuple[TrajectorySummary, ...]
    policy: str = ""
    role: str = ""
    group_id: str = ""
    verdict: str = ""


@runtime_checkable
class Filter(Protocol):
    """Decides whether a complete group may be trained on; called by the dataflow server for each, so it must be
    fast."""

    def __call__(self, group: Group) -> bool:
        """Return True to keep the group. One that raises, or returns something else, drops it as
        `filter_failed`."""


@runtime_checkable
class Curator(Protocol):
    """Decides before rollout which tasks are worth it; called by the dataflow server, in a thread.

    Deterministic given its state, for a call may be repeated when two servers share a run.
    """

    def propose(self, tasks: Sequence[TaskSpec]) -> Sequence[TaskSpec]:
        """Return those of the drawn tasks to roll out, in order; the others are skipped for good."""

    def observe(self, group: Group) -> None:
        """Learn from a complete group, whatever its verdict."""


@dataclass(frozen=True, kw_only=True)
class ReadyGroup(_OfTrajectories):
    """One group that a batch may take. `arrival` counts the groups of the run in the order they became ready;
    `metrics` of its trajectories are not kept."""

    group_id: str
    trajectories: tuple[TrajectorySummary, ...]
    arrival: int
    task_id: str = ""
    role: str = ""
    source: str = ""


@dataclass(frozen=True, kw_only=True)
class StepRequest:
    """What a step needs: `num_groups` groups, of staleness at most `max_staleness` against `base_version`."""

    policy: str
    step: int
    base_version: int
    num_groups: int
    max_staleness: int
    num_outstanding: int
    """Groups that nodes still work on; 0 means that no others will come before this step is trained."""


@runtime_checkable
class Selector(Protocol):
    """Chooses the groups of a batch; called by the dataflow server, in a thread, once per step.

    Without one, groups whose staleness deadline is nearest go first.
    """

    def select(self, candidates: Sequence[ReadyGroup], request: StepRequest) -> Sequence[str]:
        """Return the ids of `request.num_groups` candidates in the order of the batch, or none to wait for
        others.

        `candidates` are at least that many and come oldest first. It is asked again when more are ready.
        """
