"""The filter on how many of a group's answers a limit of tokens cut off: DAPO's overlong filtering, by group. Pure."""

from typing import Annotated

from pydantic import Field

from astraflow.plugins import Group


class Overlong:
    """Drops a group when more than a share of its trajectories ended at a limit of tokens (arXiv 2503.14476, 3.4)."""

    def __init__(self, *, max_share: Annotated[float, Field(ge=0, le=1)] = 0.5) -> None:
        self._max_share = max_share

    def __call__(self, group: Group) -> bool:
        """Return whether few enough were cut off."""
        cut_off = sum(item.finish_reason == "length" for item in group.trajectories)
        return cut_off <= self._max_share * len(group.trajectories)
