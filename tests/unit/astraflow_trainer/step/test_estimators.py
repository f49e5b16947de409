"""One estimator per role over the rows of all ranks: the same numbers on every rank, for any number of them."""

import json
from collections.abc import Sequence
from dataclasses import astuple
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from astraflow.plugins import RewardedRows
from astraflow.recipe.advantage import DrGrpo, GroupBy, OverlongSettings, Rae, Reinforce
from astraflow_trainer.batches.rank_batches import balanced_shares
from astraflow_trainer.batches.rows import RowOrigin, TrainingRow
from astraflow_trainer.ranks.reductions import OneRank, Ranks
from astraflow_trainer.step.advantages import Advantages
from astraflow_trainer.step.estimators import (
    MAX_BASELINES,
    Estimator,
    RankedRows,
    batch_advantages,
    note_baselines,
    overlong_penalties,
    role_metrics,
)
from astraflow_trainer.step.plugins import PluginAdvantage
from support.tiny_training import make_row

OF_ROLE: dict[str, Estimator] = {"judge": Reinforce(), "player": Rae()}


def _rows(*rows: tuple[str, str, float]) -> list[TrainingRow]:
    """Rows of (task, role, reward), each an episode of its own from source `s`."""
    return [
        make_row([1], [2] * (1 + member % 3), reward=reward, group=RowOrigin(task, role, member, 0, "s"))
        for member, (task, role, reward) in enumerate(rows)
    ]


def _advantages(
    rows: list[TrainingRow], of_role: dict[str, Estimator], *, default: Estimator | None = None
) -> Advantages:
    everybody = RankedRows.gathered(rows, ranks=OneRank())
    return batch_advantages(everybody, default=default or DrGrpo(), of_role=of_role, baselines={})


def test_each_role_has_its_own_estimator_and_the_others_the_policys() -> None:
    rows = _rows(("t", "solver", 4.0), ("t", "judge", 1.0), ("t", "solver", 1.0), ("t", "player", 2.0))
    result = _advantages(rows, OF_ROLE)
    assert result.values.tolist() == [1.5, 1.0, -1.5, 2.0]
    assert result.baselines == {"role=player/source=s": pytest.approx(0.1)}
    assert (result.num_groups, result.num_zero_variance_groups) == (3, 2)


@pytest.mark.parametrize(
    ("length", "penalty"), [(1, 0.0), (12_288, 0.0), (14_336, 0.25), (16_384, 0.5), (20_000, 0.5)]
)
def test_overlong_answers_lose_reward_by_equation_13_of_dapo(length: int, penalty: float) -> None:
    settings = OverlongSettings(max_tokens=16_384, buffer_tokens=4_096, factor=0.5)
    assert overlong_penalties([length], settings=settings).tolist() == [penalty]
    assert overlong_penalties([length], settings=None).tolist() == [0.0]


def test_metrics_are_of_each_role_and_each_baseline_that_moved() -> None:
    rows = RankedRows.gathered(
        _rows(("t", "solver", 4.0), ("t", "player", 2.0), ("t", "solver", 1.0)), ranks=OneRank()
    )
    result = batch_advantages(rows, default=DrGrpo(), of_role=OF_ROLE, baselines={})
    assert role_metrics(rows, result) == {
        "reward_mean/solver": 2.5,
        "reward_p10/solver": pytest.approx(1.3),
        "reward_p50/solver": 2.5,
        "reward_p90/solver": pytest.approx(3.7),
        "advantage_mean/solver": 0.0,
        "advantage_std/solver": 1.5,
        "reward_mean/player": 2.0,
        **{f"reward_p{share}/player": 2.0 for share in (10, 50, 90)},
        "advantage_mean/player": 2.0,
        "advantage_std/player": 0.0,
        "num_trajectories/solver": 2.0,
        "num_trajectories/player": 1.0,
        "baseline/role=player/source=s": pytest.approx(0.1),
    }


def test_roles_of_equal_settings_share_groups_that_leave_the_role_out() -> None:
    rows = _rows(("t", "planner", 4.0), ("t", "worker", 0.0), ("t", "judge", 7.0))
    per_task = DrGrpo(group_by=(GroupBy.TASK,))
    shared = _advantages(rows, {"planner": per_task, "worker": DrGrpo(group_by=(GroupBy.TASK,))})
    assert shared.values.tolist() == [2.0, -2.0, 0.0]
    apart = _advantages(rows, {"planner": per_task})
    assert apart.values.tolist() == [0.0, 0.0, 0.0]


def test_a_plug_in_of_a_role_gets_the_rows_of_that_role() -> None:
    seen: list[RewardedRows] = []

    def ones(rows: RewardedRows) -> Sequence[float]:
        seen.append(rows)
        return [1.0] * len(rows.rewards)

    rows = _rows(("t", "solver", 4.0), ("t", "judge", 0.5), ("u", "judge", 0.25))
    result = _advantages(rows, {"judge": PluginAdvantage("recipe:Ones", ones)})
    assert result.values.tolist() == [0.0, 1.0, 1.0]
    assert seen == [
        RewardedRows(
            rewards=[0.5, 0.25],
            groups=[0, 1],
            lengths=[2, 3],
        )
    ]


def test_an_empty_batch_has_no_advantages() -> None:
    result = _advantages([], OF_ROLE)
    assert (len(result.values), result.num_groups, result.baselines) == (0, 0, {})


def _on_ranks(rows: list[TrainingRow], shares: list[list[int]]) -> list[tuple[RankedRows, Advantages]]:
    """What each rank computes when they share `rows`."""
    parts = [[rows[position] for position in share] for share in shares]
    told = [
        json.dumps([(row.reward, row.num_trained_tokens, *astuple(row.origin)) for row in part]).encode()
        for part in parts
    ]
    results = []
    for index, part in enumerate(parts):
        ranks = cast("Ranks", SimpleNamespace(index=index, all_gather=lambda _message: told))
        everybody = RankedRows.gathered(part, ranks=ranks)
        results.append(
            (everybody, batch_advantages(everybody, default=DrGrpo(), of_role=OF_ROLE, baselines={}))
        )
    return results


ROLES = st.sampled_from(["solver", "judge", "player"])
ROWS = st.lists(st.tuples(st.sampled_from("tuv"), ROLES, st.floats(-3, 3)), max_size=12)


@given(given_rows=ROWS, num_ranks=st.integers(1, 5))
def test_uneven_rows_over_any_number_of_ranks_get_the_bits_of_one(
    given_rows: list[tuple[str, str, float]], num_ranks: int
) -> None:
    rows = _rows(*given_rows)
    shares = balanced_shares([row.num_tokens for row in rows], num_ranks=num_ranks)
    # Each row is on one rank: none is doubled to fill a share, none is left out.
    assert sorted(position for share in shares for position in share) == list(range(len(rows)))
    expected = _advantages(rows, OF_ROLE)
    for share, (everybody, result) in zip(shares, _on_ranks(rows, shares), strict=True):
        assert result.values[everybody.mine].tolist() == expected.values[share].tolist()
        assert result.baselines == expected.baselines


def test_sources_that_every_batch_brings_anew_take_the_place_of_those_that_changed_longest_ago() -> None:
    baselines = {"lasting": 0.5}
    for step in range(20):
        note_baselines(
            baselines, {f"{step}-{number}": 1.0 for number in range(500)} | {"lasting": float(step)}
        )
    assert len(baselines) == MAX_BASELINES
    assert (baselines["lasting"], "19-0" in baselines, "0-0" in baselines) == (19.0, True, False)
