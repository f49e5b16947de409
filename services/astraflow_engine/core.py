"""The engine without threads or HTTP: requests in, completions out, weights swapped between passes.

Invariant: every submitted request is returned exactly once as a `Completion`, whatever happens to weights
and pauses meanwhile; every token carries the version it was drawn under; a swap changes weights, version
label and prefix reuse together or not at all. Nothing here blocks: `worker.py` calls it in a loop on the
scheduler thread, tests call it step by step.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass

from astraflow_engine.adapters import Adapter
from astraflow_engine.errors import CacheInUse, InvalidRequest
from astraflow_engine.model_config import ModelConfig
from astraflow_engine.requests import Completion, Finish, FinishKind, GenerateRequest, PauseMode
from astraflow_engine.runner import Draw, ModelRunner
from astraflow_engine.sampling import derive_seed
from astraflow_engine.scheduler import AdmissionLimits, Sequence, SlotScheduler
from astraflow_engine.weights import Weights
from astraflow_kit import failpoints
from astraflow_kit.clock import Clock

_THROUGHPUT_WINDOW_S = 1.0
_MAX_ADAPTERS = 128
_ABORTED = Finish(kind=FinishKind.ABORT, message="Aborted")
_ABORTED_WAITING = Finish(kind=FinishKind.ABORT, message="Abort in waiting queue")
_NOT_FINITE = Finish(
    kind=FinishKind.ABORT,
    message="the served weights gave a log-prob that is not finite; publish sound weights and send it again",
    faulty=True,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreLimits:
    """Sizes of one engine. `capacity` bounds prompt plus generated tokens of a request."""

    num_slots: int
    capacity: int
    admission: AdmissionLimits
    pass_tokens: int = 1024
    """Tokens of one prefill pass, padding included: bounds its temporaries and the time until the next
    swap."""

    def cache_bytes(self, config: ModelConfig) -> int:
        """Bytes of the cache when every slot is full."""
        token_bytes = 2 * 4 * config.num_layers * config.num_kv_heads * config.head_dim
        return token_bytes * self.num_slots * (self.capacity + 1)


@dataclass(kw_only=True)
class Totals:
    """What the engine has done since it started."""

    num_generated_tokens: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_completions: int = 0
    num_swaps: int = 0
    num_passes: int = 0


@dataclass(kw_only=True)
class CoreStats(Totals):
    """What the engine is doing now, and has done since it started."""

    num_running: int
    num_waiting: int
    num_slots: int
    num_used_tokens: int
    """Tokens whose keys and values are held for running sequences."""
    paused: bool
    weight_version: str
    tokens_per_s: float


class EngineCore:
    """One model being served. Not thread-safe; call under `torch.inference_mode`."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        *,
        limits: CoreLimits,
        seed: int,
        version: str,
        clock: Clock,
    ) -> None:
        self._eos_token_ids = config.eos_token_ids
        self._scheduler = SlotScheduler(num_slots=limits.num_slots, limits=limits.admission)
        self._runner = ModelRunner(
            config,
            weights,
            num_slots=limits.num_slots,
            capacity=limits.capacity,
            pass_tokens=limits.pass_tokens,
        )
        self._num_slots = limits.num_slots
        self._seed = seed
        self._version = version
        self._clock = clock
        self._adapters: dict[str, Adapter] = {}
        self.paused = False
        self._num_submitted = 0
        self._totals = Totals()
        self._rate = _TokenRate(clock)

    @property
    def has_work(self) -> bool:
        """Whether `step` would do anything."""
        return not self.paused and (self._scheduler.num_waiting > 0 or self._scheduler.num_running > 0)

    @property
    def num_live(self) -> int:
        """Requests accepted and not yet returned."""
        return self._scheduler.num_running + self._scheduler.num_waiting

    def submit(self, request: GenerateRequest) -> None:
        """Accept a request. Raises QueueFull, or InvalidRequest when its rid is in progress, or its adapter
        not loaded."""
        self._num_submitted += 1
        chosen = request.params.sampling_seed
        # A chosen seed makes the request repeatable; otherwise the order of arrival decides.
        origin = (1, chosen) if chosen is not None else (0, self._num_submitted)
        seed = derive_seed(self._seed, *origin, request.sample_index)
        adapter = self._adapter(request.adapter) if request.adapter else None
        self._scheduler.submit(
            Sequence(request=request, seed=seed, arrived_s=self._clock.monotonic_s(), adapter=adapter)
        )

    def step(self) -> list[Completion]:
        """Let waiting requests in, and advance the running ones by one token unless all that entered have drawn theirs;
        returns those that ended.
        """
        if self.paused:
            return []
        admitted = self._scheduler.admit()
        completions, all_drawn = self._enter(admitted) if admitted else ([], False)
        # Never a step later: what a row holds and its first token are of the same weights.
        if self._scheduler.num_running and not all_drawn:
            completions += self._decode()
        return completions

    def abort(self, matches: Callable[[GenerateRequest], bool]) -> list[Completion]:
        """End every matching request now, with what it has."""
        completions = []
        for slot, sequence in self._scheduler.remove(matches):
            if slot is not None:
                self._runner.leave(slot, sequence)
            # A retracted request waits with tokens: it did run.
            finish = _ABORTED if slot is not None or sequence.tokens else _ABORTED_WAITING
            completions.append(self._completion(sequence, finish))
        return completions

    def pause(self, mode: PauseMode) -> list[Completion]:
        """Stop drawing tokens until `resume`; new requests are accepted and wait. Pausing twice is
        allowed."""
        self.paused = True
        if mode is PauseMode.ABORT:
            return self.abort(lambda request: True)
        if mode is PauseMode.RETRACT:
            for slot, sequence in self._scheduler.retract_all():
                self._runner.leave(slot, sequence)
        return []

    def resume(self) -> None:
        """Draw tokens again. Does nothing when the engine is not paused."""
        self.paused = False

    def swap(self, weights: Weights, *, version: str, flush_cache: bool) -> None:
        """Serve `weights` from the next pass on; tokens drawn before keep the old version's name.

        Prefix reuse ends at every swap. `flush_cache` asks, as SGLang does, that no keys and values survive
        at all: raises CacheInUse when the engine is paused with live requests, and changes nothing then.
        """
        if flush_cache and self.paused:
            self._refuse_when_live("flush_cache: true")
        failpoints.hit("engine.before_swap")
        for sequence in self._scheduler.live():
            sequence.note_version_end(self._version)
        for _, sequence in self._scheduler.running():
            sequence.uniform_kv = False
        self._runner.replace_weights(weights)
        self._version = version
        self._totals.num_swaps += 1

    def load_adapter(self, name: str, adapter: Adapter) -> dict[str, str]:
        """Let requests name `adapter` from now on; names and folders of those that are loaded then.

        Raises InvalidRequest for a name that is taken.
        """
        if name in self._adapters:
            raise InvalidRequest(f"adapter {name!r} is loaded; unload it first, or choose another name")
        if len(self._adapters) >= _MAX_ADAPTERS:
            raise InvalidRequest(
                f"{_MAX_ADAPTERS} adapters are loaded, the most there may be; unload one first"
            )
        self._adapters[name] = adapter
        return self._loaded_adapters()

    def unload_adapter(self, name: str) -> dict[str, str]:
        """Let no request name it any more; those that do already end with it. Returns, raises as `load_adapter`."""
        self._adapter(name)
        del self._adapters[name]
        return self._loaded_adapters()

    def _loaded_adapters(self) -> dict[str, str]:
        return {name: str(adapter.path) for name, adapter in self._adapters.items()}

    def flush(self) -> None:
        """Forget every reusable prefix. Raises CacheInUse while requests are live."""
        self._refuse_when_live("a cache flush")
        self._runner.flush_prefixes()

    def stats(self) -> CoreStats:
        """A snapshot for operators."""
        return CoreStats(
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting,
            num_slots=self._num_slots,
            num_used_tokens=sum(
                len(sequence.request.prompt) + len(sequence.tokens)
                for _, sequence in self._scheduler.running()
            ),
            paused=self.paused,
            weight_version=self._version,
            tokens_per_s=self._rate.tokens_per_s if self.has_work else 0.0,
            **asdict(self._totals),
        )

    def _enter(self, admitted: list[Sequence]) -> tuple[list[Completion], bool]:
        """Those that ended with their first token, and whether all have drawn one."""
        entered, draws = self._runner.enter(admitted, free_slots=self._scheduler.free_slots())
        for slot, sequence in entered.items():
            self._scheduler.place(sequence, slot=slot)
            if not sequence.tokens:
                self._totals.num_prompt_tokens += len(sequence.request.prompt)
                self._totals.num_cached_tokens += sequence.cached_tokens
        ended = self._record((entered[draw.slot], draw) for draw in draws) if draws else []
        return ended, len(draws) == len(entered)

    def _decode(self) -> list[Completion]:
        failpoints.hit("engine.decode_step")
        for source, target in self._scheduler.exchanges():
            self._runner.exchange(source, target)
        running = list(self._scheduler.running())
        draws = self._runner.decode([slot for slot, _ in running])
        return self._record(zip((sequence for _, sequence in running), draws, strict=True))

    def _record(self, drawn: Iterable[tuple[Sequence, Draw]]) -> list[Completion]:
        completions = []
        num_drawn = 0
        for sequence, draw in drawn:
            num_drawn += 1
            finish = self._take_token(sequence, draw)
            if finish is not None:
                self._scheduler.finish(draw.slot)
                if finish.faulty:
                    self._runner.discard(draw.slot)
                else:
                    self._runner.leave(draw.slot, sequence)
                completions.append(self._completion(sequence, finish))
        self._totals.num_passes += 1
        self._totals.num_generated_tokens += num_drawn
        self._rate.count(num_drawn)
        return completions

    def _take_token(self, sequence: Sequence, draw: Draw) -> Finish | None:
        if not math.isfinite(draw.logprob):
            return _NOT_FINITE
        sequence.tokens.append(draw.token)
        sequence.logprobs.append(draw.logprob)
        return sequence.finish_after_last_token(self._eos_token_ids)

    def _adapter(self, name: str) -> Adapter:
        if name not in self._adapters:
            raise InvalidRequest(
                f"adapter {name!r} is not loaded, loaded are: {', '.join(self._adapters) or 'none'}; "
                "POST /load_lora_adapter loads one"
            )
        return self._adapters[name]

    def _completion(self, sequence: Sequence, finish: Finish) -> Completion:
        self._totals.num_completions += 1
        return sequence.complete(finish, version=self._version, now_s=self._clock.monotonic_s())

    def _refuse_when_live(self, what: str) -> None:
        if self.num_live:
            raise CacheInUse(
                f"{what} needs an idle engine, {self._scheduler.num_running} requests are running and "
                f"{self._scheduler.num_waiting} waiting; send flush_cache: false (prefixes are flushed at "
                "every swap anyway), or pause with mode abort first"
            )


class _TokenRate:
    """Tokens per second of the last full window."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._window_started_s = clock.monotonic_s()
        self._window_tokens = 0
        self.tokens_per_s = 0.0

    def count(self, num_drawn: int) -> None:
        """A pass drew so many tokens."""
        self._window_tokens += num_drawn
        elapsed_s = self._clock.monotonic_s() - self._window_started_s
        if elapsed_s >= _THROUGHPUT_WINDOW_S:
            self.tokens_per_s = self._window_tokens / elapsed_s
            self._window_started_s += elapsed_s
            self._window_tokens = 0
