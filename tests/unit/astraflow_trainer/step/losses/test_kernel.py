"""Golden values and gradients of every trust region and anchor, by hand from ratios and advantages."""

import math
from typing import Any

import pytest
import torch

from astraflow.recipe import algorithm
from astraflow_trainer.ranks.reductions import OneRank
from astraflow_trainer.step import losses
from astraflow_trainer.step.losses.second_moment import MaskAbove

RATIOS = [1.5, 0.5, 1.0, 1.1, 0.7]
ADVANTAGES = [1.0, -1.0, 2.0, -1.0, 1.0]
BEHAVIOR = [-2.0, -1.0, -0.5, -3.0, -1.5]


def _loss(
    region: losses.StepRegion | None = None,
    *,
    settings: algorithm.AlgorithmSettings | None = None,
    ratios: list[float] = RATIOS,
    behavior: list[float] = BEHAVIOR,
    rows: list[int] | None = None,
    **columns: list[float],
) -> tuple[float, list[float], losses.LossStatistics]:
    """Value, gradient in the log-probs, and statistics; each token weighs 1 unless told."""
    columns = {"advantage": ADVANTAGES, "weight": [1.0] * len(ratios), "behavior": behavior} | columns
    logprobs = torch.tensor(behavior) + torch.tensor(ratios).log()
    logprobs.requires_grad_()
    inputs = losses.LossInputs(
        row_N=torch.tensor(rows or [0] * len(ratios)),
        num_rows=max(rows or [0]) + 1,
        **{f"{name}_N": torch.tensor(values) for name, values in columns.items()},
    )
    region = algorithm.NoTrustRegion() if region is None else region
    settings = settings or algorithm.AlgorithmSettings(loss=algorithm.NoTrustRegion())
    loss, statistics = losses.policy_loss(logprobs, inputs=inputs, region=region, settings=settings)
    loss.backward()
    assert logprobs.grad is not None
    return float(loss.detach()), logprobs.grad.tolist(), statistics


def _resolved(
    settings: algorithm.AlgorithmSettings,
    logprobs: torch.Tensor,
    behavior: torch.Tensor,
    advantages: torch.Tensor,
) -> losses.StepRegion:
    """The bounds of a step of these tokens."""
    tokens = {"anchor_N": behavior, "advantage_N": advantages}
    return losses.resolve_region(logprobs, **tokens, settings=settings, ranks=OneRank())


def test_rows_on_which_trainer_and_engine_disagree_are_left_out() -> None:
    # r − 1 − log r of 1.5, 0.5, 1, 1.1 and 0.7: 0.0945, 0.1931, 0, 0.0047, 0.0567; rows have means 0.1438 and 0.0205.
    rows = [0, 0, 1, 1, 1]
    agreeing = algorithm.AlgorithmSettings(
        loss=algorithm.NoTrustRegion(), mismatch=algorithm.MismatchSettings(reject=algorithm.KlReject())
    )
    value, gradient, statistics = _loss(settings=agreeing, rows=rows)
    assert value == pytest.approx(-2.0 + 1.1 - 0.7)
    assert gradient == pytest.approx([0.0, 0.0, -2.0, 1.1, -0.7])
    assert statistics.metrics().rejected_fraction == pytest.approx(0.4)
    # As one row their mean is 0.0698: nothing is left out.
    assert _loss(settings=agreeing)[0] == _loss()[0]
    assert _loss()[2].metrics().rejected_fraction == 0.0


def test_the_mismatch_of_tokens_that_went_on_over_a_swap_stands_apart() -> None:
    # r − 1 − log r of 1.5, 0.5, 1, 1.1 and 0.7: 0.0945, 0.1931, 0, 0.0047, 0.0567.
    found = _loss(in_place=[True, False, False, False, True])[2].metrics()
    assert found.in_place_fraction == pytest.approx(0.4)
    assert found.mismatch_kl_in_place == pytest.approx((0.0945 + 0.0567) / 2, abs=1e-4)
    assert found.mismatch_kl_elsewhere == pytest.approx((0.1931 + 0 + 0.0047) / 3, abs=1e-4)
    none = _loss()[2].metrics()
    assert (none.in_place_fraction, none.mismatch_kl_in_place) == (0.0, 0.0)
    assert none.mismatch_kl_elsewhere == none.mismatch_kl == found.mismatch_kl


def test_without_a_trust_region_the_loss_is_minus_ratio_times_advantage() -> None:
    value, gradient, _ = _loss()
    assert value == pytest.approx(-1.5 + 0.5 - 2.0 + 1.1 - 0.7)
    assert gradient == pytest.approx([-1.5, 0.5, -2.0, 1.1, -0.7])


def test_ppo_clip_cuts_only_the_side_that_moves_away() -> None:
    value, gradient, statistics = _loss(algorithm.PpoClip(low=0.2, high=0.28))
    # 1.5 with A > 0 counts as 1.28; 0.5 with A < 0 as 0.8; 0.7 with A > 0 is not cut.
    assert value == pytest.approx(-1.28 + 0.8 - 2.0 + 1.1 - 0.7)
    assert gradient == pytest.approx([0.0, 0.0, -2.0, 1.1, -0.7])
    metrics = statistics.metrics()
    assert (metrics.clip_fraction_up, metrics.clip_fraction_down) == pytest.approx((0.2, 0.2))


def test_dual_clip_bounds_the_loss_of_a_negative_advantage() -> None:
    tokens: dict[str, Any] = {"ratios": [4.0, 2.0], "advantage": [-1.0, -1.0], "behavior": [-4.0, -4.0]}
    value, gradient, statistics = _loss(algorithm.DualClip(low=0.2, high=0.28, cap=3.0), **tokens)
    assert value == pytest.approx(3.0 + 2.0)
    assert gradient == pytest.approx([0.0, 2.0])
    assert statistics.metrics().clip_fraction_up == pytest.approx(0.5)


def test_cispo_keeps_the_gradient_of_clipped_tokens() -> None:
    tokens: dict[str, Any] = {"ratios": [8.0, 0.5], "advantage": [1.0, -1.0], "behavior": [-4.0, -1.0]}
    value, gradient, _ = _loss(algorithm.Cispo(min_ratio=0.0, max_ratio=5.0), **tokens)
    first, second = -4.0 + math.log(8.0), -1.0 + math.log(0.5)
    assert value == pytest.approx(-5.0 * first + 0.5 * second)
    assert gradient == pytest.approx([-5.0, 0.5])


def test_gspo_clips_the_geometric_mean_of_the_row() -> None:
    # Row 0: mean log-ratio (0.002 + 0.001) / 2 = 0.0015, above log(1.0004): cut. Row 1: 0.0002, inside.
    ratios = [math.exp(0.002), math.exp(0.001), math.exp(0.0003), math.exp(0.0001)]
    value, gradient, statistics = _loss(
        algorithm.Gspo(low=3e-4, high=4e-4),
        ratios=ratios,
        advantage=[1.0, 1.0, 2.0, 2.0],
        behavior=[-1.0] * 4,
        rows=[0, 0, 1, 1],
    )
    inside = math.exp(0.0002)
    assert value == pytest.approx(-2 * 1.0004 - 4 * inside, abs=1e-6)
    assert gradient == pytest.approx([0.0, 0.0, -2 * inside, -2 * inside], abs=1e-6)
    assert statistics.metrics().ratio_max == pytest.approx(math.exp(0.0015), abs=1e-6)


def test_mask_drops_large_squares_on_both_sides() -> None:
    threshold = math.log(0.7) ** 2
    value, gradient, statistics = _loss(MaskAbove(threshold=threshold + 1e-9))
    # |log 1.5| = 0.405 and |log 0.5| = 0.693 are above |log 0.7| = 0.357.
    assert value == pytest.approx(-2.0 + 1.1 - 0.7)
    assert gradient == pytest.approx([0.0, 0.0, -2.0, 1.1, -0.7])
    assert statistics.metrics().masked_fraction == pytest.approx(0.4)


def test_proximal_anchor_weighs_by_the_bounded_mismatch() -> None:
    region = algorithm.PpoClip(low=0.2, high=0.2)
    value, gradient, _ = _loss(
        region,
        ratios=[4.0 * 1.1, 0.9],
        advantage=[1.0, 1.0],
        behavior=[-2.0, -1.0],
        proximal=[-2.0 + math.log(4.0), -1.0],
        settings=algorithm.AlgorithmSettings(anchor=algorithm.ProximalAnchor(), loss=region),
    )
    # Token 0: ratio 1.1 to the anchor, weight min(4, 2); token 1: ratio 0.9, weight 1.
    assert value == pytest.approx(-2.0 * 1.1 - 0.9)
    assert gradient == pytest.approx([-2.2, -0.9])


def test_proximal_anchor_without_its_log_probs_is_refused() -> None:
    settings = algorithm.AlgorithmSettings(anchor=algorithm.ProximalAnchor(), loss=algorithm.NoTrustRegion())
    with pytest.raises(ValueError, match="pass proximal_N"):
        _loss(settings=settings)


def test_weights_scale_each_token() -> None:
    value, gradient, _ = _loss(weight=[0.5, 0.0, 0.25, 0.0, 0.0])
    assert value == pytest.approx(-0.75 - 0.5)
    assert gradient == pytest.approx([-0.75, 0.0, -0.5, 0.0, 0.0])


def test_log_ratios_are_clamped_before_the_exponential() -> None:
    value, gradient, _ = _loss(ratios=[math.exp(25)], advantage=[1.0], behavior=[-30.0])
    assert value == pytest.approx(-math.exp(20), rel=1e-5)
    assert gradient == [0.0]


def test_statistics_match_hand_computed_numbers() -> None:
    _, _, statistics = _loss()
    metrics = statistics.metrics()
    logs = [math.log(ratio) for ratio in RATIOS]
    assert metrics.num_tokens == 5
    assert (metrics.ratio_min, metrics.ratio_mean, metrics.ratio_max) == pytest.approx((0.5, 4.8 / 5, 1.5))
    squares = 2.25 + 0.25 + 1 + 1.21 + 0.49
    assert metrics.effective_sample_size == pytest.approx(4.8**2 / (5 * squares), rel=1e-5)
    mismatch_kl = sum(ratio - 1 - log for ratio, log in zip(RATIOS, logs, strict=True)) / 5
    assert metrics.mismatch_kl == pytest.approx(mismatch_kl, rel=1e-5)
    assert metrics.max_abs_log_ratio == pytest.approx(math.log(2), rel=1e-6)
    assert metrics.second_moment == pytest.approx(sum(log**2 for log in logs) / 5, rel=1e-5)
    # Only 1.5 with A > 0 and 0.5 with A < 0 moved away.
    away = (math.log(1.5) ** 2 + math.log(2) ** 2) / 2
    assert metrics.second_moment_away == pytest.approx(away, rel=1e-5)


@pytest.mark.parametrize(
    "region", [algorithm.M2po(budget=0.1), algorithm.M2poClip(budget=0.1), algorithm.M2poMask(budget=0.1)]
)
def test_step_wide_bounds_do_not_depend_on_token_order(
    region: algorithm.M2po | algorithm.M2poClip | algorithm.M2poMask,
) -> None:
    generator = torch.Generator().manual_seed(1)
    behavior = -torch.rand(200, generator=generator)
    logprobs = behavior + torch.randn(200, generator=generator)
    advantages = torch.randn(200, generator=generator)
    order = torch.randperm(200, generator=generator)
    settings = algorithm.AlgorithmSettings(loss=region)
    orders = (torch.arange(200), order)
    first, second = (_resolved(settings, logprobs[o], behavior[o], advantages[o]) for o in orders)
    assert first == second
    assert first != region


def test_m2po_takes_bounds_over_tokens_that_moved_away_only() -> None:
    """A restoring token, however far, neither counts nor is cut."""
    settings = algorithm.AlgorithmSettings(loss=algorithm.M2po(budget=0.04))
    logprobs, behavior = torch.tensor([-1.0, -3.0]), torch.tensor([-1.1, -1.0])
    region = _resolved(settings, logprobs, behavior, torch.tensor([1.0, 1.0]))
    assert region == algorithm.PpoClip(low=1.0, high=1e5)
