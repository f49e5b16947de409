"""What a workflow holds: bounded calls, own seeds, repetition of lost calls, and nothing cut short by chance."""

from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from astraflow.errors import InvalidArgumentError
from astraflow.plugins import Message, VersionSpan
from astraflow_raas.engine.base import GenerateCall, Generation
from astraflow_raas.policies.served_policy import ServedPolicy
from astraflow_raas.work.policy_handle import PolicyHandle
from support.fake_engine import FakeEngine
from support.raas_parts import SAMPLING, leased, served_policy


class Aborting(FakeEngine):
    """Gives the first call up after two tokens, as an engine does whose operator aborts everything."""

    async def generate(self, calls: Sequence[GenerateCall], *, rank: int = 0) -> list[Generation]:
        if not self.requests:
            self.requests.append(tuple(calls))
            spans = (VersionSpan(0, 2, 0),)
            return [Generation(token_ids=(7, 8), logprobs=(-1.0, -1.0), spans=spans, finish_reason="abort")]
        return await super().generate(calls)


@pytest.fixture
def engine() -> Aborting:
    return Aborting()


@pytest.fixture
async def policy(tmp_path: Path, engine: Aborting) -> AsyncIterator[ServedPolicy]:
    policy = await served_policy(tmp_path, engine)
    yield policy
    await policy.close()


def handle_of(policy: ServedPolicy) -> PolicyHandle:
    sampling = {"sampler": policy, "lease": leased(), "batch_key": lambda _max_new_tokens: "all"}
    return PolicyHandle("solver", member=0, episode_id="e0", **sampling)


async def test_a_call_the_engine_gave_up_is_made_again_in_full(
    policy: ServedPolicy, engine: Aborting
) -> None:
    result = await handle_of(policy).generate([1, 2])
    assert result.finish_reason == "stop"
    assert len(result.token_ids) == 5
    first, second = (request[0] for request in engine.requests)
    assert (first.seed, first.prompt_ids) == (second.seed, second.prompt_ids)
    assert first.rid != second.rid


async def test_each_call_of_an_episode_has_its_own_seed_and_id(
    policy: ServedPolicy, engine: Aborting
) -> None:
    handle = handle_of(policy)
    await handle.generate([1])
    await handle.generate([1])
    calls = [request[0] for request in engine.requests[1:]]
    assert len({call.seed for call in calls}) == 2
    assert len({call.rid.partition(";")[0] for call in calls}) == 2


@pytest.mark.parametrize(("prompt", "limit"), [([], None), ([1], 0), ([1], SAMPLING.max_new_tokens + 1)])
async def test_calls_outside_the_recipes_bounds_are_refused(
    policy: ServedPolicy, prompt: list[int], limit: int | None
) -> None:
    with pytest.raises(InvalidArgumentError, match="max_new_tokens"):
        await handle_of(policy).generate(prompt, max_new_tokens=limit)


async def test_a_call_may_ask_for_less_than_the_recipe_allows(policy: ServedPolicy) -> None:
    result = await handle_of(policy).generate([1], max_new_tokens=3)
    assert (len(result.token_ids), result.finish_reason) == (3, "length")


async def test_text_and_ids_come_from_the_policys_own_tokenizer(policy: ServedPolicy) -> None:
    handle = handle_of(policy)
    ids = handle.encode([Message("user", "3 + 4?")])
    assert ids == list(policy.tokenizer.encode((Message("user", "3 + 4?"),)))
    assert "3 + 4?" in handle.decode(ids)
