"""Minibatches: tasks stay whole, every row is in one of them, and the batch alone says in which."""

import numpy as np
import pytest
import torch

from astraflow.recipe.algorithm import SeqMeanTokenMean
from astraflow_trainer.batches.rows import TrainingRow
from astraflow_trainer.ranks.reductions import OneRank
from astraflow_trainer.step.minibatches import Minibatch, Packing, minibatches
from support.tiny_training import make_rows

PACKING = Packing(token_budget=30, lane_tokens=None, attention_tokens=96.0)


def _made(rows: list[TrainingRow], *, number: int, known: list[TrainingRow] | None = None) -> list[Minibatch]:
    """Of rows whose tokens' advantages are the row's reward plus a hundredth of their place."""
    advantages = [row.reward + np.arange(row.num_trained_tokens) / 100 for row in rows]
    return list(
        minibatches(
            rows,
            advantages,
            tasks=[row.origin.task_id for row in known or rows],
            number=number,
            packing=PACKING,
            aggregation=SeqMeanTokenMean(),
            ranks=OneRank(),
        )
    )


def _tokens(minibatch: Minibatch) -> list[tuple[int, float]]:
    """Token ids and advantages of all micro-batches."""
    pairs = []
    for batch in minibatch.batches:
        advantages = [round(value, 4) for value in minibatch.advantage_of(batch).tolist()]
        pairs += zip(batch.target_N.tolist(), advantages, strict=True)
    return sorted(pairs)


def _expected(rows: list[TrainingRow]) -> list[tuple[int, float]]:
    return sorted(
        (int(token), round(row.reward + place / 100, 4))
        for row in rows
        for place, token in enumerate(row.token_ids[row.loss_mask])
    )


@pytest.mark.parametrize("number", [1, 2, 3, 5, 99])
def test_every_token_has_its_advantage_in_one_update(number: int) -> None:
    rows = make_rows(num_rows=20)
    made = _made(rows, number=number)
    assert len(made) == min(number, 5)
    assert sum(part.num_tokens for part in made) == sum(row.num_trained_tokens for row in rows)
    assert sorted(pair for part in made for pair in _tokens(part)) == _expected(rows)
    for part in made:
        # Each update averages over its own rows.
        lengths = torch.bincount(torch.cat([batch.row_N for batch in part.batches]))
        assert float((part.weight_R * lengths).sum()) == pytest.approx(1.0)


def test_a_rank_with_some_of_the_rows_has_them_in_the_same_updates() -> None:
    rows = make_rows(num_rows=20)
    whole = _made(rows, number=3)
    shares = [_made(share, number=3, known=rows) for share in (rows[::2], rows[1::2])]
    assert [sorted(_tokens(one) + _tokens(other)) for one, other in zip(*shares, strict=True)] == [
        _tokens(part) for part in whole
    ]


def test_nothing_to_train_on_is_no_update() -> None:
    assert _made([], number=3) == []
