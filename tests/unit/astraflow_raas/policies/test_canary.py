"""Rounding passes, other weights do not; and whatever cannot be compared is only looked at."""

import re
from dataclasses import replace

import pytest

from astraflow.plugins import VersionSpan
from astraflow_raas.engine.base import ABORTED, Arithmetic, Generation
from astraflow_raas.engine.slots import EngineSlots
from astraflow_raas.policies import canary
from astraflow_raas.policies.canary import TOLERANCES, WeightsDiffer, compare_answers, difference
from astraflow_raas.policies.served_policy import ServedPolicy
from astraflow_weights.versions.probe import ProbeAnswer
from support.fake_engine import FakeEngine

ANSWER = ProbeAnswer(
    prompt_ids=(5, 6), token_ids=(11, 12, 13), logprobs=(-0.5, -1.0, -0.25), margins=(3.0, 0.004, 2.0)
)
EXACT, HALF = TOLERANCES[Arithmetic.FLOAT32], TOLERANCES[Arithmetic.HALF]


def answered(
    token_ids: tuple[int, ...] = ANSWER.token_ids,
    logprobs: tuple[float, ...] = ANSWER.logprobs,
    finish_reason: str = "length",
) -> Generation:
    spans = (VersionSpan(0, len(token_ids), 4),)
    return Generation(token_ids=token_ids, logprobs=logprobs, spans=spans, finish_reason=finish_reason)


@pytest.mark.parametrize(
    ("generation", "tolerance"),
    [
        pytest.param(answered(), EXACT, id="equal"),
        pytest.param(answered(logprobs=(-0.50002, -1.00001, -0.25)), EXACT, id="rounding of float32"),
        pytest.param(answered(logprobs=(-0.51, -1.005, -0.26)), EXACT, id="rounding of TF32"),
        pytest.param(answered(logprobs=(-0.8, -1.05, -0.24)), HALF, id="rounding of bfloat16"),
        pytest.param(
            answered((11, 77, 99), (-0.5, -1.004, -9.0)), EXACT, id="a tie, behind which another text follows"
        ),
        pytest.param(answered((11,), (-0.5,), "stop"), EXACT, id="an end of text"),
    ],
)
def test_what_rounding_explains_is_no_difference(generation: Generation, tolerance: canary.Tolerance) -> None:
    assert difference(ANSWER, generation, tolerance=tolerance) == ""


@pytest.mark.parametrize(
    ("generation", "tolerance", "words"),
    [
        (answered((10, 12, 13)), EXACT, "token 0 is 10, expected 11, .* by 3 "),
        (answered((10, 12, 13)), HALF, "token 0 is 10, expected 11, "),
        (answered((11, 77, 13), (-0.5, -1.5, -0.25)), EXACT, "log-prob of token 1 is off by 0.496"),
        (answered(logprobs=(-0.5, -1.0, -0.4)), EXACT, "log-prob of token 2 is off by 0.15"),
        (answered(logprobs=(-0.55, -1.05, -0.3)), EXACT, "3 tokens are off by 0.05 in the mean"),
        (answered(logprobs=(-0.9, -1.4, -0.65)), HALF, "3 tokens are off by 0.4 in the mean"),
        (answered((11,), (-0.5,)), EXACT, "1 tokens of 3, ended by 'length'"),
    ],
)
def test_other_weights_are_told_from_rounding(
    generation: Generation, tolerance: canary.Tolerance, words: str
) -> None:
    assert re.search(words, difference(ANSWER, generation, tolerance=tolerance))


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(version=4, probe=(ANSWER, replace(ANSWER, prompt_ids=(7,))))


async def compare(engine: FakeEngine) -> bool:
    policy = ServedPolicy("solver")
    probe = (ANSWER, replace(ANSWER, prompt_ids=(7,)))
    try:
        return await compare_answers(engine, policy, version=4, probe=probe)
    finally:
        await policy.close()


async def test_an_engine_proves_itself_by_every_answer(engine: FakeEngine) -> None:
    assert await compare(engine)
    engine.probe = engine.probe[:1]
    with pytest.raises(WeightsDiffer, match="serves version 4 and does not answer as"):
        await compare(engine)


async def test_what_follows_a_tie_is_asked_for_behind_the_expected_token(engine: FakeEngine) -> None:
    tied = replace(ANSWER, token_ids=(11, 77, 99), logprobs=(-0.5, -1.004, -9.0))
    engine.probe = (
        tied,
        replace(tied, prompt_ids=(7,)),
        ANSWER.after(2),
        replace(ANSWER, prompt_ids=(7,)).after(2),
    )
    assert await compare(engine)
    engine.probe = engine.probe[:3]
    with pytest.raises(WeightsDiffer, match="token 0 is 3, expected 13"):
        await compare(engine)


async def test_every_data_parallel_rank_is_asked(engine: FakeEngine) -> None:
    engine.slots = EngineSlots(4, num_ranks=2)
    assert await compare(engine)
    engine.wrong_rank = 1
    with pytest.raises(WeightsDiffer, match="rank 1"):
        await compare(engine)


async def test_a_quantised_engine_is_not_compared(engine: FakeEngine) -> None:
    engine.arithmetic, engine.holds_wrong = Arithmetic.QUANTIZED, True
    assert await compare(engine)


async def test_an_engine_that_hangs_or_gives_up_was_not_asked(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.canary_fault = TimeoutError()
    assert not await compare(engine)
    given_up = answered((), (), ABORTED)
    monkeypatch.setattr(engine, "generate", lambda _, rank: _resolved([given_up]))
    assert not await compare(engine)


async def _resolved(generations: list[Generation]) -> list[Generation]:
    return generations
