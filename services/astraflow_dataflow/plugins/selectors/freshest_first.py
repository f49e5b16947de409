"""The selector by version: the least stale groups that are offered. Pure."""

from collections.abc import Sequence

from astraflow.plugins import ReadyGroup, StepRequest
from astraflow_dataflow.plugins.selectors.orders import order_key


class FreshestFirst:
    """Newest version first, ties by arrival. What is older waits, and is dropped when it becomes stale."""

    def select(self, candidates: Sequence[ReadyGroup], request: StepRequest) -> Sequence[str]:
        """Return the least stale."""
        fresh = sorted(candidates, key=order_key("freshest"))
        return [group.group_id for group in fresh[: request.num_groups]]
