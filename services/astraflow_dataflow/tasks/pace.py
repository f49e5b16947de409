"""Pace: how many tasks a slow node may hold when little is left, and when another node gets a copy of one.

Pure; called by leasing.
"""

import heapq
import math
from collections.abc import Iterable, Sequence

from astraflow_dataflow.records import Pace

_ALIKE, _ALIKE_S = 1.5, 5.0
"""Nodes whose tasks take at most so many times as long as the fastest one's, or so many seconds longer, are not
bounded: packed onto the fastest of its like, work would only slow that one down.
"""


def most_held(paces: Iterable[Pace], *, work: int) -> dict[str, int]:
    """Return how many tasks some nodes may hold, so that `work` tasks, those under way included, end soonest.

    A node that is not in it may hold what it can: there is work enough, or nobody is much faster.
    """
    known = {pace.node_id: pace for pace in paces if pace.slots > 0}
    given = dict.fromkeys(known, 0)
    # Waves of tasks by the time at which they end; of those that end together a node's first comes first.
    waves = [(pace.task_s, 1, pace.node_id) for pace in known.values()]
    heapq.heapify(waves)
    alike_s = max(_ALIKE * waves[0][0], waves[0][0] + _ALIKE_S) if waves else 0.0
    slow = {name for name, pace in known.items() if pace.task_s > alike_s}
    while work > 0 and any(given[name] < known[name].slots for name in slow):
        _, wave, name = heapq.heappop(waves)
        taken = min(work, known[name].slots)
        work, given[name] = work - taken, given[name] + taken
        heapq.heappush(waves, (known[name].task_s * (wave + 1), wave + 1, name))
    return {name: number for name, number in given.items() if name in slow and number < known[name].slots}


_LEAST_KNOWN = 20
"""Tasks that must have been finished before one counts as a straggler."""


def straggles_after_s(durations_s: Sequence[float], *, quantile: float) -> float:
    """Return the age of a lease from which its task counts as a straggler: that `quantile` of what others took.

    0 while too few were finished to tell.
    """
    if len(durations_s) < _LEAST_KNOWN:
        return 0.0
    return sorted(durations_s)[math.ceil(quantile * len(durations_s)) - 1]
