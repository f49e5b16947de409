"""The curator that mixes the sources of a data set by weight, each up to its quota of tasks.

It can only leave out what is drawn, so a mix is reached by skipping sources that are ahead of their share. A source
that is not drawn for long, or has its quota, is left out of the shares. Its state is a few counts per source.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field

from astraflow.plugins import Group, PluginState, TaskSpec
from astraflow_dataflow.plugins.curators.problems import PATIENCE, Tally


class MixSources:
    """Proposes a task while its source has at most its share of what was proposed; sources without a weight never."""

    def __init__(
        self,
        state: PluginState,
        *,
        weights: Mapping[str, Annotated[float, Field(gt=0)]],
        quotas: Mapping[str, Annotated[int, Field(ge=0)]] | None = None,
        absent_after: Annotated[int, Field(ge=1)] = PATIENCE,
    ) -> None:
        """`quotas` are the most tasks of a source in the run. A source is absent when the last `absent_after` drawn
        tasks had none of it. Raises ValueError for a quota of a source without a weight.
        """
        strangers = sorted(set(quotas or {}) - set(weights))
        if strangers or not weights:
            raise ValueError(
                f"quotas name {strangers}, weights name {sorted(weights)}; weigh at least one source, and all "
                "with a quota"
            )
        self._state, self._weights, self._quotas = state, weights, quotas or {}
        self._absent_after = absent_after

    def propose(self, tasks: Sequence[TaskSpec]) -> Sequence[TaskSpec]:
        """Return those whose sources are not ahead of their shares."""
        tally = Tally(self._state)
        counts = tally.before(tasks)
        chosen = [task for task in tasks if self._takes(task.source, counts)]
        tally.keep(tasks, counts)
        return chosen

    def observe(self, group: Group) -> None:
        """Learns nothing: what counts is what was proposed."""

    def _takes(self, source: str, counts: dict[str, Any]) -> bool:
        counts["drawn"] = counts.get("drawn", 0) + 1
        counts.setdefault("seen", {})[source] = counts["drawn"]
        taken = counts.setdefault("taken", {})
        present = [name for name in self._weights if self._is_present(name, counts)]
        if present != counts.get("present"):
            # Another mix begins: nobody owes anything for the time in which the others were not there.
            counts["present"], counts["mixed"] = present, {}
        if source not in present:
            return False
        mixed = counts["mixed"]
        share = self._weights[source] / sum(self._weights[name] for name in present)
        if mixed.get(source, 0) > share * (sum(mixed.values()) + 1):
            return False
        mixed[source] = mixed.get(source, 0) + 1
        taken[source] = taken.get(source, 0) + 1
        return True

    def _is_present(self, source: str, counts: dict[str, Any]) -> bool:
        has_quota: bool = counts["taken"].get(source, 0) < self._quotas.get(source, 2**53)
        drawn_since: int = counts["drawn"] - counts["seen"].get(source, 0)
        return has_quota and drawn_since <= self._absent_after
