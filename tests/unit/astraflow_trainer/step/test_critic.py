"""The critic of GAE: its loss by formula, independent of how rows are packed, and the steps in which it is alone."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from astraflow.recipe import OptimizerSettings
from astraflow.recipe.algorithm import AlgorithmSettings
from astraflow_trainer.batches.packing import pack
from astraflow_trainer.batches.rows import TrainingRow
from astraflow_trainer.model.model import CriticModel, PolicyModel, build_causal_lm
from astraflow_trainer.model.optimizer import MasterOptimizer
from astraflow_trainer.ranks.reductions import OneRank
from astraflow_trainer.step.critic import Critic, fit_metrics
from astraflow_trainer.step.step import Outcome, SkipReason, StepMetrics, StepSettings, train_step
from support.tiny_training import TINY, copies, make_row, make_rows, same_bits

pytestmark = pytest.mark.slow


@dataclass
class Bench:
    """A policy outside any mesh, and a critic whose head is not zero."""

    algorithm: AlgorithmSettings
    policy: PolicyModel
    critic: Critic
    optimizer: MasterOptimizer

    @classmethod
    def made(cls, *, head: float = 0.3, **critic: Any) -> "Bench":
        given = {"advantage": "gae", "loss": "ppo_clip", "critic": critic}
        algorithm = AlgorithmSettings.model_validate(given)
        algorithm.require_consistent()
        policy, value = PolicyModel(build_causal_lm(TINY, seed=0)), CriticModel(build_causal_lm(TINY, seed=1))
        value.holds_masters = True
        torch.nn.init.constant_(value.causal_lm.get_output_embeddings().weight, head)
        assert algorithm.critic is not None
        settings = OptimizerSettings(learning_rate=1e-3, warmup_steps=0, grad_clip=1e9)
        rate = {"learning_rate": algorithm.critic.learning_rate}
        own = MasterOptimizer(value, settings=settings.model_copy(update=rate))
        made = Critic(model=value, optimizer=own, settings=algorithm.critic)
        return cls(algorithm, policy, made, MasterOptimizer(policy, settings=settings))

    def train(self, rows: list[TrainingRow], *, budget: int = 1000) -> StepMetrics:
        settings = StepSettings(algorithm=self.algorithm, tokens_per_microbatch=budget)
        return train_step(
            self.policy, optimizer=self.optimizer, rows=rows, settings=settings, critic=self.critic
        )

    def moments(self) -> dict[str, torch.Tensor]:
        """Ten times these are the gradient of the critic's first step."""
        state = copies(self.critic.optimizer.state().items())
        return {name: 10 * value for name, value in state.items() if name.startswith("exp_avg.")}

    def values(self, row: TrainingRow) -> list[float]:
        (batch,) = pack([row], token_budget=1000)
        with torch.no_grad():
            return self.critic.model.values(batch).double().tolist()


def _clipped_losses(
    values: list[float], before: list[float], returns: list[float], clip: float
) -> Iterator[float]:
    for value, old, wanted in zip(values, before, returns, strict=True):
        near = min(max(value, old - clip), old + clip)
        yield 0.5 * max((value - wanted) ** 2, (near - wanted) ** 2)


def test_the_value_loss_is_that_of_the_formula() -> None:
    """λ = 0.95 and discount 1 here; in the first epoch a value is that of the start, so no bound cuts."""
    bench, rows = Bench.made(), make_rows(num_rows=8)
    losses = list[float]()
    for row in rows:
        values, after = bench.values(row), 0.0
        for place in range(len(values) - 1, -1, -1):
            is_last = place == len(values) - 1
            surprise = (row.reward if is_last else values[place + 1]) - values[place]
            after = surprise + 0.95 * after
            losses.append(0.5 * after**2)  # V + A − V
    metrics = bench.train(rows).of_critic
    assert metrics["value_loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    assert metrics["critic_grad_norm"] > 0.01


def test_a_value_that_moved_beyond_the_bound_counts_as_the_formula_says() -> None:
    bench, rows = Bench.made(learning_rate=0.05, clip=0.01), make_rows(num_rows=8)
    bench.algorithm = bench.algorithm.model_copy(update={"epochs": 2})
    before = [bench.values(row) for row in rows]
    returns = [_lambda_returns(row.reward, values) for row, values in zip(rows, before, strict=True)]
    # What the second epoch finds is what one step of a twin of the first leaves.
    twin = Bench.made(learning_rate=0.05, clip=0.01)
    first = twin.train(rows).of_critic["value_loss"]
    moved = [twin.values(row) for row in rows]
    losses = [
        loss
        for columns in zip(moved, before, returns, strict=True)
        for loss in _clipped_losses(*columns, clip=0.01)
    ]
    second = sum(losses) / len(losses)
    free = np.mean(0.5 * (np.concatenate(moved) - np.concatenate(returns)) ** 2)
    assert second > 1.01 * free  # the bound cuts here
    assert bench.train(rows).of_critic["value_loss"] == pytest.approx((first + second) / 2, rel=1e-5)


def _lambda_returns(reward: float, values: list[float]) -> list[float]:
    result, after = list[float](), 0.0
    for value, later in zip(reversed(values), [reward, *reversed(values[1:])], strict=True):
        after = later - value + 0.95 * after
        result.insert(0, after + value)
    return result


def test_packing_and_the_order_of_rows_change_neither_loss_nor_gradient() -> None:
    rows = make_rows(num_rows=12)
    whole = Bench.made()
    expected, gradient = whole.train(rows).of_critic, whole.moments()
    for given, budget in ((rows, 20), (rows[::-1], 40)):
        bench = Bench.made()
        found = bench.train(given, budget=budget).of_critic
        assert found == pytest.approx(expected, rel=1e-4)
        for name, values in bench.moments().items():
            torch.testing.assert_close(values, gradient[name], rtol=1e-3, atol=2e-6)


def test_only_what_the_policy_said_has_values_and_the_next_turn_follows_at_once() -> None:
    """An observation between two turns is read, and is no step of its own."""
    row = make_row([1, 2], [3, 4, 5, 6, 7], reward=1.0)
    mask = row.loss_mask.copy()
    mask[4:6] = False
    turns = replace(row, loss_mask=mask, behavior_logprobs=np.where(mask, row.behavior_logprobs, 0))
    bench = Bench.made()
    (batch,) = pack([turns], token_budget=100)
    (expected,) = bench.critic.expected([batch], num_tokens=[3])
    whole = bench.values(row)
    assert expected.tolist() == pytest.approx([whole[0], whole[1], whole[4]], abs=1e-6)


def test_while_the_critic_warms_up_the_policy_stays_as_it_is() -> None:
    bench = Bench.made(warmup=2)
    before = copies(bench.policy.state_dict().items())
    reasons = [(made := bench.train(make_rows(seed=seed))).skip_reason for seed in range(2)]
    assert reasons == [SkipReason.CRITIC_WARMUP] * 2
    assert (made.outcome, made.num_updates) == (Outcome.SKIPPED, 0)
    assert same_bits(copies(bench.policy.state_dict().items()), before)
    assert bench.optimizer.num_steps == 0
    third = bench.train(make_rows(seed=2))
    assert (third.outcome, bench.critic.optimizer.num_steps) == (Outcome.COMMITTED, 3)
    assert not same_bits(copies(bench.policy.state_dict().items()), before)


def test_it_learns_what_returns_are_and_at_a_tiny_rate_does_not() -> None:
    rows = make_rows(num_rows=12)
    learned, stays = Bench.made(learning_rate=0.02, clip=None), Bench.made(learning_rate=1e-9)
    for bench in (learned, stays):
        first, *_, last = [bench.train(rows).of_critic for _ in range(25)]
        explained = last["explained_variance"]
        assert (explained > 0.5 and last["value_loss"] < 0.5 * first["value_loss"]) == (bench is learned)


def test_an_update_that_is_not_finite_leaves_the_critic_as_it_was() -> None:
    bench = Bench.made()
    broken = bench.critic.model.causal_lm.get_decoder().norm.weight
    with torch.no_grad():
        broken[0] = float("nan")
    before = copies(bench.critic.optimizer.state().items())
    metrics = bench.train(make_rows())
    assert metrics.outcome is Outcome.SKIPPED  # advantages are of such values
    after = copies(bench.critic.optimizer.state().items())
    assert all(torch.equal(before[name], after[name]) for name in before if "norm.weight" not in name)
    assert bench.critic.optimizer.num_steps == 0


def test_a_critic_learns_from_rewards_at_the_bound() -> None:
    bench, rows = Bench.made(), make_rows(num_rows=4)
    metrics = bench.train([replace(row, reward=1e9 * (-1) ** at) for at, row in enumerate(rows)])
    assert all(math.isfinite(value) for value in metrics.of_critic.values()), metrics.of_critic
    assert metrics.of_critic["critic_grad_norm"] > 0
    assert all(value.isfinite().all() for value in bench.moments().values())


def test_a_missing_critic_is_named() -> None:
    bench = Bench.made()
    with pytest.raises(ValueError, match="the algorithm has a critic; pass it"):
        train_step(
            bench.policy,
            optimizer=bench.optimizer,
            rows=make_rows(),
            settings=StepSettings(algorithm=bench.algorithm),
        )


def test_explained_variance_is_1_for_a_prophet_0_for_a_constant_and_negative_for_worse() -> None:
    returns = [np.array([1.0, 2.0]), np.array([4.0])]
    guesses = {1.0: returns, 0.0: [np.zeros(2), np.zeros(1)], -3.0: [-part for part in returns]}
    for explained, values in guesses.items():
        found = fit_metrics(values, returns, ranks=OneRank())
        assert found["explained_variance"] == pytest.approx(explained)
    flat = fit_metrics([np.array([0.5, 1.0])], [np.ones(2)], ranks=OneRank())
    assert flat == {"explained_variance": 0.0, "value_mean": 0.75, "return_mean": 1.0}
