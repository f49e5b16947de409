"""The engines of one policy on this node: which of them take calls, and which takes the next.

Invariant: a call is sent only to an engine that is ready, trusted, and serves the version of the policy; one that has
not caught up, or is lost, costs only the calls in it. Who asks first is served first; calls are spread
evenly. State only: `engine_host` brings engines up, `weight_sync` changes versions, `batcher` takes places.
"""

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass

from astraflow.errors import AstraflowError
from astraflow_raas.engine.base import Engine, EngineDown


class Replica:
    """One of the engines, whatever process it is now. Owned by the event loop."""

    def __init__(self, number: int, *, on_change: Callable[["Replica"], None]) -> None:
        self.number = number
        """From 1."""
        self.engine: Engine | None = None
        """None while it is lost."""
        self.version: int | None = None
        """Version it serves, or did when it was lost."""
        self.num_calls = 0
        """Calls in it."""
        self.last_answer_s = 0.0
        """Loop time of the last sign that it makes tokens: an answer to calls or to a probe."""
        self.is_swapping = False
        """True while it is given other weights: it makes no token then, and its version is not known."""
        self._on_change = on_change
        self._doubt: AstraflowError | None = None

    def ready(self, engine: Engine, *, version: int) -> None:
        """An engine serves `version`: calls flow."""
        self.engine, self._doubt = engine, None
        self.answered()
        self.serves(version)

    def serves(self, version: int) -> None:
        """It serves `version` now, which is the policy's from here on."""
        self.version = version
        self._on_change(self)

    def lost(self) -> None:
        """The engine is gone: calls go to others, or wait for the next one."""
        self.engine = None
        self._on_change(self)

    def distrust(self, error: AstraflowError) -> None:
        """Nobody knows what it samples with: no calls until its host has brought up the next one."""
        self._doubt = error
        self.lost()

    def require_trust(self) -> None:
        """Raises the error for which it is not trusted."""
        if self._doubt is not None:
            raise self._doubt

    def answered(self) -> None:
        """It has shown that it makes tokens."""
        self.last_answer_s = asyncio.get_running_loop().time()


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Places for `number` calls in `rank` of an engine, to be given back."""

    replica: Replica
    engine: Engine
    rank: int
    number: int


class Replicas:
    """All engines of a policy. Owned by the event loop."""

    def __init__(
        self, policy_id: str, *, number: int, patience_s: float, on_change: Callable[[], None]
    ) -> None:
        """`patience_s` bounds how long calls wait while there is no engine, counted from the loss of the last one."""
        self.all = tuple(Replica(index + 1, on_change=self._has_changed) for index in range(number))
        self.version: int | None = None
        """Version of the policy here: what the engines were given last. None before the first."""
        self._policy_id = policy_id
        self._patience_s = patience_s
        self._lost_s = math.inf
        self._on_change = on_change
        self._turn = asyncio.Lock()
        self._changed = asyncio.Event()

    @property
    def in_service(self) -> list[Replica]:
        """Those that take calls."""
        return [each for each in self.all if each.engine is not None and each.version == self.version]

    async def take(self, wanted: Callable[[], int]) -> Places:
        """Wait for a free place, then take up to as many as `wanted` says then; 0 when nothing is any more.

        Raises EngineDown when there has been no engine for `patience_s`.
        """
        async with self._turn:
            while (places := self._try_take(wanted)) is None:
                self._changed.clear()
                await self._wait_for_change()
        if not places.replica.num_calls:
            places.replica.answered()
        places.replica.num_calls += places.number
        return places

    def give_back(self, places: Places) -> None:
        """The calls in these places were answered, or will never be."""
        places.replica.num_calls -= places.number
        places.engine.slots.give_back(places.rank, places.number)
        self._changed.set()

    def _try_take(self, wanted: Callable[[], int]) -> Places | None:
        engines = [(each, each.engine) for each in self.in_service if each.engine is not None]
        free = [(replica, engine) for replica, engine in engines if engine.slots.num_free]
        if not free:
            return None
        replica, engine = min(free, key=lambda pair: pair[0].num_calls)
        # Up to the calls of the next one, then an equal part of the rest.
        others = [other.num_calls for other, _ in free if other is not replica]
        num_wanted = wanted()
        ahead = min(num_wanted, min(others, default=0) - replica.num_calls) if others else num_wanted
        share = ahead + math.ceil((num_wanted - ahead) / len(free))
        rank, number = engine.slots.take(share)
        return Places(replica=replica, engine=engine, rank=rank, number=number)

    async def _wait_for_change(self) -> None:
        until_s = self._lost_s + self._patience_s
        try:
            async with asyncio.timeout_at(until_s if math.isfinite(until_s) else None):
                await self._changed.wait()
        except TimeoutError:
            down_s = asyncio.get_running_loop().time() - self._lost_s
            raise EngineDown(
                f"policy {self._policy_id!r} has had no engine here for {down_s:.1f} s; the node starts another one"
            ) from None

    def _has_changed(self, replica: Replica) -> None:
        if replica.engine is not None:
            self.version, self._lost_s = replica.version, math.inf
            replica.engine.slots.freed.add(self._changed.set)
        elif self._lost_s == math.inf and not any(each.engine for each in self.all):
            self._lost_s = asyncio.get_running_loop().time()
        self._changed.set()
        self._on_change()
