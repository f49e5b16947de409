"""How much of everything is measured; the defaults are those of the page of results.

Called by the command `astraflow bench dataflow`, read by every measurement of this room.
"""

from __future__ import annotations

from dataclasses import dataclass

GROUP = 8


@dataclass(frozen=True, kw_only=True)
class PlaneSizes:
    """Numbers of things; each tuple is a series."""

    tokens: tuple[int, ...]
    """Response tokens of a trajectory."""
    batch_groups: int
    """Groups of 8 in a batch."""
    batches: int
    """Batches of 2k-token trajectories that are pushed and fetched; of longer ones fewer, by their bytes."""
    rounds: int
    """Pushes and what they are compared with are measured so often, in turns, for medians; so are the streams beside a
    batch, for the best.
    """
    leases: int
    streams: tuple[int, ...]
    idle_s: float
    """How long something idle is watched."""
    backlog: tuple[int, ...]
    """Tasks that wait."""
    open_groups: tuple[int, ...]
    ready: int
    """Trajectories that wait for a batch."""
    nodes: int
    runs: tuple[int, ...]
    processes: tuple[int, ...]
    resident_mib: tuple[int, ...]
    """Payloads that a Redis holds which is killed."""
