"""The worker processes: started and loaded ahead, one replaced as soon as it dies, hangs or is used up.

Invariant: a worker holds at most its number of sessions, never outlives the service, and takes everything that it
started along when it is killed. A lifecycle `Service`; `sessions` takes workers and gives them back.
"""

import asyncio
import itertools
import socket

from astraflow.errors import PluginError
from astraflow_environment.frames import Frame, Kind, read_frame, write_frame
from astraflow_environment.settings import EnvironmentSettings
from astraflow_environment.worker import Specification
from astraflow_kit.children import kill_family
from astraflow_kit.family import ending_with_us
from astraflow_kit.log import get_logger
from astraflow_kit.metrics import Metrics
from astraflow_kit.parent import python

log = get_logger(__name__)

_FIRST_BACKOFF_S, _MAX_BACKOFF_S = 0.2, 30.0


class WorkerLost(Exception):
    """The worker ended before it answered."""


class EnvironmentRaised(Exception):
    """The environment raised, or broke a bound; the text says what and where."""


class CannotRun(Exception):
    """The environment says that this machine lacks what the task needs, or the plug-in cannot be loaded."""


class WorkerProcess:
    """One started worker; `num_sessions` and `num_begun` are the pool's."""

    def __init__(
        self,
        child: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._child = child
        self._reader = reader
        self._writer = writer
        self._numbers = itertools.count(1)
        self._calls: dict[int, asyncio.Future[bytes]] = {}
        self.num_sessions = self.num_begun = 0
        self.alive = True
        self.why_ended = ""
        self._ending: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        """Of the process that ends it with everything it started."""
        return self._child.pid

    async def ready(self) -> None:
        """Return when the plug-in is loaded. Raises CannotRun, WorkerLost."""
        try:
            frame = await read_frame(self._reader)
        except (EOFError, OSError) as error:
            raise WorkerLost(f"it ended with status {await self._child.wait()} while it loaded") from error
        if frame.kind is not Kind.READY:
            raise CannotRun(frame.payload.decode())

    async def run(self) -> None:
        """Read answers until the process ends."""
        try:
            while True:
                self._settle(await read_frame(self._reader))
        except (EOFError, OSError, ValueError):
            self.kill("it ended")
        await self.gone()
        status = self._child.returncode
        for call in self._calls.values():
            if not call.done():
                call.set_exception(WorkerLost(f"{self.why_ended} (status {status})"))

    async def call(self, kind: Kind, payload: bytes) -> bytes:
        """The answer. Raises WorkerLost, EnvironmentRaised, CannotRun."""
        if not self.alive:
            raise WorkerLost(self.why_ended)
        number = next(self._numbers)
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._calls[number] = answer
        try:
            write_frame(self._writer, Frame(kind, number, payload))
            return await answer
        finally:
            del self._calls[number]

    def kill(self, why: str) -> None:
        """End it with everything it started, which `gone` waits for. Idempotent."""
        if not self.alive:
            return
        self.alive, self.why_ended = False, why
        self._writer.close()
        self._ending = asyncio.create_task(kill_family(self._child))

    async def gone(self) -> None:
        """Return when nothing is left of a worker that was killed."""
        if self._ending is not None:
            await asyncio.shield(self._ending)

    def _settle(self, frame: Frame) -> None:
        call = self._calls.get(frame.call)
        if call is None or call.done():
            return  # its caller ran out of time
        if frame.kind is Kind.ANSWER:
            call.set_result(frame.payload)
        else:
            kind = CannotRun if frame.kind is Kind.MISSING else EnvironmentRaised
            call.set_exception(kind(frame.payload.decode(errors="replace")))


class WorkerPool:
    """A fixed number of workers, kept."""

    def __init__(self, settings: EnvironmentSettings, *, metrics: Metrics) -> None:
        self._settings = settings
        self._metrics = metrics
        self._specification = Specification(
            use=settings.use,
            settings=settings.with_,
            recipe=str(settings.recipe.resolve()) if settings.recipe else "",
        )
        self._workers: list[WorkerProcess] = []
        self._keepers: list[asyncio.Task[None]] = []
        self._has_loaded = False

    @property
    def num_ready(self) -> int:
        """Workers that are loaded."""
        return len(self._workers)

    async def start(self) -> None:
        """Nothing to bind."""

    async def run(self) -> None:
        """Keep the workers. Raises PluginError when the plug-in cannot be loaded at all."""
        self._keepers = [asyncio.create_task(self._keep()) for _ in range(self._settings.workers)]
        done, _ = await asyncio.wait(self._keepers, return_when=asyncio.FIRST_EXCEPTION)
        for keeper in done:
            if not keeper.cancelled():
                keeper.result()

    async def stop(self, *, deadline_s: float) -> None:
        """Kill them all."""
        for keeper in self._keepers:
            keeper.cancel()
        if self._keepers:
            await asyncio.wait(self._keepers, timeout=deadline_s)

    def take(self) -> WorkerProcess | None:
        """A worker with room for one more session, the emptiest; None when there is none."""
        free = [w for w in self._workers if w.num_sessions < self._settings.sessions_per_worker and w.alive]
        free = [worker for worker in free if not self._is_used_up(worker)]
        if not free:
            return None
        worker = min(free, key=lambda each: each.num_sessions)
        worker.num_sessions += 1
        worker.num_begun += 1
        return worker

    def give_back(self, worker: WorkerProcess) -> None:
        """One session of the worker is over."""
        worker.num_sessions -= 1
        if self._is_used_up(worker) and not worker.num_sessions:
            worker.kill("it has had its number of sessions")

    def _is_used_up(self, worker: WorkerProcess) -> bool:
        return 0 < self._settings.worker_sessions <= worker.num_begun

    async def _keep(self) -> None:
        backoff_s = _FIRST_BACKOFF_S
        while True:
            try:
                worker = await self._load()
            except (CannotRun, WorkerLost, TimeoutError, OSError) as error:
                if isinstance(error, CannotRun) and not self._has_loaded:
                    raise PluginError(str(error)) from error
                log.error("worker.not_loaded", why=str(error) or "it took too long", retry_s=backoff_s)
                await asyncio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)
                continue
            backoff_s, self._has_loaded = _FIRST_BACKOFF_S, True
            await self._hold(worker)

    async def _hold(self, worker: WorkerProcess) -> None:
        self._workers.append(worker)
        self._metrics.set("astraflow_environment_workers", len(self._workers))
        try:
            await worker.run()
        finally:
            worker.kill("the service stopped")
            self._workers.remove(worker)
            await worker.gone()
            self._metrics.set("astraflow_environment_workers", len(self._workers))
        log.info("worker.ended", pid=worker.pid, why=worker.why_ended)

    async def _load(self) -> WorkerProcess:
        ours, theirs = socket.socketpair()
        with theirs:
            command = python("astraflow_environment.worker", str(theirs.fileno()), self._specification.dump())
            child = await asyncio.create_subprocess_exec(
                *ending_with_us(*command),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        worker = WorkerProcess(child, *await asyncio.open_connection(sock=ours))
        try:
            async with asyncio.timeout(self._settings.worker_start_timeout_s):
                await worker.ready()
        except BaseException:
            worker.kill("it was not loaded in time")
            await worker.gone()
            raise
        log.info("worker.loaded", pid=worker.pid)
        return worker
