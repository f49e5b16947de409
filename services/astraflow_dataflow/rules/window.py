"""Admission: how many groups of each policy may be between lease and published version, and who needs room.

outstanding · max(acceptance, floor) + ready + unpublished ≤ (max_staleness + 1) · groups_per_step. The window is the
right side; it is written to Redis once, with the run. How much of it is free is computed where it is enforced, in
`free_credit` of `store/lua/tasks.lua`, which `lease` calls. A task has a group for each trained role, and `admit` tells
whether it is leased while any of their policies has room, or only while all have. Made by the run registry.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Window:
    """The bounds of one policy, from the recipe."""

    policy_id: str
    frozen: bool = False
    """Not trained: it has no window, and nothing is charged to it."""
    external: bool = False
    """An endpoint elsewhere: it has no versions."""
    max_staleness: int
    groups_per_step: int
    """Those that are new: a step may replay others besides."""
    replay: str = ""
    """What it replays, as Redis keeps it: groups of a step, groups kept, largest staleness, uses of a group, order."""
    barrier: Literal["none", "batch", "phase"] = "none"
    """What besides the window holds tasks back; enforced where the window is."""
    steps: int = 1
    """All that its trainer will take; with 0 the window is closed."""
    min_acceptance: float
    """Floor of the acceptance average, so that a policy whose groups are all dropped still has a bounded window."""

    @property
    def groups(self) -> int:
        """The right side of the equation."""
        return 0 if self.frozen or not self.steps else (self.max_staleness + 1) * self.groups_per_step

    @property
    def smoothing(self) -> float:
        """Weight of the newest group in the acceptance average: about two steps of memory."""
        return 1.0 / max(8, 2 * self.groups_per_step)


@dataclass(frozen=True, kw_only=True)
class Admission:
    """Which tasks of a run may be leased."""

    windows: Sequence[Window]
    roles: Mapping[str, str]
    """The policy of each trained role."""
    admit: Literal["any", "all"]
    alternate_every_steps: int = 0
    """Steps of a turn, where one trained policy has credit at a time; 0: all have."""
    max_attempts: int
    """Leases of one task."""
    max_poison: int = 0
    """Poison of one node before it is drained; 0: never."""
    max_leases: int = 0
    """Of the run at a time; 0: any number."""
    hedges: bool = False
    """Whether tasks that take long are leased a second time."""
