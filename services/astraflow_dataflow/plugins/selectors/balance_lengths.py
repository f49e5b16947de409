"""The selector whose batches have long and short groups as the ready ones have. Pure."""

from collections.abc import Sequence
from statistics import fmean

from astraflow.plugins import ReadyGroup, StepRequest
from astraflow_dataflow.plugins.selectors.orders import Order, order_key


class BalanceLengths:
    """Of the ready groups sorted by length and cut into as many equal parts as a step takes groups, one of each.

    Short groups are ready first, so early batches without it are of short ones.
    """

    def __init__(self, *, within: Order = "deadline") -> None:
        """`within` a part, the first by deadline, arrival or freshness is taken."""
        self._key = order_key(within)

    def select(self, candidates: Sequence[ReadyGroup], request: StepRequest) -> Sequence[str]:
        """Return one group of each part, in that order."""
        ordered = sorted(candidates, key=lambda group: (_mean_tokens(group), group.arrival))
        borders = [part * len(ordered) // request.num_groups for part in range(request.num_groups + 1)]
        parts = [ordered[borders[part] : borders[part + 1]] for part in range(request.num_groups)]
        return [
            group.group_id for group in sorted((min(part, key=self._key) for part in parts), key=self._key)
        ]


def _mean_tokens(group: ReadyGroup) -> float:
    return fmean(trajectory.num_tokens for trajectory in group.trajectories)
