"""How many nodes a run should have: a state machine that moves one window of measurements at a time.

Rules. *Grow* when a trainer waits more than `grow_above_wait` while the nodes are full: waiting that more nodes cannot
end, because the staleness window is full, adds none. *Shrink* when no trainer waits, batches are stale and fewer nodes
would have room for what is sampled. Between them, the dead band, nothing changes. At most twice as many nodes at once,
at least half as many.

Bounds on flapping, which `tests/unit/astraflow_dataflow/status/test_pool_target.py` proves by search:
* Whatever is measured, none is taken away within R = `shrink_after_s` of growth, so that within any time W the
  direction changes at most 2 · ⌊W / R⌋ + 3 times. Each time that growth only makes good what was taken away, R doubles,
  up to 16 times, so a load between two sizes has most of its nodes ever longer.
* While the work per second is constant and shares are off by at most `NOISE`, with the default settings, it changes at
  most once, for ever.

Pure; `status.autoscaling` measures and keeps the state.
"""

import math
from dataclasses import dataclass, replace

from astraflow.recipe.dataflow import AutoscalingSettings

NOISE = 0.025
"""Error of a measured share up to which a constant load settles."""
_FULL = 0.85
"""Share of their places from which on nodes are what is short."""
_MOST_FACTOR = 2
_MOST_DOUBLINGS = 4


@dataclass(frozen=True, kw_only=True)
class PoolWindow:
    """What was measured while the pools kept their size."""

    nodes: float
    """That were there, on average."""
    wait_share: float
    """Of its time, what the trainer that waits most waited for groups."""
    busy_share: float
    """Of their places, what nodes had taken."""
    staleness_share: float
    """Mean staleness of what was bound, over `max_staleness`; of the freshest policy."""


@dataclass(frozen=True, kw_only=True)
class PoolTarget:
    """Where the state machine stands. Times are seconds of one clock."""

    nodes: int
    reason: str = "nothing is measured yet"
    changed_s: float = 0.0
    """When `nodes` changed last."""
    grown_s: float | None = None
    """When it grew last."""
    direction: int = 0
    """Of the last change: 1 up, -1 down, 0 before there was one."""
    grown: int = 0
    shrunk: int = 0
    turns: int = 0
    """Changes of direction so far."""
    peak: int = 0
    """Nodes before they were taken away last."""
    regrets: int = 0
    """How often in a row growth made good what was taken away."""


def decide(
    target: PoolTarget, window: PoolWindow, *, settings: AutoscalingSettings, now_s: float
) -> PoolTarget:
    """Return the target after one more window, with its reason."""
    nodes, reason = _wanted(target, window, settings=settings)
    nodes = max(settings.min_nodes, min(nodes, settings.max_nodes))
    rest_s = settings.shrink_after_s * 2 ** min(target.regrets, _MOST_DOUBLINGS)
    if nodes < target.nodes and target.grown_s is not None and now_s - target.grown_s < rest_s:
        return replace(target, reason=f"{reason}, but nodes were added less than {rest_s:.0f} s ago")
    if nodes == target.nodes:
        return replace(target, reason=reason)
    direction = 1 if nodes > target.nodes else -1
    regrets, peak = target.regrets, target.peak
    if direction > 0 and target.direction < 0:
        regrets = regrets + 1 if nodes <= peak else 0
    if direction < 0 and target.direction >= 0:
        peak = target.nodes
    return replace(
        target,
        nodes=nodes,
        reason=reason,
        changed_s=now_s,
        grown_s=now_s if direction > 0 else target.grown_s,
        direction=direction,
        grown=target.grown + (direction > 0),
        shrunk=target.shrunk + (direction < 0),
        turns=target.turns + (direction == -target.direction),
        peak=peak,
        regrets=regrets,
    )


def _wanted(target: PoolTarget, window: PoolWindow, *, settings: AutoscalingSettings) -> tuple[int, str]:
    """How many nodes, within the largest step, and why."""
    measured = (
        f"trainer waits {window.wait_share:.0%}, nodes are {window.busy_share:.0%} full, "
        f"staleness is {window.staleness_share:.0%} of its bound"
    )
    # Nodes that are to come or go and have not yet must not be counted on.
    there = min(window.nodes, target.nodes)
    taken = there * window.busy_share
    if window.wait_share > settings.grow_above_wait:
        if window.busy_share < _FULL:
            return target.nodes, f"{measured}: more nodes would not help, they have room"
        wanted = math.ceil(taken / max(1 - window.wait_share, 1 / _MOST_FACTOR))
        most = max(target.nodes + 1, target.nodes * _MOST_FACTOR)
        return min(max(wanted, target.nodes, 1), most), f"{measured}: nodes are short"
    if (
        window.wait_share < settings.shrink_below_wait
        and window.staleness_share >= settings.shrink_above_staleness
    ):
        wanted = max(math.ceil(taken / settings.fill), math.ceil(target.nodes / _MOST_FACTOR))
        if wanted >= target.nodes:
            return target.nodes, f"{measured}: fewer nodes would be too full"
        return wanted, f"{measured}: nodes are idle"
    return target.nodes, f"{measured}: within the dead band"
