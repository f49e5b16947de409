"""Routes: where a complete group goes by the recipe's conditions, before any filter sees it.

Pure: the time is passed in. The first route that is of a group decides; a group that none is of is trained on. What
becomes of the others is a verdict with the route's name, under which `settle` counts them. Called by `groups`.
"""

from collections.abc import Sequence
from datetime import datetime
from statistics import fmean

from astraflow.plugins import Group
from astraflow.recipe.groups import RouteConditions, RouteSettings

_PREFIXES = {"evaluation": "evaluated_", "archive": "routed_", "drop": "routed_"}
"""What the verdict begins with for each goal but training."""


def route_verdict(group: Group, routes: Sequence[RouteSettings], *, now: datetime) -> str:
    """Return the verdict on a group that goes elsewhere; empty for one that goes to training."""
    for route in routes:
        if _is_of(route.when, group, now=now):
            return verdict_of(route)
    return ""


def verdict_of(route: RouteSettings) -> str:
    """Return the verdict on groups that a route takes; empty where it leads to training."""
    return "" if route.to == "train" else _PREFIXES[route.to] + route.name


def was_routed(verdict: str) -> bool:
    """Whether a route made this verdict."""
    return verdict.startswith(tuple(_PREFIXES.values()))


def _is_of(when: RouteConditions, group: Group, *, now: datetime) -> bool:
    return (
        (not when.policies or group.policy in when.policies)
        and (not when.sources or group.task.source in when.sources)
        and (not when.task_types or group.task.data.get("type") in when.task_types)
        and _within(fmean(group.rewards), when.min_reward, when.max_reward)
        and _within(group.oldest_version, when.min_version, when.max_version)
        and (when.after is None or now >= when.after)
        and (when.before is None or now < when.before)
    )


def _within(value: float, lowest: float | None, highest: float | None) -> bool:
    return (lowest is None or value >= lowest) and (highest is None or value <= highest)
