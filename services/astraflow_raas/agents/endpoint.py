"""The node's endpoint for agents: one address on loopback, and a key for each episode.

Invariant: a key of 256 random bits opens one episode's policies while the episode runs. Keys are found by their
digests, so that how long a refusal takes tells nothing of them. Where a fault, not the agent, ends an episode, its
workflow sees that fault. Made by `server`, offered to the workflow that names `endpoint`.
"""

import asyncio
import hashlib
import secrets
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from astraflow.agents import AgentLimits
from astraflow.plugins import Policy
from astraflow_kit.http import HttpServer
from astraflow_kit.metrics import Metrics
from astraflow_raas.agents.app import create_agent_app
from astraflow_raas.agents.calls import AgentCalls

_KEEP_ALIVE_S = 75
"""Clients keep connections for a turn or a tool; one that closes under a call would be repeated."""


class Endpoint:
    """An `AgentEndpoint`, and a lifecycle `Service` that serves from the first episode on."""

    def __init__(self, metrics: Metrics | None = None) -> None:
        self._metrics = metrics or Metrics()
        self._episodes: dict[bytes, AgentCalls] = {}
        self._server = HttpServer(create_agent_app(self._opened_by), keep_alive_s=_KEEP_ALIVE_S)
        self._wanted = asyncio.Event()
        self._stopped = False

    async def start(self) -> None:
        """Bind a free port of loopback."""
        await self._server.start()

    async def run(self) -> None:
        """Serve from the first `open` until `stop`."""
        await self._wanted.wait()
        if not self._stopped:
            await self._server.run()

    async def stop(self, *, deadline_s: float) -> None:
        """End within `deadline_s`. Idempotent."""
        self._stopped = True
        self._wanted.set()
        await self._server.stop(deadline_s=deadline_s)

    def _opened_by(self, key: str) -> AgentCalls | None:
        """The episode that a key opens; None, counted, for one that opens none."""
        if (calls := self._episodes.get(_digest(key))) is None:
            self._metrics.increment("astraflow_raas_agent_keys_refused_total")
        return calls

    @asynccontextmanager
    async def open(
        self, policies: Mapping[str, Policy], *, limits: AgentLimits | None = None
    ) -> AsyncIterator[AgentCalls]:
        """Serve `policies` under a new key while the block runs; raises the fault that ended it early."""
        self._wanted.set()
        owner, faults = asyncio.current_task(), list[Exception]()
        assert owner is not None
        num_cancels = owner.cancelling()

        def end_early(fault: Exception) -> None:
            if not faults:
                owner.cancel()
            faults.append(fault)

        key = f"af-{secrets.token_urlsafe(32)}"
        calls = AgentCalls(
            policies,
            base_url=f"http://{self._server.address}/v1",
            api_key=key,
            limits=limits or AgentLimits(),
            on_fault=end_early,
            metrics=self._metrics,
        )
        self._episodes[_digest(key)] = calls
        try:
            yield calls
        except (asyncio.CancelledError, Exception) as error:
            if not faults or owner.uncancel() > num_cancels:
                raise
            raise faults[0] from error
        finally:
            del self._episodes[_digest(key)]
            calls.close()
            outcome = "failed" if faults else "finished"
            self._metrics.increment("astraflow_raas_agent_episodes_total", outcome=outcome)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
