"""How many groups may be leased: the one equation that bounds staleness before any token is sampled.

Per policy: outstanding · max(acceptance, floor) + ready + unpublished ≤ (max_staleness + 1) ·
groups_per_step. Pure; the same equation is enforced atomically by the `lease` function, and a test holds both
to the same numbers. Read by reporting and by tests.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

# Absorbs the rounding of the average: 0.1 + 0.2 must not cost a group.
_SLACK = 1e-9


@dataclass(frozen=True, kw_only=True)
class Window:
    """The bounds of one policy, from the recipe."""

    max_staleness: int
    groups_per_step: int
    min_acceptance: float

    @property
    def groups(self) -> int:
        """The right side of the equation."""
        return (self.max_staleness + 1) * self.groups_per_step

    @property
    def smoothing(self) -> float:
        """Weight of the newest group in the acceptance average: about two steps of memory."""
        return 1.0 / max(8, 2 * self.groups_per_step)


def free_groups(
    window: Window, *, outstanding: int, ready: int, unpublished: int, acceptance: float, lag: int = 0
) -> int:
    """Return how many more groups may be leased now; 0 when the window is full.

    `lag` is how many versions the asking node serves behind the newest one: what it samples is that much
    older already, so the window is that many steps shorter for it.
    """
    survives = max(acceptance, window.min_acceptance)
    room = window.groups - lag * window.groups_per_step - ready - unpublished
    return max(0, math.floor(room / survives - outstanding + _SLACK))


def is_admissible(
    window: Window, *, outstanding: int, ready: int, unpublished: int, acceptance: float
) -> bool:
    """Return whether a state satisfies the equation."""
    survives = max(acceptance, window.min_acceptance)
    return outstanding * survives + ready + unpublished <= window.groups + _SLACK


def next_acceptance(average: float, *, survived: bool, smoothing: float) -> float:
    """Return the moving average after one more judged group; stays in [0, 1]."""
    return average + smoothing * (float(survived) - average)
