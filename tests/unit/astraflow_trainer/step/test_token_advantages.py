"""Advantages of tokens, by formulas written here again: returns, whitening, penalties for leaving a reference."""

import math
from collections.abc import Sequence
from statistics import mean, stdev

import numpy as np
import pytest

from astraflow.recipe.advantage import AdvantageSettings, Grpo, ReinforcePp
from astraflow.recipe.algorithm import KlSettings
from astraflow_trainer.ranks.reductions import OneRank
from astraflow_trainer.step.token_advantages import Penalised, token_advantages

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
