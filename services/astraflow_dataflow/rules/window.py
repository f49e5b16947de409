"""The staleness window of a policy: how many groups may be between lease and published version.

outstanding · max(acceptance, floor) + ready + unpublished ≤ (max_staleness + 1) · groups_per_step. The window is the
right side; it is written to Redis once, with the run. How much of it is free is computed where it is enforced, in
`free_credit` of `store/lua/tasks.lua`, which `lease` calls. Made by the run registry.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Window:
    """The bounds of one policy, from the recipe."""

    policy_id: str
    max_staleness: int
    groups_per_step: int
    min_acceptance: float
    """Floor of the acceptance average, so that a policy whose groups are all dropped still has a bounded window."""

    @property
    def groups(self) -> int:
        """The right side of the equation."""
        return (self.max_staleness + 1) * self.groups_per_step

    @property
    def smoothing(self) -> float:
        """Weight of the newest group in the acceptance average: about two steps of memory."""
        return 1.0 / max(8, 2 * self.groups_per_step)
