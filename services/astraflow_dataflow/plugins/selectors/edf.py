"""The selector by staleness deadline, earliest first: what a run without a selector does, by name. Pure."""

from collections.abc import Sequence

from astraflow.plugins import ReadyGroup, StepRequest
from astraflow_dataflow.plugins.selectors.orders import order_key


class Edf:
    """Oldest version first, ties by arrival. Without a selector Redis itself chooses so, which is faster; this one is
    for a switch to it, and as a shadow beside others.
    """

    def select(self, candidates: Sequence[ReadyGroup], request: StepRequest) -> Sequence[str]:
        """Return those whose deadline is nearest."""
        due = sorted(candidates, key=order_key("deadline"))
        return [group.group_id for group in due[: request.num_groups]]
