"""What becomes of complete groups, as a recipe says it: where they go (`dataflow.routes`), and what a batch needs of
them (`dataflow.batch_needs`).

Invariant: a recipe whose routes contradict each other, or leave a policy nothing to train on, is refused. Used by
`settings`; the dataflow server obeys it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Annotated, Literal

from pydantic import AwareDatetime, Field, StringConstraints, field_serializer, model_validator

from astraflow.recipe.roles import PolicyName, require_policy
from astraflow.recipe.section import Section

__all__ = ["BatchNeedsSettings", "RouteConditions", "RouteSettings", "require_routes"]

_RANGES = (("min_reward", "max_reward"), ("min_version", "max_version"), ("after", "before"))
_Text = Annotated[str, StringConstraints(min_length=1, max_length=256)]
_Version = Annotated[int, Field(ge=0, le=2_097_151)]
_Reward = Annotated[float, Field(ge=-1e9, le=1e9)]


class RouteConditions(Section):
    """Of which groups a route is; all that are given must hold, and none given means every group."""

    policies: tuple[PolicyName, ...] = Field(default=(), max_length=64)
    """Groups of these policies."""
    sources: tuple[_Text, ...] = Field(default=(), max_length=256)
    """Groups of tasks whose data set names one of these sources."""
    task_types: tuple[_Text, ...] = Field(default=(), max_length=256)
    """Groups of tasks whose `data` has one of these as `type`."""
    min_reward: _Reward | None = None
    """Smallest mean reward of the group."""
    max_reward: _Reward | None = None
    """Largest mean reward of the group."""
    min_version: _Version | None = None
    """Smallest version of its oldest trainable token."""
    max_version: _Version | None = None
    """Largest version of its oldest trainable token."""
    after: AwareDatetime | None = None
    """Groups completed from this time on, with its offset: `2026-11-30T12:00:00Z`."""
    before: AwareDatetime | None = None
    """Groups completed before this time."""

    @field_serializer("after", "before")
    def _as_text(self, value: datetime | None) -> str | None:
        return value.isoformat() if value else None

    @model_validator(mode="after")
    def _ranges_hold_something(self) -> RouteConditions:
        for lowest, highest in _RANGES:
            low, high = getattr(self, lowest), getattr(self, highest)
            if low is not None and high is not None and (low > high or (low == high and lowest == "after")):
                raise ValueError(
                    f"no group has {lowest} {low} and {highest} {high}; exchange them, or leave one out"
                )
        return self

    def covers(self, other: RouteConditions) -> bool:
        """Whether every group of which `other` holds is one of these."""
        for name in ("policies", "sources", "task_types"):
            own, theirs = getattr(self, name), getattr(other, name)
            if own and not (theirs and set(theirs) <= set(own)):
                return False
        for lowest, highest in _RANGES:
            low, high = getattr(self, lowest), getattr(self, highest)
            if low is not None and (getattr(other, lowest) is None or getattr(other, lowest) < low):
                return False
            if high is not None and (getattr(other, highest) is None or getattr(other, highest) > high):
                return False
        return True


class RouteSettings(Section):
    """Where some of the complete groups go."""

    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,31}$")]
    """Its name in counts and reasons: `routed_NAME`, or `evaluated_NAME` to evaluation."""
    when: RouteConditions = RouteConditions()
    """The groups that it is of."""
    to: Literal["train", "evaluation", "archive", "drop"]
    """To their policy's trainer through the filters, to its score only, to the archive only, or nowhere."""


class BatchNeedsSettings(Section):
    """What the new groups of a batch must have, or it is not bound yet."""

    min_tasks: int = Field(default=1, ge=1, le=65_536)
    """Different tasks."""
    min_sources: int = Field(default=1, ge=1, le=65_536)
    """Different sources of tasks."""
    min_signal: int = Field(default=0, ge=0, le=65_536)
    """Groups whose rewards are not all equal."""
    max_wait_s: float = Field(default=300.0, ge=0, le=86_400)
    """Time after which a batch is bound as it is; also when no other group is to come."""

    def require_possible(self, policy_id: str, *, num_groups: int) -> None:
        """Raise ValueError when no batch of so many new groups has all this."""
        for name in ("min_tasks", "min_sources", "min_signal"):
            if (least := getattr(self, name)) > num_groups:
                raise ValueError(
                    f"dataflow.batch_needs.{name} {least} is more than the {num_groups} new groups of a batch of "
                    f"policy {policy_id!r}; lower it, or raise groups_per_step"
                )


def require_routes(routes: Sequence[RouteSettings], *, trained: Collection[str], has_archive: bool) -> None:
    """Raise ValueError for routes that cannot be meant, with the reason; `trained` are the policies that are."""
    for number, route in enumerate(routes):
        place = f"dataflow.routes[{number}] ({route.name})"
        for policy_id in route.when.policies:
            require_policy(policy_id, trained, place=f"{place}.when.policies", kind="trained policy")
        if route.to == "archive" and not has_archive:
            raise ValueError(
                f"{place}: the run keeps no archive; add `dataflow.archive: {{}}`, or use `to: drop`"
            )
        for earlier in routes[:number]:
            if earlier.name == route.name:
                raise ValueError(f"{place}: another route has this name; their counts would be one")
            if earlier.when.covers(route.when):
                raise ValueError(
                    f"{place} is never reached: {earlier.name!r} before it takes every group that it is of; put it "
                    f"before {earlier.name!r}, or take it out"
                )
    for policy_id in trained:
        _require_rest(policy_id, routes)


def _require_rest(policy_id: str, routes: Sequence[RouteSettings]) -> None:
    everything = RouteConditions(policies=(policy_id,))
    own = [route for route in routes if policy_id in (route.when.policies or (policy_id,))]
    for route in own:
        if route.to == "train":
            return
        if route.when.covers(everything):
            raise ValueError(
                f"dataflow.routes: nothing is left to train policy {policy_id!r} on: {route.name!r} takes all its "
                "groups; give it conditions, or put a route with `to: train` before it"
            )
