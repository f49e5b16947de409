"""Children that are alive and get nothing done: noticed, named and replaced.

Invariant: only a process that has answered once is expected to go on answering, for a start takes as long as it takes;
time in which the launcher slept counts for nobody. What is replaced is killed first, and all that a child does is
fenced by its incarnation, epoch or lease, so nothing of it can come late. `development_run` owns the watch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import grpc.aio
from grpc_health.v1 import health_pb2

from astraflow.client import channel_options
from astraflow_kit.awake import Silence
from astraflow_kit.log import get_logger
from astraflow_launcher.run.processes import Child

log = get_logger(__name__)

__all__ = ["ChildWatch", "serves"]

_LOOK_S = 1.0
_ANSWER_S = 5.0
SHOWN_S = 5.0
"""A silence that is worth a person's attention."""

Ask = Callable[[Child], Awaitable[bool]]


class ChildWatch:
    """Asks every child again and again. `silent` says who has not answered, and for how many seconds."""

    def __init__(self, *, grace_s: float, look_s: float = _LOOK_S) -> None:
        """A child that has answered nothing for `grace_s` is replaced; 0: never."""
        self.grace_s = grace_s
        self.silent: dict[str, float] = {}
        self._look_s = look_s
        self._asked: list[tuple[Child, Ask]] = []

    def add(self, child: Child, ask: Ask) -> None:
        """Watch a child: `ask` says whether it does what it is for, and raises nothing."""
        self._asked.append((child, ask))

    async def run(self) -> None:
        """Watch all that were added, until cancelled."""
        async with asyncio.TaskGroup() as group:
            for child, ask in self._asked:
                group.create_task(self._watch(child, ask), name=f"watch-{child.spec.name}")

    async def _watch(self, child: Child, ask: Ask) -> None:
        silence, pid, num_answers = Silence(period_s=self._look_s + _ANSWER_S), 0, 0
        while not child.finished.is_set():
            process = child.process
            if process is None or process.pid != pid:
                pid, num_answers = process.pid if process is not None else 0, 0
            if child.running and await ask(child):
                num_answers += 1
            silent_s = silence.look((pid, num_answers))
            self._note(child, silent_s if num_answers and child.running else 0.0)
            await asyncio.sleep(self._look_s)
        self._note(child, 0.0)

    def _note(self, child: Child, silent_s: float) -> None:
        name = child.spec.name
        if silent_s < min(SHOWN_S, self.grace_s or SHOWN_S):
            self.silent.pop(name, None)
            return
        if name not in self.silent:
            log.warning("child.silent", child=name, since_s=round(silent_s, 1), replaced_after_s=self.grace_s)
        self.silent[name] = silent_s
        if 0 < self.grace_s <= silent_s:
            child.replace()

    def told(self, name: str) -> str:
        """What a person reads of a child that is silent."""
        then = f"; replaced after {self.grace_s:.0f} s" if self.grace_s else ""
        return f"alive, and has answered nothing for {self.silent[name]:.0f} s{then}"


async def serves(child: Child) -> bool:
    """Whether a daemon's event loop answers the health service."""
    addresses = child.addresses
    if addresses is None:
        return False
    try:
        async with grpc.aio.insecure_channel(addresses.grpc, options=channel_options()) as channel:
            check = channel.unary_unary(
                "/grpc.health.v1.Health/Check",
                request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
                response_deserializer=health_pb2.HealthCheckResponse.FromString,
            )
            await check(health_pb2.HealthCheckRequest(), timeout=_ANSWER_S)
    except grpc.aio.AioRpcError as error:
        # Any answer shows that it moves, a refusal too.
        return error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
    return True
