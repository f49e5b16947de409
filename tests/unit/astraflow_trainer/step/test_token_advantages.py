"""Advantages of tokens, by formulas written here again: returns, whitening, penalties for leaving a reference."""

import math
from collections.abc import Sequence
from statistics import mean, stdev

import numpy as np
import pytest

from astraflow.recipe.advantage import AdvantageSettings, Gae, Grpo, ReinforcePp, ReinforcePpBaseline
from astraflow.recipe.algorithm import KlSettings
from astraflow_trainer.ranks.reductions import OneRank
from astraflow_trainer.step.critic import fit_metrics
from astraflow_trainer.step.token_advantages import Penalised, returns_for_critic, token_advantages

REWARDS = [1.0, -0.5, 2.0]
LOST = [[0.1, 0.0, -0.3], [0.2], [0.0, 0.4]]


def _kl(placement: str) -> KlSettings:
    return KlSettings.model_validate({"coefficient": 0.1, "estimator": "k1", "placement": placement})


def _found(
    estimator: AdvantageSettings, *, kl: KlSettings | None, order: Sequence[int] = (0, 1, 2)
) -> list[list[float]]:
    rows = [Penalised(estimator=estimator, lost=np.array(LOST[place])) for place in order]
    whitened = [estimator] if estimator.whiten else []
    values = [REWARDS[place] for place in order]
    parts = token_advantages(values, rows, kl=kl, whitened=whitened, ranks=OneRank())
    return [parts[order.index(place)].tolist() for place in range(3)]


def _returns(discount: float, *, lost: bool) -> list[list[float]]:
    """Σ over k ≥ t of discount^(k − t) · (reward at the end − penalty)."""
    result = []
    for reward, penalties in zip(REWARDS, LOST, strict=True):
        last = len(penalties) - 1
        earned = [reward * (k == last) - penalty * lost for k, penalty in enumerate(penalties)]
        result.append(
            [math.fsum(discount ** (k - t) * earned[k] for k in range(t, last + 1)) for t in range(last + 1)]
        )
    return result


def _white(rows: list[list[float]]) -> list[list[float]]:
    flat = [value for row in rows for value in row]
    return [[(value - mean(flat)) / (stdev(flat) + 1e-8) for value in row] for row in rows]


GOLDEN = {
    "a row's advantage is its tokens'": (
        Grpo(),
        None,
        [[1.0] * 3, [-0.5], [2.0] * 2],
    ),
    "a discount is counted from the end": (AdvantageSettings(discount=0.5), None, _returns(0.5, lost=False)),
    "reinforce++ whitens returns": (ReinforcePp(), None, _white(_returns(1.0, lost=False))),
    "with a baseline it does, too": (ReinforcePpBaseline(), None, _white(_returns(1.0, lost=False))),
    "with kl in the reward": (ReinforcePp(), _kl("reward"), _white(_returns(1.0, lost=True))),
    "and a discount": (ReinforcePp(discount=0.9), _kl("reward"), _white(_returns(0.9, lost=True))),
    "a term in the loss is no penalty": (ReinforcePp(), _kl("loss"), _white(_returns(1.0, lost=False))),
    "distillation takes from each token": (
        Grpo(),
        _kl("advantage"),
        [[r - lost for lost in of] for r, of in zip(REWARDS, LOST, strict=True)],
    ),
}


@pytest.mark.parametrize(("estimator", "kl", "expected"), GOLDEN.values(), ids=GOLDEN)
def test_tokens_by_formula(
    estimator: AdvantageSettings, kl: KlSettings | None, expected: list[list[float]]
) -> None:
    for order in ([0, 1, 2], [2, 0, 1]):
        for found, wanted in zip(_found(estimator, kl=kl, order=order), expected, strict=True):
            assert found == pytest.approx(wanted, rel=1e-12, abs=1e-14)


# One row of three tokens that earns 1 at its end, with V = 0.5, 0.25, 0.75; δ, A and A + V worked by hand.
GAE = {
    "published": (Gae(whiten=False), None, [0.450625, 0.7375, 0.25], [0.950625, 0.9875, 1.0]),
    "discounted": (
        Gae(whiten=False, discount=0.5, lam=0.5),
        None,
        [-0.328125, 0.1875, 0.25],
        [0.171875, 0.4375, 1.0],
    ),
    "one token ahead": (Gae(whiten=False, lam=0.0), None, [-0.25, 0.5, 0.25], [0.25, 0.75, 1.0]),
    "what was earned": (Gae(whiten=False, lam=1.0), None, [0.5, 0.75, 0.25], [1.0, 1.0, 1.0]),
    "with kl in the reward": (
        Gae(whiten=False),
        _kl("reward"),
        [0.621375, 1.0225, 0.55],
        [1.121375, 1.2725, 1.3],
    ),
}


@pytest.mark.parametrize(("estimator", "kl", "advantages", "returns"), GAE.values(), ids=GAE)
def test_gae_by_hand(
    estimator: Gae, kl: KlSettings | None, advantages: list[float], returns: list[float]
) -> None:
    values = np.array([0.5, 0.25, 0.75])
    rows = [Penalised(estimator=estimator, lost=np.array(LOST[0]), expected=values)]
    (found,) = token_advantages([1.0], rows, kl=kl, whitened=[], ranks=OneRank())
    np.testing.assert_allclose(found, advantages, rtol=0, atol=1e-12)
    np.testing.assert_allclose(returns_for_critic([1.0], rows, kl=kl)[0], returns, rtol=0, atol=1e-12)
    white = Gae.model_validate(estimator.model_dump() | {"whiten": True})
    other = Penalised(estimator=white, lost=np.zeros(1), expected=np.array([0.125]))
    found, last = token_advantages(
        [1.0, 2.0],
        [Penalised(estimator=white, lost=rows[0].lost, expected=values), other],
        kl=kl,
        whitened=[white],
        ranks=OneRank(),
    )
    expected = _white([advantages, [1.875]])
    np.testing.assert_allclose([*found, *last], [*expected[0], *expected[1]], rtol=0, atol=1e-12)


def test_equal_returns_are_whitened_to_exactly_zero() -> None:
    rows = [Penalised(estimator=ReinforcePp(), lost=np.zeros(3)) for _ in range(4)]
    found = token_advantages([0.1] * 4, rows, kl=None, whitened=[ReinforcePp()], ranks=OneRank())
    assert not np.concatenate(found).any()


def test_estimators_are_whitened_apart() -> None:
    other = ReinforcePp(discount=0.5)
    rows = [
        Penalised(estimator=given, lost=np.zeros(2)) for given in (ReinforcePp(), other, other, ReinforcePp())
    ]
    found = token_advantages(
        [1.0, 5.0, 7.0, 3.0], rows, kl=None, whitened=[ReinforcePp(), other], ranks=OneRank()
    )
    for members in ([0, 3], [1, 2]):
        assert sum(found[place].sum() for place in members) == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("estimator", [Grpo(), ReinforcePp(), Gae(), AdvantageSettings(discount=0.5)])
@pytest.mark.parametrize("most", [1e6, 1e9])
def test_tokens_of_rewards_at_the_bound_are_finite_as_the_loss_computes(
    estimator: AdvantageSettings, most: float
) -> None:
    values, expected = [most, -most, most, 1e-9], np.full(4096, -most)
    rows = [Penalised(estimator=estimator, lost=np.zeros(4096), expected=expected) for _ in values]
    whitened = [estimator] if estimator.whiten else []
    found = token_advantages(values, rows, kl=None, whitened=whitened, ranks=OneRank())
    squares = np.concatenate(found).astype(np.float32) ** 2
    assert np.isfinite(squares.sum())
    assert squares.any()
    # What a critic is to learn: the square of its loss, which it takes in binary32, too.
    goals = np.concatenate(returns_for_critic(values, rows, kl=None)).astype(np.float32)
    assert np.isfinite((goals - np.float32(-most)) ** 2).all()
    assert np.isfinite(list(fit_metrics([expected] * 4, [goals], ranks=OneRank()).values())).all()
