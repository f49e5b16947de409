"""A row that cannot be trained on takes its group with it, on every rank, and nothing else."""

import pytest
from structlog.testing import capture_logs

from astraflow.recipe import RowLimits
from astraflow_trainer.batches.fitting import fitting_rows
from astraflow_trainer.batches.rows import RowOrigin, TrainingRow
from astraflow_trainer.ranks.reductions import OneRank
from support.rank_threads import ThreadRanks, run_ranks
from support.tiny_training import make_row

LIMITS = RowLimits(max_tokens=4, vocab_size=10)


def _row(name: str, tokens: list[int], *, task: str, role: str = "solver") -> TrainingRow:
    return make_row([1], tokens, name=name, group=RowOrigin(task, role))


def test_rows_within_the_limits_stay_as_they_are() -> None:
    rows = [_row("a", [9, 9, 9], task="t"), _row("b", [0], task="t")]
    found = fitting_rows(rows, limits=LIMITS, ranks=OneRank())
    assert (found.rows, found.num_left_out) == (rows, 0)


@pytest.mark.parametrize(
    ("tokens", "reason", "said"),
    [
        ([2, 3, 4, 5], "too_long_to_train", "bad: 5 tokens, trainer.tokens_per_microbatch is 4"),
        ([10], "token_unknown", "bad: token id 10, the model knows ids from 0 to 9"),
    ],
)
def test_a_group_with_a_bad_row_is_left_out_and_named(tokens: list[int], reason: str, said: str) -> None:
    rows = [
        _row("bad", tokens, task="t"),
        _row("same-group", [2], task="t"),
        _row("other-role", [2], task="t", role="judge"),
        _row("other-task", [2], task="u"),
    ]
    with capture_logs() as lines:
        found = fitting_rows(rows, limits=LIMITS, ranks=OneRank())
    assert [row.trajectory_id for row in found.rows] == ["other-role", "other-task"]
    assert found.num_left_out == 2
    [line] = lines
    assert (line["task_id"], line["role"], line["reason"]) == ("t", "solver", reason)
    assert line["detail"].startswith(said)


def test_where_only_the_model_knows_its_vocabulary_lengths_are_judged() -> None:
    found = fitting_rows([_row("a", [10], task="t")], limits=RowLimits(4, None), ranks=OneRank())
    assert found.num_left_out == 0


def test_a_group_that_is_spread_over_ranks_is_left_out_on_all() -> None:
    held = [
        [_row("bad", [10], task="t"), _row("a", [1], task="u")],
        [_row("b", [1], task="t"), _row("c", [1], task="u")],
        [],
    ]

    def of(ranks: ThreadRanks) -> tuple[list[str], int]:
        found = fitting_rows(held[ranks.index], limits=LIMITS, ranks=ranks)
        return [row.trajectory_id for row in found.rows], found.num_left_out

    assert run_ranks(3, of) == [(["a"], 2), (["c"], 2), ([], 2)]
