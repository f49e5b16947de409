"""Pushing finished episodes over one stream until the server has answered for each.

Invariant: an episode that `push` accepted is sent again on every new stream until it is acknowledged (the
server recognises repetitions), also by the node's next process, which finds it on disk; at most the contract's
window is unacknowledged; memory and disk are bounded: a full spool makes `push` wait, which stops sampling.
`session` calls `push`; the lifecycle runs the stream.
"""

import asyncio
import contextlib
from collections.abc import Callable
from itertools import islice
from typing import TYPE_CHECKING, TypeAlias

from astraflow._contract.rpcs import bounds_of
from astraflow.client import AsyncClient
from astraflow.dataflow.v1 import trajectory_service_pb2
from astraflow.errors import AstraflowError, InternalError, UnavailableError
from astraflow.rollout.v1 import trajectory_pb2
from astraflow_kit import failpoints
from astraflow_kit.clock import Clock, SystemClock
from astraflow_kit.log import get_logger
from astraflow_kit.metrics import Metrics
from astraflow_raas.loops import StreamService, converse
from astraflow_raas.push.journal import PushJournal, PushLog, outcome_name
from astraflow_raas.push.spool import Spool, Spooled, SpoolLimits
from astraflow_raas.push.spool_files import SpoolFiles

if TYPE_CHECKING:
    import grpc

log = get_logger(__name__)

PushCall: TypeAlias = (
    "grpc.aio.StreamStreamCall[trajectory_service_pb2.PushRequest, trajectory_service_pb2.PushResponse]"
)
_MAX_PACK = bounds_of(trajectory_service_pb2.PushRequest, "episodes").max_items
_FLUSH_SHARE = 0.6
"""Of the time for stopping: the engines, which stop afterwards, need the rest."""
_LOOK_AGAIN_S = 0.25
"""How often a full spool releases what became safe by time alone."""


class Pusher(StreamService):
    """A lifecycle `Service`. `push` may be called by any number of tasks of the loop.

    What `files` hold from an earlier process is pushed first. Without `files` episodes are only in memory.
    """

    def __init__(
        self,
        client: AsyncClient,
        *,
        metrics: Metrics,
        limits: SpoolLimits | None = None,
        clock: Clock | None = None,
        files: SpoolFiles | None = None,
        journal: PushJournal | None = None,
    ) -> None:
        super().__init__()
        self._client = client
        self._metrics = metrics
        self._files = files
        self._journal = journal or PushJournal()
        self._spool = Spool(
            limits=limits or SpoolLimits(), clock=clock or SystemClock(), released=self._released
        )
        self._num_blocked = 0
        self.on_change: Callable[[], None] = lambda: None
        """Called whenever `waiting_for` may have changed."""
        self._to_send = asyncio.Event()
        self._has_room = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._log = PushLog()
        # What an earlier process finished goes first, before anything is leased anew.
        for number, episode in files.recover() if files else ():
            self._add(episode, size_bytes=episode.ByteSize(), file=number, repeated=True)

    @property
    def num_unacked(self) -> int:
        """Episodes finished but not yet acknowledged."""
        return self._spool.num_waiting

    @property
    def num_kept(self) -> int:
        """Episodes in the spool, acknowledged ones included that the server's disk may not have yet."""
        return self._spool.num_kept

    @property
    def waiting_for(self) -> str:
        """Why no new work should be taken: `spool_recovery` while episodes of an earlier process, or of data that
        the server lost, have no answer; `spool_full` while finished ones find no room; empty otherwise."""
        if self._spool.num_repeated:
            return "spool_recovery"
        return "spool_full" if self._num_blocked else ""

    async def push(self, episode: trajectory_pb2.Episode) -> trajectory_service_pb2.PushResult:
        """Return what became of the episode. Waits while the spool is full and until the server answers.

        When the caller is cancelled, the episode stays in the spool: finished work is pushed even when nobody
        waits.
        """
        size_bytes = episode.ByteSize()
        if not self._spool.has_room(size_bytes):
            await self._wait_for_room(size_bytes)
        spooled = self._add(episode, size_bytes=size_bytes, file=self._written(episode))
        failpoints.hit("raas.spooled")
        return await asyncio.shield(spooled.outcome)

    def durable(self, position: int) -> None:
        """The server's disk has every commit of the run up to `position`, in the newest data incarnation."""
        self._spool.durable(position)
        self._has_room.set()

    def push_recent_again(self) -> None:
        """The server has another data set than before: whatever its disk may have missed is pushed again."""
        again = self._spool.data_was_lost()
        log.warning("push.repeats", episodes=again)
        if again:
            self.on_change()
            self._idle.clear()
            self._to_send.set()

    async def _wait_for_room(self, size_bytes: int) -> None:
        self._num_blocked += 1
        if self._num_blocked == 1:
            log.warning("spool.full", episodes=self.num_kept, unacked=self.num_unacked)
            self.on_change()
        try:
            while not self._spool.has_room(size_bytes):
                self._has_room.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._has_room.wait(), _LOOK_AGAIN_S)
        finally:
            self._num_blocked -= 1
            self.on_change()

    def _written(self, episode: trajectory_pb2.Episode) -> int | None:
        """The file the episode is in now; None when the disk is in the way: then it is only in memory."""
        if self._files is None:
            return None
        try:
            return self._files.add(episode)
        except OSError as error:
            self._metrics.increment("astraflow_raas_spool_faults_total")
            log.error("spool.not_written", message=f"{error}; free space or fix the mode of the work folder")
            return None

    def _add(
        self, episode: trajectory_pb2.Episode, *, size_bytes: int, file: int | None, repeated: bool = False
    ) -> Spooled:
        outcome: asyncio.Future[trajectory_service_pb2.PushResult] = (
            asyncio.get_running_loop().create_future()
        )
        spooled = Spooled(
            episode=episode, size_bytes=size_bytes, outcome=outcome, file=file, repeated=repeated
        )
        self._spool.add(spooled)
        self._idle.clear()
        self._to_send.set()
        return spooled

    def _released(self, spooled: Spooled) -> None:
        if self._files is not None and spooled.file is not None:
            self._files.release(spooled.file)

    async def flush(self, *, deadline_s: float) -> bool:
        """Wait until every episode is acknowledged; False when `deadline_s` passed first."""
        try:
            async with asyncio.timeout(deadline_s):
                await self._idle.wait()
        except TimeoutError:
            log.warning("push.left_behind", episodes=self.num_unacked, after_s=deadline_s)
            return False
        return True

    async def stop(self, *, deadline_s: float) -> None:
        """Push what is left for at most `deadline_s`, then close the stream."""
        loop = asyncio.get_running_loop()
        give_up_s = loop.time() + deadline_s
        await self.flush(deadline_s=deadline_s * _FLUSH_SHARE)
        await super().stop(deadline_s=max(0.1, give_up_s - loop.time()))
        self._log.write()
        if self._files is not None:
            self._files.close()
        self._journal.close()

    async def _stream(self) -> None:
        """One stream, from the first episode on: write what fits the window, read acknowledgements."""
        await self._to_send.wait()
        call: PushCall = self._client.open(self._client.trajectories.Push)
        log.debug("push.stream_opened", episodes=self.num_unacked)
        try:
            await converse(call, write=self._write(call), read=self._read(call))
        finally:
            self._spool.stream_broke()
            self._to_send.set()

    def _stream_failed(self, error: AstraflowError, *, report: Callable[..., None]) -> None:
        report("push.stream_failed", reason=error.reason, message=error.message)

    async def _write(self, call: PushCall) -> None:
        sequence = 0
        while True:
            # What was finished while the last one was written goes together, and costs the server one commit.
            pack = list(islice(iter(self._spool.next_to_send, None), _MAX_PACK))
            if not pack:
                self._to_send.clear()
                await self._to_send.wait()
                continue
            sequence += 1
            episodes = [spooled.episode for spooled in pack]
            for spooled in pack:
                spooled.sequence = sequence
                self._journal.sent(spooled.episode)
                failpoints.hit("raas.push")
            await call.write(trajectory_service_pb2.PushRequest(sequence=sequence, episodes=episodes))
            for _ in episodes:
                failpoints.hit("raas.pushed")

    async def _read(self, call: PushCall) -> None:
        async for response in call:
            expected = self._spool.num_in_flight(response.sequence)
            if not expected or len(response.results) != expected:
                raise InternalError(
                    f"the server acknowledged {len(response.results)} episodes up to push {response.sequence}, "
                    f"expected {expected}; the stream is opened anew"
                )
            for result in response.results:
                if result.outcome == trajectory_service_pb2.OUTCOME_RETRY:
                    raise UnavailableError(f"{result.reason}: {result.detail}")
                self._acknowledged(result)
        log.info("push.stream_closed", episodes=self.num_unacked)

    def _acknowledged(self, result: trajectory_service_pb2.PushResult) -> None:
        self._failures = 0
        was_repeating = self._spool.num_repeated
        spooled = self._spool.acknowledge(result)
        if was_repeating and not self._spool.num_repeated:
            log.info("push.repeated_all")
            self.on_change()
        self._journal.answered(spooled.episode, result)
        self._log.note(spooled.episode, result)
        self._metrics.increment("astraflow_raas_pushes_total", outcome=outcome_name(result))
        self._space_freed()

    def _space_freed(self) -> None:
        self._to_send.set()
        self._has_room.set()
        if not self._spool.num_waiting:
            self._idle.set()
