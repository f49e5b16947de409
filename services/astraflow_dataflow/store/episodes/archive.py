"""Trajectories that wait to be archived.

A pack, once sealed, never changes until it is written, so writing it again makes the same files. Called by archiving.
"""

from collections.abc import Iterable

from astraflow.dataflow.v1.batch_pb2 import Batch, BatchItem
from astraflow.rollout.v1 import trajectory_pb2
from astraflow_dataflow.records import ArchiveEntry, ArchiveState
from astraflow_dataflow.rules.groups import group_id, item_of
from astraflow_dataflow.store.homes.redis import Redis
from astraflow_dataflow.store.keys import Keys
from astraflow_dataflow.store.payloads.packs import Payloads, Place
from astraflow_dataflow.store.replies import Reply, as_int, as_list, as_mapping, as_ms, as_text

MAX_PACK_ENTRIES = 256
"""Groups in one pack of the archive at most."""


class ArchiveStore:
    """What waits to be archived."""

    def __init__(self, connection: Redis, payloads: Payloads) -> None:
        self._connection = connection
        self._payloads = payloads

    async def pack(
        self, run_id: str, *, server: str, lease_s: float, least_age_s: float, pack_bytes: int
    ) -> list[ArchiveEntry]:
        """Return what is to be written now, the same until it is `written`; nothing while another server writes.

        It is sealed when `pack_bytes` wait, or the oldest entry has waited for `least_age_s`.
        """
        arguments = (server, as_ms(lease_s), as_ms(least_age_s), pack_bytes, MAX_PACK_ENTRIES)
        reply = await self._connection.call(Keys(run_id), "archive_pack", *arguments)
        return [_archived(as_list(item)) for item in as_list(reply)]

    async def bodies(self, run_id: str, entry: ArchiveEntry) -> list[bytes | None]:
        """Return the payload of each trajectory of an entry; None for one that was lost."""
        items = zip(entry.places, entry.items, strict=True)
        return await self._payloads.read(run_id, [Place(place, item.trajectory_id) for place, item in items])

    async def written(self, run_id: str, entries: Iterable[ArchiveEntry], *, num_bytes: int) -> int:
        """Forget a pack that is in the run's store. Returns its trajectories, 0 when another server was first."""
        *_, last = entries
        return as_int(await self._connection.call(Keys(run_id), "archive_written", last.entry_id, num_bytes))

    async def failed(self, run_id: str, problem: str) -> None:
        """Note why nothing can be written now, until something is."""
        await self._connection.call(Keys(run_id), "archive_failed", problem[:2048])

    async def state(self, run_id: str) -> ArchiveState:
        """Return the figures of a run's archive."""
        fields = as_mapping(await self._connection.raw("HGETALL", Keys(run_id).of("archive")))
        return ArchiveState(
            waiting=as_int(fields.get("waiting")),
            waiting_bytes=as_int(fields.get("bytes")),
            written=as_int(fields.get("written")),
            written_bytes=as_int(fields.get("written_bytes")),
            given_up=as_int(fields.get("given_up")),
            given_up_ms=as_int(fields.get("given_up_ms")),
            problem=as_text(fields.get("problem")),
            problem_ms=as_int(fields.get("problem_ms")),
        )


def _archived(reply: list[Reply]) -> ArchiveEntry:
    fields = as_mapping(reply[1])
    ids = as_text(fields["ids"]).split("\n")
    items = {item.trajectory_id: item for item in _archived_items(fields)}
    return ArchiveEntry(
        entry_id=as_text(reply[0]),
        policy_id=as_text(fields["policy"]),
        step=as_int(fields["step"]),
        reason=as_text(fields["reason"]),
        batch_id=as_text(fields["batch"]),
        items=[items[trajectory_id] for trajectory_id in ids],
        places=as_text(fields["episodes"]).split("\n"),
    )


def _archived_items(fields: dict[str, bytes]) -> Iterable[BatchItem]:
    """What a batch says of the group, or would say of a trajectory that came to none."""
    if "items" in fields:
        return Batch.FromString(fields["items"]).items
    header = trajectory_pb2.TrajectoryHeader.FromString(fields["header"])
    task_id = as_text(fields["gid"]).partition("/")[0]
    group = group_id(task_id, policy_id=header.policy_id, role=header.role)
    return [item_of(task_id, header, group_id=group)]
