"""The selector by arrival, whatever the staleness deadlines. Pure."""

from collections.abc import Sequence

from astraflow.plugins import ReadyGroup, StepRequest
from astraflow_dataflow.plugins.selectors.orders import order_key


class Fifo:
    """First in, first out. Drops more groups as stale than the default does: those that took longest."""

    def select(self, candidates: Sequence[ReadyGroup], request: StepRequest) -> Sequence[str]:
        """Return those that became ready first."""
        arrived = sorted(candidates, key=order_key("arrival"))
        return [group.group_id for group in arrived[: request.num_groups]]
