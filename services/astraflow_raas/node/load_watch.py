"""Asks the engines how busy they are, and says how many episodes the node runs at once.

Invariant: a report that is missing, late or impossible changes nothing but what is counted: the node goes on with its
own count of calls and says why. Run by the lifecycle; `worker` asks for as many tasks as `allowance` leaves.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence

from astraflow.errors import AstraflowError
from astraflow.rollout.v1 import engine_load_pb2
from astraflow_kit.log import get_logger
from astraflow_kit.metrics import Metrics
from astraflow_raas.engine.base import Engine, EngineLoad
from astraflow_raas.loops import LoopService
from astraflow_raas.policies.served_policy import ServedPolicy
from astraflow_raas.work.allowance import Allowance, EngineUse, allow

log = get_logger(__name__)

_MAX_FAULT_CHARS = 256
_ANSWERS_PER_EPISODE = 2
"""An episode must have time for this many answers of mean length."""


class LoadWatch(LoopService):
    """Owned by the event loop. `episodes` counts those that run; `most_episodes` is the recipe's bound."""

    def __init__(
        self,
        policies: Mapping[str, ServedPolicy],
        *,
        episodes: Callable[[], int],
        most_episodes: int,
        group_size: int,
        episode_timeout_s: float,
        every_s: float = 1.0,
    ) -> None:
        super().__init__()
        self._policies = policies
        self._episodes = episodes
        self._most_episodes = most_episodes
        self._group_size = group_size
        self._call_s = episode_timeout_s / _ANSWERS_PER_EPISODE
        self._every_s = every_s
        self._uses: dict[str, EngineUse] = {}
        self._tokens: dict[str, int] = {}
        self.on_change: Callable[[], None] = lambda: None
        """Called when a look at the engines has changed `allowance`."""

    @property
    def allowance(self) -> Allowance:
        """By the engines that are up now; the recipe's while there is none."""
        return allow(
            self._current().values(),
            most_episodes=self._most_episodes,
            group_size=self._group_size,
            call_s=self._call_s,
        )

    def _current(self) -> dict[str, EngineUse]:
        """The use of each policy that has an engine. Another number of places is another machine, measured anew."""
        known, self._uses = self._uses, {}
        for name, policy in self._policies.items():
            slots = sum(engine.slots.total for engine in _engines(policy))
            use = known.get(name)
            if slots:
                self._uses[name] = use if use is not None and use.slots == slots else EngineUse(slots=slots)
        return self._uses

    @property
    def loads(self) -> list[engine_load_pb2.EngineLoad]:
        """The load of each policy whose engine is up, for people."""
        return [
            engine_load_pb2.EngineLoad(
                policy_id=name,
                running=round(use.running, 1),
                waiting=round(use.waiting, 1),
                slots=use.slots,
                kv_usage=None if use.kv_usage is None else round(use.kv_usage, 3),
                tokens_per_s=round(use.tokens_per_s, 1),
                fault=use.fault,
            )
            for name, use in self._current().items()
        ]

    def publish_gauges(self, metrics: Metrics) -> None:
        """Bring the gauges of the metrics page up to date."""
        metrics.set("astraflow_raas_max_episodes", self.allowance.episodes)
        for name, use in self._current().items():
            metrics.set("astraflow_raas_engine_sequences", use.running, policy=name, state="running")
            metrics.set("astraflow_raas_engine_sequences", use.waiting, policy=name, state="waiting")
            metrics.set("astraflow_raas_engine_tokens_per_second", use.tokens_per_s, policy=name)
            metrics.set("astraflow_raas_engine_kv_usage", use.kv_usage or 0.0, policy=name)

    async def _loop(self) -> None:
        loop = asyncio.get_running_loop()
        last_s, known = loop.time(), Allowance(episodes=self._most_episodes, bounded_by="recipe")
        while True:
            elapsed_s, last_s = loop.time() - last_s, loop.time()
            await asyncio.gather(*(self._look(policy, elapsed_s) for policy in self._policies.values()))
            before, known = known, self.allowance
            if known.bounded_by != before.bounded_by:
                log.info("node.allowance", episodes=known.episodes, bounded_by=known.bounded_by)
            if known != before:
                self.on_change()
            await asyncio.sleep(self._every_s)

    async def _look(self, policy: ServedPolicy, elapsed_s: float) -> None:
        name, engines = policy.policy_id, _engines(policy)
        if not engines or any(replica.is_swapping for replica in policy.engines):
            return  # one that changes its weights stands still, which says nothing of its load
        tokens = policy.num_tokens - self._tokens.get(name, policy.num_tokens)
        self._tokens[name] = policy.num_tokens
        try:
            load, fault = _together(await asyncio.gather(*(engine.load() for engine in engines))), ""
        except AstraflowError as error:
            tokens_per_s = tokens / elapsed_s if elapsed_s else 0.0
            load, fault = (
                _own_count(policy, engines, tokens_per_s=tokens_per_s),
                error.message[:_MAX_FAULT_CHARS],
            )
        use = self._current().get(name)
        if use is None:
            return
        if fault != use.fault:
            use.fault = fault
            if fault:
                log.warning("engine.load_unknown", policy_id=name, message=fault)
            else:
                log.info("engine.load_known", policy_id=name)
        use.note(
            load,
            calls=policy.num_calls,
            episodes=self._episodes(),
            elapsed_s=elapsed_s,
            tokens_per_call=policy.tokens_per_call,
        )


def _engines(policy: ServedPolicy) -> list[Engine]:
    """Those that are up."""
    return [replica.engine for replica in policy.engines if replica.engine is not None]


def _together(loads: Sequence[EngineLoad]) -> EngineLoad:
    """The load of several engines; the fullest memory counts."""
    kv_usages = [load.kv_usage for load in loads if load.kv_usage is not None]
    return EngineLoad(
        running=sum(load.running for load in loads),
        waiting=sum(load.waiting for load in loads),
        kv_usage=max(kv_usages, default=None),
        tokens_per_s=sum(load.tokens_per_s for load in loads),
    )


def _own_count(policy: ServedPolicy, engines: Sequence[Engine], *, tokens_per_s: float) -> EngineLoad:
    """The load as the node's calls make it."""
    running = min(policy.num_calls, sum(engine.slots.total for engine in engines))
    waiting = policy.num_calls - running
    return EngineLoad(running=running, waiting=waiting, kv_usage=None, tokens_per_s=tokens_per_s)
