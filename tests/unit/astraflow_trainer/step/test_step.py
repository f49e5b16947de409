"""A step: invariance to packing, guards, and that it learns (and does not at learning rate 0)."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

from astraflow.recipe import OptimizerSettings
from astraflow.recipe.advantage import OverlongSettings
from astraflow.recipe.algorithm import (
    AlgorithmSettings,
    KlReference,
    KlSettings,
    M2po,
    NoTrustRegion,
    PpoClip,
    ProximalAnchor,
)
from astraflow_kit.plugins import RecipeSource
from astraflow_trainer.batches.packing import MicroBatch, pack
from astraflow_trainer.batches.rows import TrainingRow
from astraflow_trainer.model.model import PolicyModel, TokenScores
from astraflow_trainer.model.optimizer import MasterOptimizer
from astraflow_trainer.step.losses import LossMetrics
from astraflow_trainer.step.plugins import StepPlugins
from astraflow_trainer.step.step import Outcome, SkipReason, StepMetrics, StepSettings, train_step
from support.docs_code import recipe_folder
from support.tiny_training import VOCAB, MakePolicy, copies, make_row, make_rows, same_bits

pytestmark = pytest.mark.slow


OWN_LOSS = {"use": "recipe:OffPolicyMask", "with": {"max_drift": 0.1}}
MEAN_OF_ANCHOR = {"anchor": "proximal", "aggregation": "seq_mean_token_mean"}
ALGORITHMS = {
    "none": {"loss": "none", "aggregation": "seq_mean_token_sum"},
    "ppo": {"loss": "ppo_clip", "aggregation": "seq_mean_token_mean"},
    "m2po": {"loss": {"kind": "m2po", "budget": 0.1}},
    "m2po_proximal": {"loss": {"kind": "m2po", "budget": 0.1}, "anchor": "proximal"},
    "m2po_clip": {"loss": {"kind": "m2po_clip", "budget": 0.1}},
    "m2po_mask": {"loss": {"kind": "m2po_mask", "budget": 0.1}},
    "gspo": {"loss": {"kind": "gspo", "low": 0.1, "high": 0.1}, "aggregation": "seq_mean_token_mean"},
    "cispo": {"loss": "cispo", "aggregation": {"kind": "constant", "length": 9}},
    "proximal_kl": {"anchor": "proximal", "loss": "ppo_clip", "kl": {"coefficient": 0.1}},
    "plugins": {"loss": OWN_LOSS, "advantage": "recipe:LengthWeighted", **MEAN_OF_ANCHOR},
}


@pytest.fixture
def documented(tmp_path: Path) -> RecipeSource:
    """A recipe whose own code is that of the pages on plug-ins."""
    return RecipeSource(folder=recipe_folder(tmp_path, "plugins/loss.md", "plugins/advantage.md"))


def _run(
    policy: PolicyModel, rows: list[TrainingRow], settings: StepSettings, **reference: Any
) -> tuple[StepMetrics, LossMetrics, dict[str, torch.Tensor]]:
    """Metrics, and ten times the first moment after one step, which is the gradient."""
    optimizer = MasterOptimizer(policy, settings=OptimizerSettings(learning_rate=1e-3, grad_clip=1e9))
    metrics = train_step(policy, optimizer=optimizer, rows=rows, settings=settings, **reference)
    state = copies(optimizer.state().items())
    assert metrics.loss is not None
    return metrics, metrics.loss, {k: 10 * moment for k, moment in state.items() if k.startswith("exp_avg.")}


def test_it_says_at_each_micro_batch_that_it_gets_on(make_policy: MakePolicy) -> None:
    moves: list[str] = []
    settings = StepSettings(tokens_per_microbatch=40)
    metrics, _, _ = _run(make_policy(), make_rows(num_rows=16), settings, moved=lambda: moves.append("moved"))
    assert len(moves) >= metrics.num_micro_batches > 2


KEPT = {
    "one pass": ({"loss": "none"}, 1000),
    "micro-batches": ({"loss": "none"}, 20),
    "bounds that cut": ({"loss": {"kind": "m2po", "budget": 0.1, "floor_low": 0.0, "floor_high": 0.0}}, 20),
    "known bounds": ({"loss": "ppo_clip", "anchor": "proximal"}, 20),
    "several updates": ({"loss": "ppo_clip", "anchor": "proximal", "minibatches": 2, "epochs": 2}, 20),
}


@pytest.mark.parametrize("name", KEPT)
def test_what_the_model_made_of_each_token_before_the_step_is_kept(
    name: str, make_policy: MakePolicy
) -> None:
    rows, (algorithm, budget) = make_rows(num_rows=12), KEPT[name]
    settings = StepSettings(
        algorithm=AlgorithmSettings.model_validate(algorithm),
        tokens_per_microbatch=budget,
        keep_logprobs=True,
    )
    metrics = _run(policy := make_policy(), rows, settings)[0]
    kept = metrics.logprobs
    assert not same_bits(dict(policy.state_dict()), dict(make_policy().state_dict()))
    assert len(kept) >= 8  # groups with unequal rewards
    MasterOptimizer(before := make_policy(), settings=OptimizerSettings())  # which rounds the parameters
    for row in rows:
        if row.trajectory_id in kept:
            (alone,) = pack([row], token_budget=1000)
            with torch.no_grad():
                expected = before.score(alone).logprob_N.numpy()
            found = kept[row.trajectory_id]
            np.testing.assert_allclose(found[row.loss_mask], expected, atol=1e-5)
            assert np.isnan(found[~row.loss_mask]).all()
            apart = expected - row.behavior_logprobs[row.loss_mask]
            k3 = float(np.mean(np.exp(apart) - 1 - apart))
            assert metrics.mismatch_kl[row.trajectory_id] == pytest.approx(k3, rel=1e-3)
    assert metrics.mismatch_kl.keys() == kept.keys()
    assert not _run(make_policy(), rows, replace(settings, keep_logprobs=False))[0].logprobs


def test_a_row_that_does_not_fit_takes_its_group_with_it_and_the_rest_is_trained(
    make_policy: MakePolicy,
) -> None:
    rows, budget = make_rows(num_rows=12), StepSettings(tokens_per_microbatch=60)
    long = make_row([1] * 50, [2] * 50, group="g1", name="long")
    unknown = make_row([1], [VOCAB], group="g2", name="unknown")
    metrics, loss, gradient = _run(make_policy(), [*rows, long, unknown], budget)
    assert (metrics.num_left_out, metrics.num_rows) == (10, 4)
    _, without, expected = _run(make_policy(), rows[:4], budget)
    assert loss == without
    assert same_bits(gradient, expected)


def test_a_batch_without_a_row_that_fits_is_a_skipped_step(make_policy: MakePolicy) -> None:
    optimizer = MasterOptimizer(policy := make_policy(), settings=OptimizerSettings(learning_rate=1e-3))
    rows = [make_row([1], [VOCAB])]
    metrics = train_step(policy, optimizer=optimizer, rows=rows, settings=StepSettings())
    assert (metrics.outcome, metrics.skip_reason) == (Outcome.SKIPPED, SkipReason.NO_SIGNAL)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_packing_changes_nothing_of_a_step(
    name: str, make_policy: MakePolicy, documented: RecipeSource
) -> None:
    rows = make_rows(num_rows=16)
    algorithm = AlgorithmSettings.model_validate(ALGORITHMS[name])
    plugins = StepPlugins.made(algorithm, source=documented)
    whole = StepSettings(algorithm=algorithm, plugins=plugins, tokens_per_microbatch=1000)
    metrics, loss, gradient = _run(make_policy(), rows, whole)
    assert metrics.num_micro_batches == 1
    scale = max(float(value.abs().max()) for value in gradient.values())
    for budget, lane in ((60, None), (14, None), (120, 40), (1000, 100)):
        settings = replace(whole, tokens_per_microbatch=budget, lane_tokens=lane)
        other_metrics, other_loss, other = _run(make_policy(), rows, settings)
        assert other_loss.loss == pytest.approx(loss.loss, abs=1e-6)
        assert other_metrics.clip_low == pytest.approx(metrics.clip_low, abs=1e-5)
        torch.testing.assert_close(other, gradient, atol=1e-6 * max(1.0, scale), rtol=1e-5)


def test_truncated_rows_are_left_out_of_the_step_but_not_of_their_groups_baseline(
    make_policy: MakePolicy,
) -> None:
    rows = make_rows(num_rows=8)
    cut_off = [replace(row, truncated=index in (1, 6)) for index, row in enumerate(rows)]
    masking = AlgorithmSettings(loss=NoTrustRegion(), truncated="mask")
    metrics, masked, gradient = _run(make_policy(), cut_off, StepSettings(algorithm=masking))
    assert (metrics.num_rows, metrics.num_trained_rows) == (8, 6)
    assert masked.num_tokens == sum(row.num_trained_tokens for row in cut_off if not row.truncated)
    trained, loss, whole = _run(
        make_policy(), cut_off, StepSettings(algorithm=masking.model_copy(update={"truncated": "train"}))
    )
    assert (trained.num_trained_rows, loss.num_tokens) == (8, sum(row.num_trained_tokens for row in rows))
    # The rows that are left have the advantages that they had beside the others.
    _, alone, without = _run(
        make_policy(), [row for row in cut_off if not row.truncated], StepSettings(algorithm=masking)
    )
    assert alone.num_tokens == masked.num_tokens
    assert alone.loss != pytest.approx(masked.loss, abs=1e-4)
    assert not same_bits(gradient, without)
    assert not same_bits(gradient, whole)


def test_a_batch_of_truncated_rows_alone_is_a_skipped_step(make_policy: MakePolicy) -> None:
    optimizer = MasterOptimizer(policy := make_policy(), settings=OptimizerSettings(learning_rate=1e-3))
    rows = [replace(row, truncated=True) for row in make_rows(num_rows=8)]
    settings = StepSettings(algorithm=AlgorithmSettings(truncated="mask"))
    metrics = train_step(policy, optimizer=optimizer, rows=rows, settings=settings)
    assert (metrics.outcome, metrics.skip_reason) == (Outcome.SKIPPED, SkipReason.NO_SIGNAL)


def test_long_answers_are_trained_on_as_if_their_rewards_were_lower(make_policy: MakePolicy) -> None:
    rows = make_rows(num_rows=8)
    shaping = OverlongSettings(max_tokens=8, buffer_tokens=6, factor=0.5)
    penalty = [0.5 * min(1.0, max(0, row.num_trained_tokens - 2) / 6) for row in rows]
    lowered = [replace(row, reward=row.reward - lost) for row, lost in zip(rows, penalty, strict=True)]
    plain = AlgorithmSettings(loss=NoTrustRegion())
    shaped = plain.model_copy(update={"overlong": shaping})
    metrics, _, gradient = _run(make_policy(), rows, StepSettings(algorithm=shaped))
    _, _, expected = _run(make_policy(), lowered, StepSettings(algorithm=plain))
    torch.testing.assert_close(gradient, expected, atol=1e-6, rtol=1e-5)
    assert metrics.overlong_penalty_mean == pytest.approx(np.mean(penalty))
    assert metrics.reward_mean == pytest.approx(np.mean([row.reward for row in rows]))


def test_the_order_of_rows_changes_nothing(make_policy: MakePolicy) -> None:
    rows = make_rows(num_rows=16)
    shuffled = [rows[index] for index in np.random.default_rng(1).permutation(16)]
    settings = StepSettings(tokens_per_microbatch=50)
    _, first, gradient = _run(make_policy(), rows, settings)
    _, second, other = _run(make_policy(), shuffled, settings)
    assert first.loss == pytest.approx(second.loss, abs=1e-6)
    torch.testing.assert_close(other, gradient, atol=1e-6, rtol=1e-5)


def test_m2po_bounds_are_those_of_the_whole_step(make_policy: MakePolicy) -> None:
    """Each micro-batch alone would get other bounds; the step has one pair, reported in its metrics."""
    loss = AlgorithmSettings(loss=M2po(budget=0.02, floor_low=0.0, floor_high=0.0))
    rows = make_rows(num_rows=16)
    whole, *_ = _run(make_policy(), rows, StepSettings(algorithm=loss))
    split, *_ = _run(make_policy(), rows, StepSettings(algorithm=loss, tokens_per_microbatch=40))
    alone, *_ = _run(make_policy(), rows[:4], StepSettings(algorithm=loss))
    assert split.num_micro_batches > 2
    assert (split.clip_low, split.clip_high) == pytest.approx((whole.clip_low, whole.clip_high), rel=1e-4)
    assert alone.clip_low != pytest.approx(whole.clip_low, rel=1e-2)
    assert 0 < whole.clip_low < 1


class Counted:
    """Counts forward passes, and keeps what ranks were told of gradients."""

    def __init__(self, policy: PolicyModel, monkeypatch: pytest.MonkeyPatch) -> None:
        self.policy, self.num_passes, self.syncs = policy, 0, list[bool]()
        score, sync = policy.score, policy.sync_gradients

        def counted(batch: MicroBatch) -> TokenScores:
            self.num_passes += 1
            return score(batch)

        def told(*, now: bool) -> None:
            self.syncs.append(now)
            sync(now=now)

        monkeypatch.setattr(policy, "score", counted)
        monkeypatch.setattr(policy, "sync_gradients", told)


def _near(
    policy: PolicyModel, rows: list[TrainingRow], *, off: Callable[[TrainingRow], float]
) -> list[TrainingRow]:
    """Rows whose log-probs are the policy's, less `off` of the row, so that every ratio of a row is e^off."""
    moved = []
    for row, logprobs in zip(rows, _log_probs(policy, rows), strict=True):
        column = row.behavior_logprobs.copy()
        column[row.loss_mask] = logprobs.numpy() - off(row)
        moved.append(replace(row, behavior_logprobs=column))
    return moved


@pytest.mark.parametrize("form", ["m2po", "m2po_clip", "m2po_mask"])
def test_second_moment_bounds_cost_no_pass_while_they_cut_nothing(
    form: str, make_policy: MakePolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = _near(make_policy(), make_rows(num_rows=16), off=lambda _: 0.01)
    algorithm = AlgorithmSettings.model_validate({"loss": form})
    counted = Counted(make_policy(), monkeypatch)
    metrics, _, gradient = _run(
        counted.policy, rows, StepSettings(algorithm=algorithm, tokens_per_microbatch=40)
    )
    assert counted.num_passes == metrics.num_micro_batches > 2
    whole, _, expected = _run(make_policy(), rows, StepSettings(algorithm=algorithm))
    assert whole.num_micro_batches == 1
    torch.testing.assert_close(gradient, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("form", ["m2po", "m2po_clip", "m2po_mask"])
def test_bounds_that_turn_out_to_cut_have_only_what_they_cut_computed_again(
    form: str, make_policy: MakePolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first micro-batch holds the longest rows, on which all agree; two of the others went far."""
    rows = make_rows(num_rows=16)
    far = [row.trajectory_id for row in sorted(rows, key=lambda row: row.num_tokens)[2:4]]
    rows = [replace(row, reward=4.0) if row.trajectory_id in far else row for row in rows]
    rows = _near(make_policy(), rows, off=lambda row: 2.0 if row.trajectory_id in far else 0.01)
    algorithm = AlgorithmSettings.model_validate({"loss": {"kind": form, "budget": 0.02}})
    counted = Counted(make_policy(), monkeypatch)
    metrics, loss, gradient = _run(
        counted.policy, rows, StepSettings(algorithm=algorithm, tokens_per_microbatch=40)
    )
    assert metrics.num_micro_batches < counted.num_passes < 2 * metrics.num_micro_batches
    _, same, expected = _run(make_policy(), rows, StepSettings(algorithm=algorithm))
    assert loss.clip_fraction_up + loss.masked_fraction > 0
    assert loss.loss == pytest.approx(same.loss, abs=1e-6)
    torch.testing.assert_close(gradient, expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize(("setting", "first"), [("step", False), ("micro_batch", True)])
def test_ranks_add_gradients_up_once_a_step_or_each_time(
    setting: Literal["step", "micro_batch"],
    first: bool,
    make_policy: MakePolicy,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows, algorithm = make_rows(num_rows=16), AlgorithmSettings(loss=NoTrustRegion())
    counted = Counted(make_policy(), monkeypatch)
    settings = StepSettings(algorithm=algorithm, tokens_per_microbatch=40, gradient_sync=setting)
    metrics, _, gradient = _run(counted.policy, rows, settings)
    assert counted.syncs == [first] * (metrics.num_micro_batches - 1) + [True]
    _, _, expected = _run(make_policy(), rows, StepSettings(algorithm=algorithm))
    torch.testing.assert_close(gradient, expected, atol=1e-6, rtol=1e-5)


def test_tokens_that_count_half_have_half_the_gradient(make_policy: MakePolicy) -> None:
    rows = make_rows()
    halved = [replace(row, loss_weights=np.full(row.num_tokens, 0.5, dtype=np.float32)) for row in rows]
    _, _, whole = _run(make_policy(), rows, StepSettings())
    _, _, half = _run(make_policy(), halved, StepSettings())
    for name, gradient in whole.items():
        torch.testing.assert_close(half[name], gradient / 2, rtol=1e-4, atol=1e-7)


def test_rows_with_zero_advantage_are_left_out_of_denominators_unless_told(make_policy: MakePolicy) -> None:
    rows = make_rows(num_rows=8)
    flat = [make_row([1, 2], [3, 4], reward=1.0, group="flat", name=f"f{index}") for index in range(4)]
    loss = AlgorithmSettings(loss=NoTrustRegion())
    metrics, _, gradient = _run(make_policy(), rows + flat, StepSettings(algorithm=loss))
    _, same, expected = _run(make_policy(), rows, StepSettings(algorithm=loss))
    assert (metrics.num_rows, metrics.num_trained_rows, metrics.num_zero_variance_groups) == (12, 8, 1)
    torch.testing.assert_close(gradient, expected)
    keeping = loss.model_copy(update={"drop_zero_advantage": False})
    _, kept, diluted = _run(make_policy(), rows + flat, StepSettings(algorithm=keeping))
    share = same.num_tokens / kept.num_tokens
    scaled = {key: value * share for key, value in expected.items()}
    torch.testing.assert_close(diluted, scaled, atol=1e-6, rtol=1e-4)


def test_a_batch_without_signal_is_skipped(policy: PolicyModel) -> None:
    optimizer = MasterOptimizer(policy, settings=OptimizerSettings(learning_rate=1.0))
    before = copies(optimizer.state().items())
    rows = [make_row([1], [2], reward=1.0), make_row([1], [3], reward=1.0)]
    metrics = train_step(policy, optimizer=optimizer, rows=rows, settings=StepSettings())
    assert (metrics.outcome, metrics.skip_reason) == (Outcome.SKIPPED, SkipReason.NO_SIGNAL)
    assert metrics.loss is None
    assert same_bits(copies(optimizer.state().items()), before)
    empty = train_step(policy, optimizer=optimizer, rows=[], settings=StepSettings())
    assert empty.skip_reason is SkipReason.NO_SIGNAL


def _poisoned(output: torch.Tensor) -> torch.Tensor:
    """Finite forward, infinite backward."""
    copy = output.clone()
    copy.register_hook(lambda gradient: gradient * float("inf"))
    return copy


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        pytest.param(lambda output: output * float("nan"), SkipReason.NON_FINITE_LOSS, id="weights"),
        pytest.param(_poisoned, SkipReason.NON_FINITE_GRADIENT, id="gradient"),
    ],
)
def test_a_non_finite_step_is_skipped_and_leaves_no_trace(
    broken: Callable[[torch.Tensor], torch.Tensor], reason: SkipReason, policy: PolicyModel
) -> None:
    optimizer = MasterOptimizer(policy, settings=OptimizerSettings(learning_rate=1.0))
    train_step(policy, optimizer=optimizer, rows=make_rows(), settings=StepSettings())
    before = copies(optimizer.state().items())
    norm = policy.causal_lm.get_decoder().norm
    handle = norm.register_forward_hook(lambda _module, _inputs, output: broken(output))
    metrics = train_step(policy, optimizer=optimizer, rows=make_rows(seed=1), settings=StepSettings())
    handle.remove()
    assert (metrics.outcome, metrics.skip_reason) == (Outcome.SKIPPED, reason)
    assert optimizer.num_steps == 1
    assert same_bits(copies(optimizer.state().items()), before)
    healthy = train_step(policy, optimizer=optimizer, rows=make_rows(seed=1), settings=StepSettings())
    assert healthy.outcome is Outcome.COMMITTED


def test_kl_to_a_reference_model_needs_it_and_pulls_towards_it(make_policy: MakePolicy) -> None:
    kl = KlSettings(coefficient=1.0, reference=KlReference.MODEL)
    settings = StepSettings(algorithm=AlgorithmSettings(loss=NoTrustRegion(), kl=kl))
    with pytest.raises(ValueError, match="pass it, or use"):
        _run(make_policy(), make_rows(), settings)
    _, other, _ = _run(make_policy(), make_rows(), settings, reference=make_policy(seed=5, sharded=False))
    assert other.kl > 0.1


@pytest.mark.parametrize(("learning_rate", "learns"), [(2e-2, True), (0.0, False)])
def test_a_bandit_learns_its_rewarded_token(learning_rate: float, learns: bool, policy: PolicyModel) -> None:
    settings = OptimizerSettings(learning_rate=learning_rate, warmup_steps=0)
    optimizer = MasterOptimizer(policy, settings=settings)
    generator = torch.Generator().manual_seed(0)
    start = _distribution(policy)[7].item()
    for _ in range(8):
        probabilities = _distribution(policy)
        actions = torch.multinomial(probabilities, 32, replacement=True, generator=generator).tolist()
        logs, chosen = probabilities.log().tolist(), [*actions, 7]
        rows = [make_row([5], [a], logprobs=[logs[a]], reward=float(a == 7)) for a in chosen]
        metrics = train_step(policy, optimizer=optimizer, rows=rows, settings=StepSettings())
        assert metrics.loss is not None
        # What was sampled from is what is trained: every ratio of an on-policy step is 1.
        assert metrics.loss.max_abs_log_ratio < 1e-5
    end = _distribution(policy)[7].item()
    assert (end > max(0.5, 3 * start)) if learns else (end == start)


def test_several_updates_are_steps_on_the_tasks_of_each(make_policy: MakePolicy) -> None:
    """Two minibatches are two steps on the tasks of one, where nothing looks back to the step's start."""
    rows = make_rows(num_rows=16)
    both = StepSettings(algorithm=AlgorithmSettings(loss=PpoClip(), minibatches=2), tokens_per_microbatch=60)
    alone = replace(both, algorithm=AlgorithmSettings(loss=PpoClip()))
    settings = OptimizerSettings(learning_rate=1e-2)
    optimizer = MasterOptimizer(policy := make_policy(), settings=settings)
    metrics = train_step(policy, optimizer=optimizer, rows=rows, settings=both)
    assert (metrics.num_updates, optimizer.num_steps) == (2, 2)
    ends = []
    for tasks in itertools.combinations(("g0", "g1", "g2", "g3"), 2):
        other = MasterOptimizer(policy := make_policy(), settings=settings)
        for first in (True, False):
            share = [row for row in rows if (row.origin.task_id in tasks) is first]
            train_step(policy, optimizer=other, rows=share, settings=alone)
        ends.append(copies(other.state().items()))
    assert sum(same_bits(copies(optimizer.state().items()), end) for end in ends) == 1


@pytest.mark.parametrize("loss", ["ppo_clip", "m2po", "m2po_mask", "gspo"])
def test_later_updates_are_held_to_the_start_of_the_step(loss: str, make_policy: MakePolicy) -> None:
    """With one update the ratio to a proximal anchor is 1; with more it moves, alike for every packing and replay."""
    budget = {} if loss in ("ppo_clip", "gspo") else {"budget": 1e-4}
    given = {"loss": {"kind": loss, **budget}, "anchor": "proximal", "epochs": 3, "minibatches": 2}
    algorithm = AlgorithmSettings.model_validate(given)
    algorithm.require_consistent()
    rows, ends, seen = make_rows(num_rows=16), [], []
    for tokens in (1000, 1000, 40):
        optimizer = MasterOptimizer(policy := make_policy(), settings=OptimizerSettings(learning_rate=3e-3))
        settings = StepSettings(algorithm=algorithm, tokens_per_microbatch=tokens)
        metrics = train_step(policy, optimizer=optimizer, rows=rows, settings=settings)
        assert metrics.loss is not None
        seen.append(metrics)
        ends.append(copies(optimizer.state().items()))
    assert seen[0].num_updates == 6
    assert seen[0].loss is not None
    assert seen[0].loss.ratio_max > 1.001
    assert same_bits(ends[0], ends[1]), "a replay has the same bits"
    torch.testing.assert_close(ends[2], ends[0], atol=2e-4, rtol=1e-3)
    proximal = AlgorithmSettings(anchor=ProximalAnchor(), loss=PpoClip())
    once, _, _ = _run(make_policy(), rows, StepSettings(algorithm=proximal))
    assert once.loss is not None
    assert (once.num_updates, once.loss.ratio_max) == (1, 1.0)


def _rounded(policy: PolicyModel) -> PolicyModel:
    """With the weights that a step computes with."""
    MasterOptimizer(policy, settings=OptimizerSettings())
    return policy


def _log_probs(policy: PolicyModel, rows: list[TrainingRow]) -> list[torch.Tensor]:
    """Of each row's trained tokens."""
    (batch,) = pack(rows, token_budget=10_000)
    with torch.no_grad():
        logprobs = policy.score(batch).logprob_N
    return [logprobs[batch.row_N == index] for index in range(len(rows))]


def test_kl_in_the_reward_is_a_lower_reward(make_policy: MakePolicy) -> None:
    rows, teacher = make_rows(num_rows=8), make_policy(seed=5, sharded=False)
    kl = {"coefficient": 0.3, "estimator": "k1", "reference": "model", "placement": "reward"}
    plain = AlgorithmSettings.model_validate({"loss": "none", "advantage": "dr_grpo"})
    penalised = AlgorithmSettings.model_validate({"loss": "none", "advantage": "dr_grpo", "kl": kl})
    scores = zip(_log_probs(_rounded(make_policy()), rows), _log_probs(teacher, rows), strict=True)
    lost = [0.3 * float((own - against).sum()) for own, against in scores]
    lowered = [replace(row, reward=row.reward - of) for row, of in zip(rows, lost, strict=True)]
    settings = StepSettings(algorithm=penalised, tokens_per_microbatch=40)
    metrics, loss, gradient = _run(make_policy(), rows, settings, reference=teacher)
    _, _, expected = _run(make_policy(), lowered, StepSettings(algorithm=plain))
    torch.testing.assert_close(gradient, expected, atol=2e-6, rtol=1e-4)
    assert (loss.kl, metrics.reward_mean) == (0.0, pytest.approx(np.mean([row.reward for row in rows])))


def test_distillation_without_rewards_moves_towards_the_teacher(make_policy: MakePolicy) -> None:
    """Rows sampled by the policy; each token's advantage is what the teacher thinks of it."""
    teacher, policy = make_policy(seed=5, sharded=False), make_policy()
    given = {"preset": "opd", "kl": {"reference": "model"}}
    settings = StepSettings(algorithm=AlgorithmSettings.model_validate(given))
    optimizer = MasterOptimizer(policy, settings=OptimizerSettings(learning_rate=1e-2, warmup_steps=0))
    generator = torch.Generator().manual_seed(0)

    def divergence() -> float:
        own, other = _distribution(policy), _distribution(teacher)
        return float((own * (own / other).log()).sum())

    before = divergence()
    for _ in range(8):
        probabilities = _distribution(policy)
        actions = torch.multinomial(probabilities, 32, replacement=True, generator=generator).tolist()
        logs = probabilities.log().tolist()
        rows = [make_row([5], [a], logprobs=[logs[a]], name=f"t{i}") for i, a in enumerate(actions)]
        metrics = train_step(policy, optimizer=optimizer, rows=rows, settings=settings, reference=teacher)
        assert metrics.outcome is Outcome.COMMITTED
    assert divergence() < 0.6 * before


def test_sft_is_the_mean_cross_entropy_whatever_rewards_and_samplers_say(make_policy: MakePolicy) -> None:
    rows = make_rows(num_rows=8)
    settings = StepSettings(
        algorithm=AlgorithmSettings.model_validate({"preset": "sft"}), tokens_per_microbatch=40
    )
    metrics, loss, gradient = _run(make_policy(), rows, settings)
    assert metrics.num_trained_rows == 8
    expected = -torch.cat(_log_probs(_rounded(make_policy()), rows)).mean()
    assert loss.loss == pytest.approx(float(expected), rel=1e-5)
    others = [replace(row, reward=0.0, behavior_logprobs=row.behavior_logprobs * 0) for row in rows]
    _, same, other = _run(make_policy(), others, settings)
    assert same.loss == pytest.approx(loss.loss)
    assert same_bits(other, gradient)


def test_an_entropy_bonus_flattens_the_distribution(make_policy: MakePolicy) -> None:
    rows = [make_row([5], [token], name=f"t{token}") for token in range(8)]
    given = {"loss": "none", "entropy": {"coefficient": 1.0}}
    settings = StepSettings(algorithm=AlgorithmSettings.model_validate(given))
    optimizer = MasterOptimizer(policy := make_policy(), settings=OptimizerSettings(learning_rate=1e-2))
    seen = [train_step(policy, optimizer=optimizer, rows=rows, settings=settings).loss for _ in range(4)]
    entropies = [loss.entropy for loss in seen if loss is not None]
    assert entropies == sorted(entropies)
    assert entropies[-1] > entropies[0] + 0.05


@torch.no_grad()
def _distribution(policy: PolicyModel) -> torch.Tensor:
    """Probabilities of all next tokens after the prompt [5]."""
    rows = [make_row([5], [token]) for token in range(32)]
    (batch,) = pack(rows, token_budget=64)
    return policy.score(batch).logprob_N.exp()
