"""An engine without a model: the stand-in of tests, with the same Protocol as the real client.

Invariant: its answers are a pure function of prompt and seed, so a test can predict every token. It can be
made to stall, to fail and to hold calls over a swap.
"""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from astraflow.plugins import VersionSpan
from astraflow_raas.engine.base import (
    Arithmetic,
    EngineLoad,
    EngineRefused,
    EngineUnavailable,
    GenerateCall,
    Generation,
    PauseMode,
)
from astraflow_raas.engine.slots import EngineSlots
from astraflow_weights.mirror.changes import ChangedElements
from astraflow_weights.versions.probe import Probe, ProbeAnswer

STOP_TOKEN = 2
IDLE = EngineLoad(running=0, waiting=0, kv_usage=0.0, tokens_per_s=0.0)


@dataclass
class FakeEngine:
    """Answers every call with `num_tokens` tokens drawn from the call's seed, the last one STOP_TOKEN."""

    version: int | None = None
    num_tokens: int = 5
    up: bool = True
    faults: list[Exception] = field(default_factory=list)
    """Raised one by one by the next `generate` calls."""
    may_answer: asyncio.Event = field(default_factory=asyncio.Event)
    """Cleared, it keeps calls in flight; tokens sampled before a swap keep their version."""
    may_swap: asyncio.Event = field(default_factory=asyncio.Event)
    """Cleared, it takes up no weights."""
    requests: list[tuple[GenerateCall, ...]] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    swaps: list[tuple[Path, int]] = field(default_factory=list)
    swap_fault: Exception | None = None
    swap_faults: list[Exception | None] = field(default_factory=list)
    """Of the next swaps, one by one."""
    introduction_fault: Exception | None = None
    canary_fault: Exception | None = None
    """Raised when the node asks for a proof of the weights."""
    canary_token: int = 3
    sampled_as: int | None = None
    """Version that such a proof names; unset: the served one."""
    probe: Probe = ()
    """What it answers to these prompts, when it has loaded its weights well."""
    num_wrong_loads: int = 0
    """After so many of the next swaps it holds other weights than it was given."""
    holds_wrong: bool = False
    wrong_rank: int | None = None
    """This rank alone does."""
    arithmetic: Arithmetic = Arithmetic.FLOAT32
    paused: list[PauseMode] = field(default_factory=list)
    """How the running calls fared at each swap."""
    changes: list[ChangedElements | None] = field(default_factory=list)
    """That each swap was told."""
    reported_load: EngineLoad | Exception = IDLE
    num_resumed: int = 0
    closed: bool = False
    slots: EngineSlots = field(default_factory=lambda: EngineSlots(1024))
    ranks: list[int] = field(default_factory=list)
    """Of each request."""

    def __post_init__(self) -> None:
        self.may_answer.set()
        self.may_swap.set()

    async def introduce(self) -> None:
        self._require_up()
        if self.introduction_fault is not None:
            raise self.introduction_fault

    async def generate(self, calls: Sequence[GenerateCall], *, rank: int = 0) -> list[Generation]:
        self._require_up()
        if calls[0].rid.startswith("canary-"):
            if self.canary_fault is not None:
                raise self.canary_fault
            version = self.version if self.sampled_as is None else self.sampled_as
            known = {answer.prompt_ids: answer for answer in self.probe}
            return [
                _greedy(call, version=version, token=self.canary_token)
                if call.prompt_ids not in known or self.holds_wrong or rank == self.wrong_rank
                else _known(known[call.prompt_ids], version=version or 0)
                for call in calls
            ]
        self.requests.append(tuple(calls))
        self.ranks.append(rank)
        if self.faults:
            raise self.faults.pop(0)
        started_under = self.version
        await asyncio.sleep(0)
        await self.may_answer.wait()
        self._require_up()
        return [self._sample(call, started_under=started_under) for call in calls]

    async def abort(self, rids: Sequence[str]) -> None:
        self.aborted += rids

    async def swap(
        self,
        *,
        model_dir: Path,
        version: int,
        running: PauseMode = PauseMode.IN_PLACE,
        changes: ChangedElements | None = None,
    ) -> None:
        self._require_up()
        self.paused.append(running)
        await self.may_swap.wait()
        self._require_up()
        fault = self.swap_faults.pop(0) if self.swap_faults else self.swap_fault
        if fault is not None:
            raise fault
        self.swaps.append((model_dir, version))
        self.changes.append(changes)
        self.version = version
        self.holds_wrong = self.num_wrong_loads > 0
        self.num_wrong_loads -= self.holds_wrong

    async def resume(self) -> None:
        self._require_up()
        self.num_resumed += 1

    async def served_version(self) -> int | None:
        self._require_up()
        return self.version

    async def load(self) -> EngineLoad:
        self._require_up()
        if isinstance(self.reported_load, Exception):
            raise self.reported_load
        return self.reported_load

    async def check_health(self) -> None:
        self._require_up()

    async def close(self) -> None:
        self.closed = True

    def _require_up(self) -> None:
        if not self.up:
            raise EngineUnavailable("the fake engine is down, as the test asked")

    def _sample(self, call: GenerateCall, *, started_under: int | None) -> Generation:
        rng = random.Random(f"{call.seed}/{call.prompt_ids}")
        length = min(self.num_tokens, call.max_new_tokens)
        stopped = length == self.num_tokens
        tokens = [rng.randrange(3, 300) for _ in range(length - stopped)] + [STOP_TOKEN] * stopped
        logprobs = tuple(-rng.random() for _ in tokens)
        spans = _spans(length, old=started_under or 0, new=self.version or 0)
        ended = "stop" if stopped else "length"
        return Generation(token_ids=tuple(tokens), logprobs=logprobs, spans=spans, finish_reason=ended)


@dataclass
class FakeAdapterServer(FakeEngine):
    """Answers under adapters too: `adapter_requests` says under which."""

    adapters: dict[str, Path] = field(default_factory=dict)
    adapter_requests: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)
    unloaded: list[str] = field(default_factory=list)

    async def generate(
        self, calls: Sequence[GenerateCall], *, rank: int = 0, adapter: str = ""
    ) -> list[Generation]:
        if adapter and adapter not in self.adapters:
            raise EngineRefused(f"adapter {adapter!r} is not loaded")
        self.adapter_requests.append((adapter, tuple(call.rid for call in calls)))
        return await super().generate(calls, rank=rank)

    async def load_adapter(self, name: str, folder: Path) -> None:
        self._require_up()
        if self.swap_fault is not None:
            raise self.swap_fault
        self.adapters[name] = folder

    async def unload_adapter(self, name: str) -> None:
        self._require_up()
        del self.adapters[name]
        self.unloaded.append(name)


def _greedy(call: GenerateCall, *, version: int | None, token: int) -> Generation:
    length = call.max_new_tokens
    spans = (VersionSpan(0, length, version or 0),)
    return Generation(
        token_ids=(token,) * length, logprobs=(-1.0,) * length, spans=spans, finish_reason="length"
    )


def _known(answer: ProbeAnswer, *, version: int) -> Generation:
    spans = (VersionSpan(0, len(answer.token_ids), version),)
    return Generation(
        token_ids=answer.token_ids, logprobs=answer.logprobs, spans=spans, finish_reason="length"
    )


def _spans(length: int, *, old: int, new: int) -> tuple[VersionSpan, ...]:
    """One span, or two that meet in the middle when a swap came between."""
    middle = length // 2
    if old == new or not middle:
        return (VersionSpan(0, length, new),)
    return (VersionSpan(0, middle, old), VersionSpan(middle, length, new))
