"""Deleting a run, in steps of one hash slot each: its keys and the registry of runs may lie on different primaries.

Invariant: a run is on one of the two lists of the registry, of runs and of those being deleted, from before it is there
until after it is gone, so whatever a killed server leaves is found by the next call or by a sweep (`mend`). What is
removed of a run is removed by functions that find it being deleted, so a run that was created again under the name
loses nothing. Called by the run servicer and the sweep of `server`.
"""

from astraflow_dataflow.store.homes.redis import Redis
from astraflow_dataflow.store.keys import DELETING_KEY, RUNS_KEY, Keys
from astraflow_dataflow.store.payloads.packs import Payloads
from astraflow_dataflow.store.replies import as_int, as_list, as_mapping, as_text, as_texts, flag
from astraflow_dataflow.store.runs import GONE
from astraflow_kit import failpoints
from astraflow_kit.log import get_logger

log = get_logger(__name__)


class Deletions:
    """Deletions of runs: begun once, continued by whoever finds one."""

    def __init__(self, connection: Redis, payloads: Payloads) -> None:
        self._connection = connection
        self._payloads = payloads

    async def begin(self, run_id: str, *, force: bool, lease_s: float) -> dict[str, int]:
        """End a run for everybody and return its last counters; the keys are still there.

        A trainer works on it that called within `lease_s` and did not release its policy. Raises NotFoundError, and
        without `force` PreconditionError naming who works on it.
        """
        arguments = (run_id, flag(force), int(lease_s * 1000))
        reply = await self._connection.call(Keys(run_id), "begin_delete", *arguments)
        failpoints.hit("dataflow.deleting")
        await self._list_as_deleted(run_id)
        # Also of a run that cannot be read, whose counters may be anything.
        return {name: int(value) for name, value in as_mapping(reply).items() if value.isdigit()}

    async def delete_keys(self, run_id: str) -> int:
        """Remove the keys of a run whose deletion began, until none is left; a run of that name that was created since
        stays. Returns how many were removed.
        """
        keys, removed = Keys(run_id), 0
        await self._payloads.remove_all(run_id)
        while True:
            home, found = self._connection.home(run_id), await self._remove_once(keys)
            removed += found
            # A run that moved to another primary of a cluster meanwhile was looked for on both.
            if not found and self._connection.home(run_id) is home:
                break
        removed += as_int(await self._connection.call(keys, "end_delete"))
        failpoints.hit("dataflow.keys_removed")
        await self._list_as_it_is(run_id)
        return removed

    async def deleting(self) -> list[str]:
        """Return the runs whose deletion began and has not ended."""
        return as_texts(await self._connection.raw("SMEMBERS", DELETING_KEY))

    async def mend(self, run_id: str) -> None:
        """Finish what was cut off of a run that is listed and not found: its creation, or the begin of its end."""
        if as_text(await self._connection.raw("HGET", Keys(run_id).of("run"), "state")) in GONE:
            log.info("run.mended", run_id=run_id)
            await self._list_as_deleted(run_id)
            await self.delete_keys(run_id)

    async def _list_as_deleted(self, run_id: str) -> None:
        """In this order, so that the run is on one of the lists at any moment."""
        await self._connection.raw_many([("SADD", DELETING_KEY, run_id), ("ZREM", RUNS_KEY, run_id)])

    async def _list_as_it_is(self, run_id: str) -> None:
        """After a deletion: the run is gone, or was created again, and a server that deleted the one before took this
        one off the list.
        """
        reply = await self._connection.raw("HMGET", Keys(run_id).of("run"), "state", "create_ms")
        state, create_ms = as_texts(reply)
        if state == "deleting":
            return
        listed = [("ZADD", RUNS_KEY, "NX", create_ms, run_id)] if state else []
        await self._connection.raw_many([*listed, ("SREM", DELETING_KEY, run_id)])

    async def _remove_once(self, keys: Keys) -> int:
        cursor, removed = "0", 0
        while True:
            reply = as_list(await self._connection.call(keys, "remove_keys", cursor))
            cursor, removed = as_text(reply[0]), removed + as_int(reply[1])
            if cursor == "0":
                return removed
