"""The filter on groups that say the same again and again. Pure."""

from typing import Annotated

from pydantic import Field

from astraflow.plugins import Group


class Duplicates:
    """Drops a group when more than a share of its responses repeat another: (n - distinct) / n."""

    def __init__(self, *, max_share: Annotated[float, Field(ge=0, le=1)] = 0.5) -> None:
        self._max_share = max_share

    def __call__(self, group: Group) -> bool:
        """Return whether enough responses differ, by their trainable tokens."""
        responses = [item.response_digest for item in group.trajectories]
        return len(responses) - len(set(responses)) <= self._max_share * len(responses)
