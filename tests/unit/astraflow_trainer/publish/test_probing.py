"""A probe is the greedy continuation, token by token, however few passes it took."""

import pytest
import torch

from astraflow_trainer.model.model import PolicyModel, build_causal_lm
from astraflow_trainer.publish.probing import Prober
from astraflow_trainer.ranks.reductions import OneRank
from astraflow_weights.versions.probe import ProbeAnswer
from support.tiny_training import TINY


@pytest.fixture
def policy() -> PolicyModel:
    return PolicyModel(build_causal_lm(TINY, seed=3))


@pytest.fixture
def passes(policy: PolicyModel, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each forward pass."""
    counted: list[int] = []
    plain = policy.next_token_logprobs

    def counting(token_ids: torch.Tensor, *, last: int) -> torch.Tensor:
        counted.append(last)
        return plain(token_ids, last=last)

    monkeypatch.setattr(policy, "next_token_logprobs", counting)
    return counted


def prober(policy: PolicyModel) -> Prober:
    return Prober(policy, ranks=OneRank())


def one_by_one(policy: PolicyModel, answer: ProbeAnswer) -> ProbeAnswer:
    """The same prompt, continued by one most likely token after the other."""
    ids, logprobs, margins = list(answer.prompt_ids), [], []
    for _ in answer.token_ids:
        with torch.no_grad():
            logits = policy.causal_lm(torch.tensor([ids])).logits[0, -1]
        best, second = torch.log_softmax(logits, -1).topk(2).values.tolist()
        ids.append(int(logits.argmax()))
        logprobs.append(best)
        margins.append(best - second)
    return ProbeAnswer(
        prompt_ids=answer.prompt_ids,
        token_ids=tuple(ids[len(answer.prompt_ids) :]),
        logprobs=tuple(logprobs),
        margins=tuple(margins),
    )


def test_answers_are_those_of_greedy_sampling(policy: PolicyModel) -> None:
    probe = prober(policy).answers()
    assert probe is not None
    assert len({answer.prompt_ids for answer in probe}) == 2
    for answer in probe:
        expected = one_by_one(policy, answer)
        assert answer.token_ids == expected.token_ids
        assert answer.logprobs == pytest.approx(expected.logprobs, abs=1e-5)
        assert answer.margins == pytest.approx(expected.margins, abs=1e-5)


def test_weights_that_hardly_changed_take_one_pass(policy: PolicyModel, passes: list[int]) -> None:
    asked = prober(policy)
    first = asked.answers()
    assert 1 <= len(passes) <= 8
    passes.clear()
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1 + 1e-5)
    second = asked.answers()
    assert len(passes) == 1
    assert second != first


def test_a_policy_that_answers_no_numbers_has_no_probe_and_trains_on(policy: PolicyModel) -> None:
    with torch.no_grad():
        next(policy.parameters()).fill_(float("nan"))
    assert prober(policy).answers() is None
