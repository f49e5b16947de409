"""What a workflow holds: bounded calls, own seeds, repetition of lost calls, and nothing cut short by chance."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from astraflow.errors import InvalidArgumentError
from astraflow.plugins import Message, PolicyUnavailable, VersionSpan
from astraflow.recipe import ResolvedRole
from astraflow_raas.engine.base import GenerateCall, Generation
from astraflow_raas.policies.served_policy import ServedPolicy
from astraflow_raas.policies.tokenizer import load_tokenizer
from astraflow_raas.work.policy_handle import PolicyHandle
from support.fake_engine import FakeEngine
from support.raas_parts import SAMPLING, SOLVER, leased, served_policy, write_tokenizer


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
async def handle(tmp_path: Path, engine: Aborting) -> AsyncIterator[PolicyHandle]:
    policy = await served_policy(tmp_path, engine)
    sampling = {"sampler": policy, "lease": leased(), "batch_key": lambda _max_new_tokens: "all"}
    yield PolicyHandle(SOLVER, member=0, episode_id="e0", **sampling)
    await policy.close()


@pytest.mark.parametrize(
    ("role", "uncredited", "wanted"),
    [
        (SOLVER, [], True),
        (SOLVER, ["critic"], True),
        (SOLVER, ["solver"], False),
        (replace(SOLVER, is_trained=False), [], False),
    ],
)
def test_a_trajectory_is_wanted_of_roles_that_are_trained_and_have_credit(
    role: ResolvedRole, uncredited: list[str], wanted: bool
) -> None:
    lease, sampler = leased(), Mock()
    lease.uncredited_roles.extend(uncredited)
    handle = PolicyHandle(role, sampler=sampler, lease=lease, member=0, episode_id="e", batch_key=Mock())
    assert (handle.name, handle.role, handle.wants_trajectory) == ("solver", "solver", wanted)


async def test_a_chat_is_a_call_with_the_tokens_of_its_messages(
    handle: PolicyHandle, engine: Aborting
) -> None:
    messages = [Message("user", "3 + 4?")]
    assert (await handle.chat(messages, max_new_tokens=3)).text
    assert list(engine.requests[-1][-1].prompt_ids) == handle.encode(messages)


async def test_a_demonstration_is_text_in_the_policys_tokens_that_ends_its_turn_and_calls_no_engine(
    handle: PolicyHandle, engine: Aborting
) -> None:
    shown = handle.demonstrate("3 + 4")
    tokenizer = handle._sampler.tokenizer
    assert shown.token_ids == (*tokenizer.encode("3 + 4"), tokenizer.end_of_turn)
    assert shown.token_ids[-1] in tokenizer.stop_token_ids
    assert shown.logprobs == (0.0,) * len(shown.token_ids)
    assert shown.version_spans == (VersionSpan(0, len(shown.token_ids), 0),)
    assert engine.requests == []
    handle.is_evaluation = True
    with pytest.raises(InvalidArgumentError, match="an evaluation judges what the policy says"):
        handle.demonstrate("3 + 4")


async def test_a_call_the_engine_gave_up_is_made_again(handle: PolicyHandle, engine: Aborting) -> None:
    result = await handle.generate([1, 2])
    assert (len(result.token_ids), result.finish_reason) == (5, "stop")
    first, second = (request[0] for request in engine.requests)
    assert (first.seed, first.prompt_ids) == (second.seed, second.prompt_ids)
    assert first.rid != second.rid


async def test_each_call_of_an_episode_has_its_own_seed(handle: PolicyHandle, engine: Aborting) -> None:
    await handle.generate([1])
    await handle.generate([1])
    calls = [request[0] for request in engine.requests[1:]]
    assert len({call.seed for call in calls}) == 2
    assert len({call.rid.partition(";")[0] for call in calls}) == 2


@pytest.mark.parametrize(("prompt", "limit"), [([], None), ([1], 0), ([1], SAMPLING.max_new_tokens + 1)])
async def test_calls_outside_the_bounds_are_refused(handle: PolicyHandle, prompt: Any, limit: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="max_new_tokens"):
        await handle.generate(prompt, max_new_tokens=limit)


async def test_a_call_may_ask_for_less_than_the_recipe_allows(handle: PolicyHandle) -> None:
    result = await handle.generate([1], max_new_tokens=3)
    assert (len(result.token_ids), result.finish_reason) == (3, "length")


async def test_text_and_ids_are_those_of_the_tokenizer(handle: PolicyHandle, tmp_path: Path) -> None:
    ids = handle.encode([Message("user", "3 + 4?")])
    assert ids == list(load_tokenizer(tmp_path).encode((Message("user", "3 + 4?"),)))
    assert "3 + 4?" in handle.decode(ids)


async def test_a_policy_whose_engine_stays_away_is_named_unavailable(
    tmp_path: Path, handle: PolicyHandle
) -> None:
    policy = ServedPolicy("solver", patience_s=0.2)
    policy.engines[0].ready(FakeEngine(version=0), version=0)
    policy.engines[0].lost()
    handle._sampler = policy
    await policy.read_tokenizer(write_tokenizer(tmp_path / "weights"))
    with pytest.raises(PolicyUnavailable, match="policy 'solver' has had no engine here"):
        await handle.generate([1, 2])
    assert handle.unavailable is not None
    policy.engines[0].ready(FakeEngine(version=0), version=0)
    assert (await handle.generate([1, 2])).token_ids
    await policy.close()
