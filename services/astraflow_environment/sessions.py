"""The sessions of an environment service: which call may act, what is only repeated, and how a session ends.

Invariant: an action is carried out at most once, whatever is repeated or lost on the way; a session that is over says
why to whoever still calls it; every call has a deadline, every session bounds of turns, time and silence. One call of a
session runs at a time, and goes on when its caller vanishes, so that a repetition finds its result. Ids of sessions and
names of holders are secrets, by which alone a call acts: no log and no message shows one. Called by `servicer`.
"""

import asyncio
import hashlib
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from google.protobuf.message import Message as Proto

from astraflow._contract.bounds import require_incarnation
from astraflow.errors import (
    AstraflowError,
    ConflictError,
    NotFoundError,
    PluginError,
    PreconditionError,
    ResourceExhaustedError,
)
from astraflow.raas.v1 import environment_service_pb2 as contract
from astraflow_environment.frames import Kind
from astraflow_environment.settings import EnvironmentSettings
from astraflow_environment.workers import (
    CannotRun,
    EnvironmentRaised,
    WorkerLost,
    WorkerPool,
    WorkerProcess,
)
from astraflow_kit.log import get_logger
from astraflow_kit.metrics import Metrics

log = get_logger(__name__)

_REMEMBERED = 4096
"""Sessions that are over and still say how they ended."""
_FULL_RETRY_S = 0.1
_CLOSE_S = 30.0
"""What an environment may take to close."""
_SWEEP_S = 1.0

Response = TypeVar("Response", contract.ResetResponse, contract.StepResponse)


@dataclass(kw_only=True, eq=False)
class Session:
    """One environment of one episode."""

    session_id: str
    worker: WorkerProcess
    holder: str
    incarnation: int
    born_s: float
    used_s: float
    turn: int = 0
    digest: bytes = b""
    current: "asyncio.Task[Any] | None" = None
    """The newest call: it runs, or holds its answer or error."""
    total_reward: float = 0.0
    terminated: bool = False
    over: str = ""
    """Why it takes no more actions; empty while it does."""
    failed: bool = False
    is_open: bool = field(default=True)
    """Whether it has its place in the worker."""

    @property
    def is_busy(self) -> bool:
        """Whether a call runs."""
        return self.current is not None and not self.current.done()


class Sessions:
    """All sessions of the service; a lifecycle `Service` that ends those whose time is over."""

    def __init__(self, pool: WorkerPool, *, settings: EnvironmentSettings, metrics: Metrics) -> None:
        self._pool = pool
        self._settings = settings
        self._metrics = metrics
        self._sessions: dict[str, Session] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._stopping = asyncio.Event()

    @property
    def num_open(self) -> int:
        """Sessions that hold a place in a worker."""
        return sum(session.is_open for session in self._sessions.values())

    async def start(self) -> None:
        """Nothing to bind."""

    async def run(self) -> None:
        """End sessions that are too old, or that nobody calls, until `stop`."""
        while not self._stopping.is_set():
            for session in list(self._sessions.values()):
                self._end_if_overdue(session)
            try:
                await asyncio.wait_for(self._stopping.wait(), _SWEEP_S)
            except TimeoutError:
                continue

    async def stop(self, *, deadline_s: float) -> None:
        """Stop looking; the sessions end with their workers."""
        del deadline_s
        self._stopping.set()

    async def reset(self, request: contract.ResetRequest, *, deadline_s: float) -> contract.ResetResponse:
        """Begin a session, or repeat how it began."""
        digest = _digest(request)
        session = self._sessions.get(request.session_id)
        if session is None:
            session = self._begin(request, digest=digest)
            acting = self._act(session, Kind.RESET, request, contract.ResetResponse, deadline_s=deadline_s)
            session.current = self._task(acting)
        elif session.turn or session.digest != digest:
            raise ConflictError(
                f"this session exists, at turn {session.turn} and not from this very request; draw another session_id"
            )
        return await _answer_of(session, contract.ResetResponse)

    async def step(self, request: contract.StepRequest, *, deadline_s: float) -> contract.StepResponse:
        """Act, or repeat what the last action gave."""
        session, digest = self._find(request.session_id), _digest(request)
        if request.turn == session.turn:
            if digest != session.digest:
                raise ConflictError(f"turn {session.turn} was taken with another action; go on with the next")
            return await _answer_of(session, contract.StepResponse)
        self._require_next(session, request.turn)
        session.turn, session.digest = request.turn, digest
        acting = self._act(session, Kind.STEP, request, contract.StepResponse, deadline_s=deadline_s)
        session.current = self._task(acting)
        return await _answer_of(session, contract.StepResponse)

    def close(self, session_id: str) -> contract.CloseResponse:
        """End a session, and say what came of it."""
        session = self._find(session_id)
        self._end(session, "it was closed", cause="closed")
        return contract.CloseResponse(
            turns=session.turn, total_reward=session.total_reward, terminated=session.terminated
        )

    def _begin(self, request: contract.ResetRequest, *, digest: bytes) -> Session:
        served = self._settings.served_name
        if request.environment != served:
            raise NotFoundError(
                f"environment {request.environment!r} is not served here, but {served}; call the service that has it"
            )
        require_incarnation(request.holder_incarnation)
        self._end_those_before(request.holder, request.holder_incarnation)
        worker = self._pool.take()
        if worker is None:
            raise ResourceExhaustedError(
                f"all {self.num_open} sessions are taken ({self._pool.num_ready} workers are loaded); wait, or start "
                "the service with more workers",
                retry_after_s=_FULL_RETRY_S,
            )
        now_s = _now_s()
        session = Session(
            session_id=request.session_id,
            worker=worker,
            holder=request.holder,
            incarnation=request.holder_incarnation,
            born_s=now_s,
            used_s=now_s,
            digest=digest,
        )
        self._sessions[request.session_id] = session
        self._forget_oldest()
        self._publish()
        return session

    def _end_those_before(self, holder: str, incarnation: int) -> None:
        """Nobody will call the sessions of a holder's earlier incarnations again."""
        for session in self._sessions.values():
            if holder and session.is_open and session.holder == holder and session.incarnation < incarnation:
                self._end(session, "its holder was started anew", cause="holder_restarted")

    def _find(self, session_id: str) -> Session:
        session = self._sessions.get(session_id)
        if session is None:
            raise NotFoundError(
                "no such session: it ended long ago, or the service was started anew; reset another one"
            )
        return session

    def _require_next(self, session: Session, turn: int) -> None:
        if session.over:
            kind = PluginError if session.failed else PreconditionError
            raise kind(f"the session is over: {session.over}; reset another one")
        if turn != session.turn + 1 or session.is_busy:
            state = "still runs" if session.is_busy else "was the last"
            raise PreconditionError(f"turn {turn} cannot follow: turn {session.turn} {state}")

    async def _act(
        self,
        session: Session,
        kind: Kind,
        request: Proto,
        response: type[Response],
        *,
        deadline_s: float,
    ) -> Response:
        """One call of the worker. Raises the typed error that ends the session."""
        began_s = _now_s()
        try:
            async with asyncio.timeout(deadline_s):
                answer = response.FromString(await session.worker.call(kind, request.SerializeToString()))
        except TimeoutError:
            # Where it hangs is unknown: nothing else in that process can be relied on.
            session.worker.kill(f"it did not answer within {deadline_s:g} s")
            raise self._failure(session, f"no answer within {deadline_s:g} s", cause="hung") from None
        except WorkerLost as error:
            raise self._failure(session, f"its worker is gone: {error}", cause="worker_lost") from error
        except EnvironmentRaised as error:
            raise self._failure(session, str(error), cause="raised") from error
        except CannotRun as error:
            self._end(session, str(error), cause="missing", failed=True)
            raise NotFoundError(str(error)) from error
        session.used_s = _now_s()
        self._metrics.observe(
            "astraflow_environment_call_seconds", session.used_s - began_s, call=kind.name.lower()
        )
        self._note(session, answer.observation)
        self._say_bounds(session, answer)
        return answer

    def _note(self, session: Session, seen: contract.Observation) -> None:
        session.total_reward += seen.reward
        session.terminated = seen.terminated
        seen.truncated = not seen.terminated and session.turn >= self._settings.max_turns
        if seen.terminated or seen.truncated:
            session.over = session.over or (
                "it is done" if seen.terminated else f"turn {session.turn} was the last"
            )

    def _say_bounds(self, session: Session, answer: Response) -> None:
        left_s = max(0.0, session.born_s + self._settings.session_timeout_s - _now_s())
        answer.session_duration.FromMilliseconds(int(left_s * 1000))
        if isinstance(answer, contract.ResetResponse):
            answer.max_turns = self._settings.max_turns

    def _failure(self, session: Session, why: str, *, cause: str) -> AstraflowError:
        where = f"environment {self._settings.served_name}, turn {session.turn}: {why}"
        log.warning("session.failed", turn=session.turn, cause=cause, why=why)
        self._end(session, where, cause=cause, failed=True)
        return PluginError(where)

    def _end_if_overdue(self, session: Session) -> None:
        if not session.is_open or session.is_busy:
            return
        settings, now_s = self._settings, _now_s()
        if not session.worker.alive:
            self._failure(session, f"its worker is gone: {session.worker.why_ended}", cause="worker_lost")
        elif now_s > session.born_s + settings.session_timeout_s:
            self._end(session, f"session_timeout_s {settings.session_timeout_s:g} is over", cause="too_old")
        elif now_s > session.used_s + settings.idle_timeout_s:
            self._end(session, f"nobody called for idle_timeout_s {settings.idle_timeout_s:g}", cause="idle")

    def _end(self, session: Session, why: str, *, cause: str, failed: bool = False) -> None:
        session.over, session.failed = session.over or why, session.failed or failed
        if not session.is_open:
            return
        session.is_open = False
        self._metrics.increment("astraflow_environment_sessions_total", end=cause)
        self._task(self._leave_worker(session))

    async def _leave_worker(self, session: Session) -> None:
        """Close the environment after whatever still runs; one that cannot be closed takes its worker along."""
        worker, running = session.worker, session.current
        if running is not None and not running.done() and running is not asyncio.current_task():
            await asyncio.wait((running,))
        try:
            async with asyncio.timeout(_CLOSE_S):
                request = contract.CloseRequest(session_id=session.session_id)
                await worker.call(Kind.CLOSE, request.SerializeToString())
        except (TimeoutError, EnvironmentRaised, CannotRun) as error:
            log.warning("session.not_closed", why=str(error))
            worker.kill(f"a session could not be closed: {error}")
        except WorkerLost:
            pass
        finally:
            self._pool.give_back(worker)
            self._publish()

    def _forget_oldest(self) -> None:
        over = [session for session in self._sessions.values() if not session.is_open]
        for session in over[: max(0, len(over) - _REMEMBERED)]:
            del self._sessions[session.session_id]

    def _publish(self) -> None:
        self._metrics.set("astraflow_environment_open_sessions", self.num_open)

    def _task(self, work: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        """Run on, whoever waits; an error is for the next who asks."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()


async def _answer_of(session: Session, kind: type[Response]) -> Response:
    assert session.current is not None
    answer = await asyncio.shield(session.current)
    assert isinstance(answer, kind)
    return answer


def _digest(request: Proto) -> bytes:
    """What makes two calls the same: all but the time that they may take."""
    same = type(request)()
    same.CopyFrom(request)
    same.ClearField("deadline_duration")
    return hashlib.blake2b(same.SerializeToString(deterministic=True), digest_size=16).digest()


def _now_s() -> float:
    return asyncio.get_running_loop().time()
