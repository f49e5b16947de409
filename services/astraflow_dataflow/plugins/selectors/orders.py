"""Orders of ready groups, by name, for selectors that choose within sources or lengths by one of them. Pure."""

from collections.abc import Callable
from typing import Literal, TypeAlias

from astraflow.plugins import ReadyGroup

Order: TypeAlias = Literal["deadline", "arrival", "freshest"]


def order_key(order: Order) -> Callable[[ReadyGroup], tuple[int, int]]:
    """Return what to sort by: the nearest staleness deadline, the arrival, or the newest version first."""
    match order:
        case "deadline":
            return lambda group: (group.oldest_version, group.arrival)
        case "arrival":
            return lambda group: (group.arrival, 0)
        case "freshest":
            return lambda group: (-group.oldest_version, group.arrival)
