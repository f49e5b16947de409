"""Children that are alive and get nothing done: noticed, named and replaced.

Invariant: a start takes as long as it takes, and so does an end, so a process that has not answered yet, or has closed
its port, counts as silent only while it uses no processor time either, and for four times as long; time in which the
launcher slept counts for nobody. What is replaced is killed first, and all that a child does is fenced by its
incarnation, epoch or lease, so nothing of it can come late. `development_run` owns the watch.
"""

import asyncio
from collections.abc import Awaitable, Callable

import grpc.aio
import psutil
from grpc_health.v1 import health_pb2

from astraflow.client import channel_options
from astraflow_kit.awake import Silence
from astraflow_kit.log import get_logger
from astraflow_launcher.run.processes import Child

log = get_logger(__name__)

_LOOK_S = 1.0
_ANSWER_S = 5.0
_START_GRACES, _START_SHOWN_S = 4, 60.0
SHOWN_S = 5.0
"""A silence that is worth a person's attention."""

Ask = Callable[[Child], Awaitable[bool | None]]


class ChildWatch:
    """Asks every child again and again. `silent` says who has not answered, and for how many seconds."""

    def __init__(self, *, grace_s: float, look_s: float = _LOOK_S) -> None:
        """A child that has answered nothing for `grace_s`, one that starts four times that, is replaced; 0: never."""
        self.grace_s = grace_s
        self.silent: dict[str, float] = {}
        self._graces_s: dict[str, float] = {}
        self._look_s = look_s
        self._asked: list[tuple[Child, Ask]] = []
        self._group: asyncio.TaskGroup | None = None

    def add(self, child: Child, ask: Ask) -> None:
        """Watch a child: `ask` says whether it does what it is for, None when nobody listens; it raises nothing."""
        if self._group is None:
            self._asked.append((child, ask))
        else:
            self._group.create_task(self._watch(child, ask), name=f"watch-{child.spec.name}")

    async def run(self) -> None:
        """Watch all that were added, and those that will be, until cancelled."""
        async with asyncio.TaskGroup() as self._group:
            for child, ask in self._asked:
                self.add(child, ask)
            await asyncio.Event().wait()

    async def _watch(self, child: Child, ask: Ask) -> None:
        silence, pid, num_answers = Silence(period_s=self._look_s + _ANSWER_S), 0, 0
        while not child.finished.is_set():
            process = child.process
            if process is None or process.pid != pid:
                pid, num_answers = process.pid if process is not None else 0, 0
            answered = await ask(child) if child.running else False
            num_answers = 0 if answered is None else num_answers + answered
            silent_s = silence.look((pid, num_answers, None if num_answers else _cpu_s(pid)))
            self._note(child, silent_s if child.running else 0.0, starts=not num_answers)
            await asyncio.sleep(self._look_s)
        self._note(child, 0.0)

    def _note(self, child: Child, silent_s: float, *, starts: bool = False) -> None:
        shown_s, graces = (_START_SHOWN_S, _START_GRACES) if starts else (SHOWN_S, 1)
        name, grace_s = child.spec.name, graces * self.grace_s
        if silent_s < min(shown_s, grace_s or shown_s):
            self.silent.pop(name, None)
            return
        if name not in self.silent:
            log.warning("child.silent", child=name, since_s=round(silent_s, 1), replaced_after_s=grace_s)
        self.silent[name], self._graces_s[name] = silent_s, grace_s
        if 0 < grace_s <= silent_s:
            child.replace()

    def told(self, name: str) -> str:
        """What a person reads of a child that is silent."""
        silent_s, grace_s = self.silent[name], self._graces_s[name]
        then = f"; replaced after {grace_s:.0f} s" if grace_s else ""
        return f"alive, and has answered nothing for {silent_s:.0f} s{then}"


async def serves(child: Child) -> bool | None:
    """Whether a daemon's event loop answers the health service; None when its port is closed: it starts, or ends."""
    addresses = child.addresses
    if addresses is None:
        return None
    try:
        async with grpc.aio.insecure_channel(addresses.grpc, options=channel_options()) as channel:
            check = channel.unary_unary(
                "/grpc.health.v1.Health/Check",
                request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
                response_deserializer=health_pb2.HealthCheckResponse.FromString,
            )
            await check(health_pb2.HealthCheckRequest(), timeout=_ANSWER_S)
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.UNAVAILABLE and await _is_closed(addresses.grpc):
            return None
        # Any answer shows that it moves, a refusal too.
        return error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
    return True


async def _is_closed(address: str) -> bool:
    """Whether nobody listens there. The kernel takes connections for a process that stands still."""
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(_ANSWER_S):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    writer.close()
    return False


def _cpu_s(pid: int) -> float:
    """Processor time that a process has used, in steps of about 10 ms; 0 for one that is gone."""
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system)
