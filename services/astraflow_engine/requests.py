"""What a caller asks for and what it gets back: plain frozen values, no torch, no HTTP.

Invariant: a `GenerateRequest` that exists is valid for the served model (the HTTP edge has checked every
bound), and a `Completion` accounts for every token it holds: one log-prob each, and version spans that
cover them all. Made by `api.py` and `scheduler.py`; read by everything in between.
"""

from dataclasses import dataclass
from enum import Enum


class PauseMode(Enum):
    """What a pause does to the requests in slots."""

    ABORT = "abort"
    """They end now, with what they have."""
    RETRACT = "retract"
    """They go back to the queue; their keys and values are recomputed from prompt and generated tokens."""
    IN_PLACE = "in_place"
    """They keep slot, keys and values, and go on where they stopped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to draw and when to stop. `temperature` 0 is greedy; `top_k` -1 keeps the whole vocabulary."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    sampling_seed: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One sequence to generate."""

    rid: str
    prompt: tuple[int, ...]
    params: SamplingParams
    sample_index: int = 0
    """Which of the n samples of one prompt this is; part of its seed."""
    batch_rid: str = ""
    """The rid the client gave when it stands for several sequences; an abort by it means all of them."""
    adapter: str = ""
    """Name of a loaded adapter; empty is the plain model."""
    cache_space: str = ""
    """Keys and values are reused only between requests of one space."""


class FinishKind(Enum):
    """Why a sequence ended, in SGLang's words."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """`matched_token` belongs to STOP, `message` to ABORT; `faulty` marks an abort the engine is to blame
    for."""

    kind: FinishKind
    matched_token: int | None = None
    message: str = ""
    faulty: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan:
    """Generated tokens [start, end), counted from the first generated one, drawn under one weight version."""

    version: str
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A finished sequence. `cached_tokens` counts prompt tokens whose keys and values were reused."""

    request: GenerateRequest
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    spans: tuple[VersionSpan, ...]
    finish: Finish
    cached_tokens: int
    num_retractions: int
    latency_s: float
