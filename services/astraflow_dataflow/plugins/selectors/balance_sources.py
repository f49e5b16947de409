"""The selector that takes from each source of the data set in turn. Pure."""

from collections.abc import Sequence
from itertools import chain, zip_longest

from astraflow.plugins import ReadyGroup, StepRequest
from astraflow_dataflow.plugins.selectors.orders import Order, order_key


class BalanceSources:
    """One group of each source in turn, `within` a source by deadline, arrival or freshness."""

    def __init__(self, *, within: Order = "deadline") -> None:
        self._key = order_key(within)

    def select(self, candidates: Sequence[ReadyGroup], request: StepRequest) -> Sequence[str]:
        """Return equally many of each source, as far as there are so many."""
        by_source: dict[str, list[str]] = {}
        for group in sorted(candidates, key=self._key):
            by_source.setdefault(group.source, []).append(group.group_id)
        in_turn = chain.from_iterable(zip_longest(*by_source.values()))
        return [group_id for group_id in in_turn if group_id is not None][: request.num_groups]
