"""Proof that an engine samples with the weights it was given, asked for after every update before anybody trusts it.

Invariant: an engine whose proof fails is mended or replaced; one that only could not be asked keeps its calls, and
whoever watches its health decides. `weight_sync` takes any `Canary`; `compare_answers` is the product's, and falls back
to what needs to know nothing of the weights where the version or the engine's arithmetic allows no comparison.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol
from uuid import uuid4

from astraflow_kit.log import get_logger
from astraflow_raas.engine.base import (
    ABORTED,
    Arithmetic,
    Engine,
    EngineDoubtful,
    EngineFaulty,
    EngineRefused,
    EngineUnavailable,
    GenerateCall,
    Generation,
)
from astraflow_raas.policies.served_policy import ServedPolicy
from astraflow_weights.versions.probe import Probe, ProbeAnswer

log = get_logger(__name__)

_NUM_TOKENS = 4
_PATIENCE_S = 60.0
"""An engine that is slower than this counts as one that could not be asked."""


class WeightsDiffer(EngineDoubtful):
    """The engine answers otherwise than the weights it was given."""

    reason = "WEIGHTS_DIFFER"


class Canary(Protocol):
    """Asks an engine for something whose answer is known."""

    async def __call__(
        self, engine: Engine, policy: ServedPolicy, *, version: int, probe: Probe | None
    ) -> bool:
        """Whether the engine could be asked. Raises EngineDoubtful when the answer is not that of `version`, of which
        `probe` says what it is, where that is known.
        """


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """How far log-probs (nats) may lie from those of the trainer's float32."""

    each: float
    mean: float
    tie: float
    """Up to this margin the second most likely token may come first."""


TOLERANCES = {
    # Measured against float32: 2.4e-5 at most for float32 engines on a CPU; a GPU may round the factors of its products
    # to TF32, which was off by 9.7e-3 at most and 4.9e-3 in the mean (12 random layers); bfloat16 by 0.30 at most, and
    # by 0.053 in the mean. Wide, because a false alarm costs an engine: other weights are off by whole nats.
    Arithmetic.FLOAT32: Tolerance(each=0.1, mean=0.03, tie=0.1),
    Arithmetic.HALF: Tolerance(each=1.0, mean=0.3, tie=0.6),
}
"""None for quantised engines: how far they are off depends on model and method."""


async def compare_answers(engine: Engine, policy: ServedPolicy, *, version: int, probe: Probe | None) -> bool:
    """Greedy tokens and log-probs against those that were published with the version. A `Canary`."""
    tolerance = TOLERANCES.get(engine.arithmetic)
    if probe is None or tolerance is None:
        return await sample_a_little(engine, policy, version=version)
    ranks = range(engine.slots.num_ranks)
    found = await asyncio.gather(
        *(_compare_rank(engine, policy, rank, probe, version=version, tolerance=tolerance) for rank in ranks),
        return_exceptions=True,
    )
    for each in found:
        if isinstance(each, BaseException):
            raise each
    return all(found)


async def _compare_rank(
    engine: Engine, policy: ServedPolicy, rank: int, probe: Probe, *, version: int, tolerance: Tolerance
) -> bool:
    # One after the other: a place of each rank is kept free for probes, and more would wait behind long answers.
    pending = list(probe)
    while pending:
        answer = pending.pop()
        call = _greedy(answer.prompt_ids, num_tokens=len(answer.token_ids), version=version)
        generation = await _ask(engine, policy, call, version=version, rank=rank)
        if generation is None:
            return False
        complaint = difference(answer, generation, tolerance=tolerance)
        if complaint:
            raise WeightsDiffer(
                f"the engine (data-parallel rank {rank}) says that it serves version {version} and does not answer as "
                f"its weights do: {complaint}"
            )
        settled = _num_settled(answer, generation)
        if settled < len(answer.token_ids):
            pending.append(answer.after(settled))
    return True


async def sample_a_little(engine: Engine, policy: ServedPolicy, *, version: int) -> bool:
    """A few greedy tokens: finite log-probs, known ids, no more than asked for, all under `version`."""
    call = _greedy((0,), num_tokens=_NUM_TOKENS, version=version)
    return await _ask(engine, policy, call, version=version) is not None


def difference(answer: ProbeAnswer, generation: Generation, *, tolerance: Tolerance) -> str:
    """What sets a generation apart from the answer that was published; empty when rounding explains it.

    Compares up to the first token that rounding may have exchanged for the second most likely one, and up to an end of
    text, which the published answer knows nothing of.
    """
    num_tokens, num_given = len(answer.token_ids), len(generation.token_ids)
    if not num_given or (num_given < num_tokens and generation.finish_reason != "stop"):
        return f"{num_given} tokens of {num_tokens}, ended by {generation.finish_reason!r}"
    off: list[float] = []
    expected = zip(answer.token_ids, answer.logprobs, answer.margins, strict=True)
    sampled = zip(generation.token_ids, generation.logprobs, strict=True)
    for index, ((token, logprob, margin), (given, given_logprob)) in enumerate(
        zip(expected, sampled, strict=False)
    ):
        if given == token:
            off.append(abs(given_logprob - logprob))
            continue
        if margin > tolerance.tie:
            return (
                f"token {index} is {given}, expected {token}, which is more likely than any other by {margin:.3g} "
                f"(tolerance {tolerance.tie:g})"
            )
        off.append(abs(given_logprob - (logprob - margin)))
        break
    return _too_far_off(off, tolerance=tolerance)


def _num_settled(answer: ProbeAnswer, generation: Generation) -> int:
    """Tokens up to the first tie; all of them when there is none, or when the text ended."""
    pairs = zip(answer.token_ids, generation.token_ids, strict=False)
    ties = (index + 1 for index, (expected, given) in enumerate(pairs) if given != expected)
    return next(ties, len(answer.token_ids))


def _too_far_off(off: Sequence[float], *, tolerance: Tolerance) -> str:
    farthest, mean = max(off), sum(off) / len(off)
    if farthest > tolerance.each:
        return f"the log-prob of token {off.index(farthest)} is off by {farthest:.3g}, tolerance {tolerance.each:g}"
    if mean > tolerance.mean:
        return f"the log-probs of {len(off)} tokens are off by {mean:.3g} in the mean, tolerance {tolerance.mean:g}"
    return ""


def _greedy(prompt_ids: tuple[int, ...], *, num_tokens: int, version: int) -> GenerateCall:
    return GenerateCall(
        rid=f"canary-{version}-{uuid4().hex};",
        prompt_ids=prompt_ids,
        max_new_tokens=num_tokens,
        temperature=0.0,
        top_p=1.0,
        top_k=0,
        seed=0,
    )


async def _ask(
    engine: Engine, policy: ServedPolicy, call: GenerateCall, *, version: int, rank: int = 0
) -> Generation | None:
    """The answer; None when there was none. Raises EngineDoubtful for one that nobody could train on."""
    try:
        async with asyncio.timeout(_PATIENCE_S):
            (generation,) = await engine.generate([call], rank=rank)
        policy.check(call, generation)
    except (EngineUnavailable, TimeoutError) as error:
        log.warning("engine.canary_unanswered", version=version, message=str(error))
        return None
    except (EngineFaulty, EngineRefused) as error:
        raise EngineDoubtful(f"after the update to version {version}: {error.message}") from error
    if generation.finish_reason == ABORTED:
        log.warning("engine.canary_unanswered", version=version, message="the engine gave the call up")
        return None
    versions = {span.version for span in generation.spans}
    if versions != {version}:
        raise EngineDoubtful(
            f"after the update to version {version} the engine samples as {sorted(versions)}"
        )
    return generation
