"""The filter on how far engines and trainers disagree about the probability of what was sampled.

What a trainer will find of a group is known when it is trained on. What it found of others is known before: trainers
report the KL divergence of each trajectory with the step, and a group is judged by those of the same node, source or
version. Its state is a moving average for each of them.
"""

from collections import defaultdict
from collections.abc import Sequence
from hashlib import blake2b
from statistics import fmean
from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from astraflow.plugins import Group, MeasuredStep, PluginState

By: TypeAlias = Literal["node", "source", "version"]

_MOST_AVERAGES = 4096
_ABOVE = "above"
"""Groups above the bound in a row since one of them was kept. Keys of averages have no such name."""


class Agreement:
    """Drops groups that are expected to be above `highest` nats: mean of the averages that their trajectories have."""

    def __init__(
        self,
        state: PluginState,
        *,
        highest: Annotated[float, Field(gt=0)] = 0.1,
        by: Annotated[Sequence[By], Field(min_length=1)] = ("node",),
        memory: Annotated[float, Field(ge=0, lt=1)] = 0.9,
        least: Annotated[int, Field(ge=1)] = 16,
        probe_every: Annotated[int, Field(ge=2)] = 16,
    ) -> None:
        """There is an average for each policy and value of all of `by`; `memory` is the weight of the steps before.
        One of fewer than `least` trajectories says nothing. Of groups above `highest` every `probe_every`-th is kept
        all the same: what nobody trains on is not measured again, and would stay out for ever.
        """
        self._state, self._highest, self._by = state, highest, tuple(by)
        self._memory, self._least, self._probe_every = memory, least, probe_every

    def __call__(self, group: Group) -> bool:
        """Return whether engine and trainer are expected to agree on the group."""
        known = [
            self._state.get(
                self._key(group.policy, node=item.node_id, source=group.task.source, version=item.max_version)
            )
            for item in group.trajectories
        ]
        expected = [average for number, average, _ in filter(None, known) if number >= self._least]
        if not expected or fmean(expected) <= self._highest:
            return True
        above = self._state.get(_ABOVE, 0) + 1
        self._state[_ABOVE] = above % self._probe_every
        return bool(above == self._probe_every)

    def measured(self, step: MeasuredStep) -> None:
        """Move the averages; a step counts once."""
        last = f"step {step.policy}"
        if step.step <= self._state.get(last, 0):
            return
        found: dict[str, list[float]] = defaultdict(list)
        for item in step.trajectories:
            key = self._key(step.policy, node=item.node_id, source=item.source, version=item.version)
            found[key].append(item.mismatch_kl)
        for key, values in found.items():
            number, average, _ = self._state.get(key, (0, fmean(values), 0))
            moved = round(self._memory * average + (1 - self._memory) * fmean(values), 6)
            self._state[key] = [number + len(values), moved, step.step]
        self._state[last] = step.step
        self._forget()

    def _forget(self) -> None:
        """Half of the averages, those that were not measured for longest, when there are too many: versions go on."""
        if len(self._state) > _MOST_AVERAGES:
            moments = {key: kept[2] for key, kept in self._state.items() if isinstance(kept, list)}
            for key in sorted(moments, key=moments.__getitem__)[: len(moments) // 2]:
                del self._state[key]

    def _key(self, policy: str, *, node: str, source: str, version: int) -> str:
        named = {"node": node, "source": source, "version": version}
        return blake2b(
            repr((policy, *(named[what] for what in self._by))).encode(), digest_size=9
        ).hexdigest()
