"""States of plug-ins in Redis: encoded entries and a revision per plug-in of a run.

Saving is a compare-and-set on the revisions, over several plug-ins at once. Called by `data_plugins`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from astraflow_dataflow.store.homes.redis import Redis
from astraflow_dataflow.store.keys import Keys
from astraflow_dataflow.store.replies import as_int, as_list, as_mapping
from astraflow_dataflow.store.writing import Argument


@dataclass(frozen=True, kw_only=True)
class StateChange:
    """Encoded entries to set in a plug-in's state, an empty one to delete, made from `revision`."""

    name: str
    revision: int
    entries: Mapping[str, bytes]


class PluginStateStore:
    """Loads and saves states."""

    def __init__(self, connection: Redis) -> None:
        self._connection = connection

    async def revisions(self, run_id: str, names: Sequence[str]) -> list[int]:
        """Return the revision of each plug-in's state; 0 when it has none."""
        key = Keys(run_id).of("plugin_revisions")
        return [as_int(item) for item in as_list(await self._connection.raw("HMGET", key, *names))]

    async def entries(self, run_id: str, name: str) -> dict[str, bytes]:
        """Return a plug-in's state, encoded."""
        return as_mapping(await self._connection.raw("HGETALL", Keys(run_id).of("plugin_state", name)))

    async def save(self, run_id: str, changes: Sequence[StateChange]) -> bool:
        """Save all changes and count each revision up, or return False when another server changed one of them."""
        arguments: list[Argument] = []
        for change in changes:
            arguments += [change.name, change.revision, len(change.entries)]
            arguments += [part for entry in change.entries.items() for part in entry]
        return as_int(await self._connection.call(Keys(run_id), "save_states", *arguments)) == 1
