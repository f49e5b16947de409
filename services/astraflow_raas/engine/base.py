"""What a node asks of an inference engine, and the errors it answers with.

Invariant: a `Generation` accounts for every sampled token: one log-prob each, and version spans that cover
all of them; an engine that cannot say so raises instead. `http` speaks SGLang's API; the rest
of the node knows only this module.

    RetryableError  EngineUnavailable  the engine is gone, starting or overloaded; nothing was sampled
                    EngineHung         it is there and gave no whole answer in time
    StateError      EngineDown         there was no engine for so long that nobody should wait for it
    RequestError    EngineRefused      the engine will never accept this call
    AstraflowError  EngineFaulty       the answer contradicts itself or the contract
                    EngineDoubtful     nobody knows with which weights it samples: it must be replaced
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol, runtime_checkable

from astraflow.errors import AstraflowError, RequestError, StateError, UnavailableError
from astraflow.plugins import VersionSpan
from astraflow_raas.engine.slots import EngineSlots
from astraflow_weights.mirror.changes import ChangedElements


class EngineUnavailable(UnavailableError):
    """The engine does not answer, is starting, or is full. The same call may succeed later."""


class EngineHung(EngineUnavailable):
    """The engine took the request, or the connection, and gave no whole answer in time."""


class EngineDown(StateError):
    """A policy has had no engine for too long; others of the node go on without it."""

    reason, code = "ENGINE_DOWN", "FAILED_PRECONDITION"


class EngineRefused(RequestError):
    """The engine refuses the call as written."""

    reason, code = "ENGINE_REFUSED", "INVALID_ARGUMENT"


class EngineFaulty(AstraflowError):
    """The engine answered with something that cannot be trained on."""

    reason, code = "ENGINE_FAULTY", "INTERNAL"


class EngineDoubtful(EngineFaulty):
    """What the engine computes with is not known any more, or it cannot go on. Only another one, or the same after
    a whole update, may be used."""

    reason = "ENGINE_DOUBTFUL"


class Arithmetic(StrEnum):
    """How an engine computes, which decides how close its log-probs come to the trainer's float32."""

    FLOAT32 = "float32"
    HALF = "half"
    """bfloat16 or float16."""
    QUANTIZED = "quantized"
    """Weights, activations, or keys and values in fewer bits."""


class PauseMode(StrEnum):
    """What becomes of running calls when weights are swapped, in SGLang's words."""

    IN_PLACE = "in_place"
    """They go on with the keys and values that they have."""
    RETRACT = "retract"
    """They keep their tokens, whose keys and values are computed anew with the new weights."""
    ABORT = "abort"
    """They end with the reason ABORTED, and what they sampled is dropped."""


ABORTED = "abort"
"""Finish reason of a call that the engine gave up; its tokens are cut short by chance and never trained on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateCall:
    """One sequence to sample. `rid` is unique; `temperature` 0 is greedy; `top_k` 0 keeps all candidates."""

    rid: str
    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    temperature: float
    top_p: float
    top_k: int
    seed: int
    stop_token_ids: tuple[int, ...] = ()
    records_experts: bool = False
    """Whether the answer is to say which experts each token went to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """A sampled continuation. `spans` count from its first token, ascend, touch and cover all of it."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    spans: tuple[VersionSpan, ...]
    finish_reason: str
    experts: bytes = b""
    """int32[P + N − 1, layers, k]: the experts of each of the P tokens of the prompt and N of the answer but the last,
    which no layer has seen. Empty where the call did not ask for them.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """How busy an engine is at this moment."""

    running: float
    """Sequences being sampled."""
    waiting: float
    """Sequences that wait for a place in it."""
    kv_usage: float | None
    """Share in use of the memory for keys and values, from 0 to 1; None when it is not known."""
    tokens_per_s: float


class Engine(Protocol):
    """One inference engine serving one policy. Every call has a deadline of its own."""

    slots: EngineSlots
    """Its places; whoever calls `generate` takes one per call first, in one rank."""
    arithmetic: Arithmetic
    """How it computes."""

    async def introduce(self) -> None:
        """Ask the engine what it is: `slots` and `arithmetic` are its own then. Raises EngineUnavailable, and
        EngineUnsuitable when no node can use it."""

    async def generate(self, calls: Sequence[GenerateCall], *, rank: int = 0) -> list[Generation]:
        """Sample all `calls` in one request, in their order; may span a weight swap. Never repeated inside.

        Raises EngineUnavailable, EngineRefused, EngineFaulty.
        """

    async def abort(self, rids: Sequence[str]) -> None:
        """Stop sampling these calls where they still run; unknown ids are fine."""

    async def swap(
        self,
        *,
        model_dir: Path,
        version: int,
        running: PauseMode = PauseMode.IN_PLACE,
        changes: ChangedElements | None = None,
    ) -> None:
        """Load `model_dir` as `version` between two decode steps; `running` says what becomes of running calls.

        `changes` are what differs from another version: an engine that serves that one may load only those.

        Prefixes computed under older weights are not reused for new calls. Returns once the engine says that it
        serves `version` and goes on. Raises EngineDoubtful when the engine must not be used any more; after any
        other error the old weights serve.
        """

    async def resume(self) -> None:
        """Sample again when somebody paused the engine; harmless otherwise, and repeated until the engine has
        acknowledged it. Raises EngineUnavailable."""

    async def served_version(self) -> int | None:
        """Version the engine serves, None when it was started without one. Raises EngineUnavailable."""

    async def load(self) -> EngineLoad:
        """How busy it says it is. Raises EngineUnavailable, EngineRefused, EngineFaulty when it does not say."""

    async def check_health(self) -> None:
        """Return when the engine proves that it can sample. Raises EngineUnavailable."""

    async def close(self) -> None:
        """Release connections; the engine itself goes on."""


@runtime_checkable
class AdapterServer(Engine, Protocol):
    """An engine that also samples under LoRA adapters of its model, any number of them at once."""

    async def generate(
        self, calls: Sequence[GenerateCall], *, rank: int = 0, adapter: str = ""
    ) -> list[Generation]:
        """As of any engine, under the adapter of this name; spans say the versions of the model."""

    async def load_adapter(self, name: str, folder: Path) -> None:
        """Load an adapter while the engine serves. Raises EngineUnavailable, EngineRefused, EngineFaulty."""

    async def unload_adapter(self, name: str) -> None:
        """Forget an adapter that no call names any more. Raises as `load_adapter` does."""
