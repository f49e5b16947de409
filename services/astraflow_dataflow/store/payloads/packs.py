"""Payloads of trajectories: written before the commit that refers to them, read by their places, removed once free.

Without a holder they are keys of the server's Redis, which the functions keep and remove. With one, what a commit
stores is a pack outside, and Redis holds places (see `store/lua/payloads.lua`). A server that dies between a pack and
its commit leaves one that ends by itself. Built by `server`; used by the stores of episodes, runs and the archive, and
by batches.
"""

import asyncio
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from astraflow.errors import (
    AstraflowError,
    IncompatibleError,
    NotFoundError,
    PreconditionError,
    UnavailableError,
)
from astraflow_dataflow.rules.redis_health import PAYLOAD_RELEASES
from astraflow_dataflow.rules.waits import Wait
from astraflow_dataflow.store.connection import Connection
from astraflow_dataflow.store.homes.redis import Redis
from astraflow_dataflow.store.keys import PAYLOADS_KEY, RUNS_KEY, Keys
from astraflow_dataflow.store.payloads.holders import PayloadHolder
from astraflow_dataflow.store.payloads.inside import UNCOMMITTED_S
from astraflow_dataflow.store.replies import as_bytes, as_int, as_list, as_text, as_texts
from astraflow_kit import failpoints
from astraflow_kit.log import get_logger

log = get_logger(__name__)

_REMOVED_AT_ONCE = 256
_LOOKED_AT = 4
AWAY, LOST = PAYLOAD_RELEASES


@dataclass(frozen=True, order=True)
class Place:
    """Where a payload is: the value that Redis holds of its trajectory."""

    text: str
    trajectory_id: str

    @property
    def outside(self) -> tuple[str, int, int] | None:
        """Pack, offset and length in bytes; None for a key of the server's Redis."""
        _, *parts = self.text.split(" ")
        return (parts[0], int(parts[1]), int(parts[2])) if parts else None


class Payloads:
    """The payloads of all runs of a server."""

    def __init__(self, connection: Redis, holder: PayloadHolder | None = None) -> None:
        self._connection = connection
        self.holder = holder
        self._problem: Wait | None = None

    @property
    def problem(self) -> Wait | None:
        """What is wrong with the holder now, as far as this process saw; None when nothing."""
        return self._problem

    @property
    def address(self) -> str:
        """Where they are, without secrets; '' for the server's Redis."""
        return self.holder.address if self.holder else ""

    @property
    def redis(self) -> Connection | None:
        """The other Redis, whose disk acknowledgements wait for, too."""
        return self.holder.redis if self.holder else None

    async def open(self) -> None:
        """Check the holder. Raises UnavailableError, IncompatibleError, PreconditionError with the remedy."""
        if self.holder is not None:
            await self.holder.open()
            return
        for run_id in as_texts(await self._connection.raw("ZRANGE", RUNS_KEY, 0, -1)):
            try:
                num_packs = as_int(await self._connection.raw("HLEN", Keys(run_id).of("packs")))
            except UnavailableError as error:  # the others can be served
                log.warning("payloads.not_looked_at", run_id=run_id, message=error.message)
                continue
            if num_packs:
                raise IncompatibleError(
                    f"payloads of run {run_id} are outside this Redis; give the server their address (--payloads)"
                )

    async def close(self) -> None:
        """Let go of the holder."""
        if self.holder is not None:
            await self.holder.close()

    async def write(self, run_id: str, bodies: Sequence[bytes]) -> str:
        """Store a pack that a commit is about to refer to; return what the commit needs to know of it, '' without one.

        Raises UnavailableError, and NotFoundError when the run is gone.
        """
        if self.holder is None or not any(bodies):
            return ""
        pack = secrets.token_hex(12)
        await self._connection.call(Keys(run_id), "begin_pack", pack, 1000 * UNCOMMITTED_S)
        try:
            await self.holder.put(run_id, pack, b"".join(bodies))
        except AstraflowError as error:
            self._note(AWAY, error.message)
            raise
        failpoints.hit("dataflow.payloads_stored")
        return " ".join([pack, *(str(len(body)) for body in bodies)])

    async def forgo(self, run_id: str, packed: str) -> None:
        """The run of a commit that was to refer to a pack is gone, and with it whoever would remove the pack."""
        if self.holder is not None and packed:
            await self.holder.delete(run_id, [packed.partition(" ")[0]])

    async def places(self, run_id: str, trajectory_ids: Sequence[str]) -> list[Place]:
        """Return where the payloads of trajectories are, in the order asked; the text is '' of one that has none."""
        if not trajectory_ids:
            return []
        found = as_list(await self._connection.raw("HMGET", Keys(run_id).of("owners"), *trajectory_ids))
        return [Place(as_text(text), each) for text, each in zip(found, trajectory_ids, strict=True)]

    async def read(self, run_id: str, places: Sequence[Place]) -> list[bytes | None]:
        """Return the payloads at some places; None for one that is not there."""
        keys, packs = Keys(run_id), dict[str, list[Place]]()
        inside = [place for place in places if place.outside is None]
        for place in places:
            if place.outside is not None:
                packs.setdefault(place.outside[0], []).append(place)
        found = dict[Place, bytes | None]()
        if inside:
            names = (keys.of("payload", place.text, place.trajectory_id) for place in inside)
            bodies = as_list(await self._connection.raw("MGET", *names))
            found |= {
                place: None if body is None else as_bytes(body)
                for place, body in zip(inside, bodies, strict=True)
            }
        for parts in await asyncio.gather(*(self._read_pack(run_id, *each) for each in packs.items())):
            found |= parts
        return [found[place] for place in places]

    async def _read_pack(
        self, run_id: str, pack: str, places: Sequence[Place]
    ) -> Mapping[Place, bytes | None]:
        """The payloads of one pack, by one read of all between the first and the last."""
        spans = [place.outside[1:] for place in places if place.outside is not None]
        start, end = min(first for first, _ in spans), max(first + size for first, size in spans)
        body = await self._required().get(run_id, pack, start=start, length=end - start)
        return {
            place: None if body is None else body[first - start : first - start + size]
            for place, (first, size) in zip(places, spans, strict=True)
        }

    def lost(self, run_id: str, place: Place) -> AstraflowError:
        """The error of a payload that was to be read and is not there."""
        if place.outside is None:
            return NotFoundError(
                f"the payload of {place.trajectory_id} is gone; train without its group, or nack the batch with "
                "`quarantine` and acquire the step again",
                metadata={"payload_missing": place.trajectory_id},
            )
        self._note(LOST, f"the payload of {place.trajectory_id} in run {run_id} is gone")
        return UnavailableError(
            f"the payload of {place.trajectory_id} is gone from {self._required().address}; {PAYLOAD_RELEASES[LOST]}",
            retry_after_s=5.0,
            metadata={"reason": LOST},
        )

    async def replace_lost(self, run_id: str, sent: Mapping[str, tuple[str, bytes]]) -> int:
        """Store again what was lost outside of trajectories that came once more; `sent` has their episode and payload.

        Nothing that is there is replaced. Returns how many payloads were.
        """
        if self.holder is None:
            return 0
        places = [
            place
            for place in await self.places(run_id, list(sent))
            if place.outside is not None and place.text.partition(" ")[0] == sent[place.trajectory_id][0]
        ]
        bodies = await self.read(run_id, places)
        gone = [place for place, body in zip(places, bodies, strict=True) if body is None]
        if not gone:
            return 0
        pack, *sizes = (await self.write(run_id, [sent[place.trajectory_id][1] for place in gone])).split(" ")
        offset, arguments = 0, list[str]()
        for place, size in zip(gone, sizes, strict=True):
            episode_id = sent[place.trajectory_id][0]
            arguments += [place.trajectory_id, place.text, f"{episode_id} {pack} {offset} {size}"]
            offset += int(size)
        replaced = as_int(await self._connection.call(Keys(run_id), "replace_payloads", *arguments))
        log.info("payloads.replaced", run_id=run_id, number=replaced)
        return replaced

    async def remove_ended(self, run_id: str) -> int:
        """Remove packs of a run that nothing refers to any more. Returns how many."""
        removed = 0
        while self.holder is not None:
            keys = Keys(run_id)
            packs = as_texts(await self._connection.call(keys, "end_packs", _REMOVED_AT_ONCE))
            if not packs:
                break
            await self.holder.delete(run_id, packs)
            removed += len(packs)
            await self._connection.call(keys, "packs_removed", *packs)
        return removed

    async def remove_all(self, run_id: str) -> None:
        """Remove all packs of a run that is being deleted, of no other. Raises UnavailableError."""
        keys = [Keys(run_id).of(kind) for kind in ("packs", "packs_ending", "packs_ended")]
        named = (("HKEYS", keys[0]), ("ZRANGE", keys[1], 0, -1), ("SMEMBERS", keys[2]))
        # The state last: what is named before it is not of a run that was created again.
        asked = (*named, ("HGET", Keys(run_id).of("run"), "state"))
        packs, ending, ended, state = await self._connection.raw_many(asked)
        if as_text(state) != "deleting":
            return
        names = [name for found in (packs, ending, ended) for name in as_texts(found)]
        for first in range(0, len(names), _REMOVED_AT_ONCE):
            await self._required().delete(run_id, names[first : first + _REMOVED_AT_ONCE])

    async def look(self, run_ids: Iterable[str]) -> str:
        """See whether the holder is there and holds what it must; `problem` says what it lacks. Returns its
        incarnation, '' when there is none to be had.
        """
        if self.holder is None:
            return ""
        try:
            now = await self.holder.incarnation()
            missing = [name for run_id in run_ids for name in await self._missing(run_id)]
        except AstraflowError as error:
            self._note(AWAY, error.message)
            return ""
        if missing:
            self._note(LOST, f"packs {', '.join(missing[:_LOOKED_AT])} are gone")
        else:
            self._problem = None
        return now

    async def is_another(self, incarnation: str) -> bool:
        """Whether the holder was another one, or had not begun again, when a server of this Redis saw it last."""
        before = as_text(await self._connection.raw("SET", PAYLOADS_KEY, incarnation, "GET"))
        return before not in ("", incarnation)

    async def _missing(self, run_id: str) -> list[str]:
        """Those of a few packs, drawn anew each time, that are needed and not there."""
        packs = Keys(run_id).of("packs")
        try:
            drawn = as_texts(await self._connection.raw("HRANDFIELD", packs, _LOOKED_AT))
        except UnavailableError as error:  # the run's Redis, not the holder
            log.info("payloads.not_looked_at", run_id=run_id, message=error.message)
            return []
        get = partial(self._required().get, run_id, start=0, length=1)
        gone = [pack for pack in drawn if await get(pack) is None]
        needed = as_list(await self._connection.raw("HMGET", packs, *gone)) if gone else []
        return [f"{run_id}/{pack}" for pack, number in zip(gone, needed, strict=True) if number is not None]

    def _note(self, reason: str, detail: str) -> None:
        known, now_ms = self._problem, int(time.time() * 1000)
        if known is None or known.reason != reason:
            log.warning("payloads.problem", reason=reason, message=detail)
        self._problem = Wait(
            stage="data",
            reason=reason,
            detail=f"payloads at {self._required().address}: {detail}",
            released_by=PAYLOAD_RELEASES[reason],
            since_ms=known.since_ms if known and known.reason == reason else now_ms,
        )

    def _required(self) -> PayloadHolder:
        if self.holder is None:
            raise PreconditionError(
                "payloads of this run are outside this Redis; give every server their address (--payloads)"
            )
        return self.holder
