"""What a reward is, what it returns, what it may use, and what a workflow gets instead of it.

Public names of `astraflow.plugins`, whose other plug-ins need none of this; standard library only.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from astraflow.plugins import Policy, TaskSpec


class MissingCapability(Exception):
    """Raised by a workflow or reward for a task that this machine cannot run: no sandbox, no browser.

    The node gives the task back, it is leased to another node, and it loses no attempt. A plug-in that can run
    no task at all here raises when it is made instead: then the node ends with status 2.
    """


class RewardFailed(Exception):
    """A completion could not be graded. A reward may raise it; a workflow gets it for whatever a reward does wrong.

    It fails the episode with `reason`, a slug: `reward_error`, or `reward_timeout` when the reward took too long.
    Raises ValueError for what is no slug, which no server would take.
    """

    def __init__(self, message: str, *, reason: str = "reward_error") -> None:
        if not re.fullmatch(r"[a-z0-9_]{1,64}", reason):
            raise ValueError(
                f"reason {reason[:80]!r} of {message!r} must be 1 to 64 characters of a-z, 0-9 and _"
            )
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True)
class Score:
    """What a completion earned, and named numbers about it for people."""

    reward: float
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RewardLimits:
    """Where a reward runs and what it may use there; its attribute `limits`, which the recipe may override."""

    processes: int = 0
    """Worker processes that grade side by side; 0 runs the reward in the node's event loop."""
    timeout_s: float = 60.0
    """Seconds one call may take in a worker, or awaited; an ordinary function in the event loop cannot be stopped."""
    memory_mb: int = 1024
    """MiB of data one worker may allocate; beyond it Python raises MemoryError. Linux only."""
    max_calls: int = 10_000
    """Calls after which a worker is replaced."""
    timeout_reward: float | None = None
    """What a call earns that overran `timeout_s`, with the metric `reward_timeout`; None fails the episode."""


@runtime_checkable
class Reward(Protocol):
    """Grades the text of one completion; made by the node. Pure: equal calls earn the same on every node.

    An ordinary function runs in the node's event loop and must be fast, unless its attribute `limits` or the recipe
    gives it worker processes. An `async def` is awaited. A parameter `policies` with a default gets the policies of
    the workflow, in the event loop only.
    """

    def __call__(self, task: TaskSpec, completion: str) -> float | Score | Awaitable[float | Score]:
        """Return the reward. NaN and infinities are refused and fail the episode."""


class Scorer(Protocol):
    """The recipe's reward as the node hands it to a workflow: awaited, limited, its failures named."""

    async def __call__(
        self, task: TaskSpec, completion: str, *, policies: Mapping[str, Policy] | None = None
    ) -> Score:
        """Return the score. `policies` are for rewards that ask one. Raises RewardFailed, MissingCapability."""
