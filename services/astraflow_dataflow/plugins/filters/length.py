"""The filter on how long the sampled part of a group's trajectories is. Pure."""

from typing import Annotated

from pydantic import Field

from astraflow.plugins import Group


class Length:
    """Drops a group when too many of its trajectories have too few or too many trainable tokens."""

    def __init__(
        self,
        *,
        min_tokens: Annotated[int, Field(ge=0)] = 1,
        max_tokens: Annotated[int, Field(ge=1)] = 1_048_576,
        max_outside: Annotated[float, Field(ge=0, le=1)] = 0.0,
    ) -> None:
        """`max_outside` is the share of trajectories outside the bounds that a group may have."""
        if min_tokens > max_tokens:
            raise ValueError(f"min_tokens {min_tokens} is above max_tokens {max_tokens}; lower it")
        self._bounds, self._max_outside = (min_tokens, max_tokens), max_outside

    def __call__(self, group: Group) -> bool:
        """Return whether few enough are outside the bounds."""
        low, high = self._bounds
        outside = sum(not low <= item.num_trainable_tokens <= high for item in group.trajectories)
        return outside <= self._max_outside * len(group.trajectories)
