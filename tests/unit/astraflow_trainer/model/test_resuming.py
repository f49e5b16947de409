"""Where a trainer goes on: rollbacks that no checkpoint knows of, and those that are behind it."""

from dataclasses import replace
from functools import partial

import pytest

from astraflow_trainer.model.checkpoint import Position
from astraflow_trainer.model.resuming import PublishedStart, in_place_of_damaged, pending_rollback
from astraflow_weights.publish.version_writer import CommittedVersion
from support.published_models import committed

Versions = list[CommittedVersion]


def log(*rollback_of: int | None) -> Versions:
    """Versions 0, 1, 2 …, each with weights of its own, or those of the version it goes back to."""
    versions: Versions = []
    for number, old in enumerate(rollback_of):
        root = bytes([number]) if old is None else versions[old].model_root
        versions.append(committed(number, model_root=root, rollback_of=old))
    return versions


def at(*versions: int, learning_rate: float | None = None) -> list[Position]:
    """Checkpoints of these versions, taken at steps of the same numbers."""
    position = partial(Position, learning_rate=learning_rate)
    return [position(step=version, version=version, optimizer_steps=version) for version in versions]


PLAIN = log(None, None, None, None)
BACK = log(None, None, None, None, 1)
TWICE = log(None, None, None, None, 1, None, 2)
SINCE = log(None, None, None, None, 1, None)


@pytest.mark.parametrize(
    ("versions", "positions"),
    [([], []), (PLAIN, []), (PLAIN, at(2)), (BACK, at(1, 4)), (SINCE, at(4)), (SINCE, at(5)), (TWICE, at(6))],
)
def test_a_checkpoint_since_the_newest_rollback_is_where_to_go_on(
    versions: Versions, positions: list[Position]
) -> None:
    assert pending_rollback(versions, positions, durable_step=0, finished_step=9) is None


PENDING = [
    (BACK, at(3), None),
    (BACK, at(1, 3), 1),
    (BACK, [], None),
    (TWICE, at(4), None),
    (TWICE, at(1, 2, 5), 2),
    (log(None, None, None, 1, 2, 3), at(1, 2), 1),
]


@pytest.mark.parametrize(("versions", "positions", "checkpoint"), PENDING)
def test_otherwise_the_newest_weights_with_an_older_optimizer(
    versions: Versions, positions: list[Position], checkpoint: int | None
) -> None:
    found = pending_rollback(versions, positions, durable_step=3, finished_step=9)
    assert found is not None
    assert (found.version, found.rollback_of) == (len(versions) - 1, versions[-1].rollback_of)
    assert found.checkpoint == checkpoint


def test_the_peak_that_an_operator_set_stays_in_force() -> None:
    found = pending_rollback(BACK, at(1, 3, learning_rate=0.5), durable_step=0, finished_step=9)
    assert found == PublishedStart(step=9, version=4, rollback_of=1, checkpoint=1, learning_rate=0.5)


@pytest.mark.parametrize(("versions", "held"), [((1, 3), 1.0), ((2, 3), 3.0)])
def test_running_baselines_are_those_of_the_optimizer_or_else_the_newest(
    versions: tuple[int, ...], held: float
) -> None:
    positions = [replace(position, baselines={"b": float(position.step)}) for position in at(*versions)]
    found = pending_rollback(BACK, positions, durable_step=0, finished_step=9)
    assert found is not None
    assert found.baselines == {"b": held}


def test_where_training_went_on_since_a_missing_checkpoint_is_complained_of() -> None:
    """The caller sees a checkpoint before the durable step and names the folder that it needs."""
    assert pending_rollback(SINCE, at(3), durable_step=4, finished_step=9) is None
    assert pending_rollback(SINCE, [], durable_step=4, finished_step=9) is None


def test_weights_that_were_given_up_never_come_back_where_the_server_kept_the_batches() -> None:
    """A replay from the old checkpoint would publish them again: the newest weights are taken up instead."""
    found = pending_rollback(SINCE, at(3), durable_step=3, finished_step=9)
    assert found is not None
    assert (found.version, found.checkpoint) == (5, None)


@pytest.mark.parametrize(
    ("positions", "durable_step", "finished_step", "step", "checkpoint"),
    [
        (at(1), 3, 3, 3, 1),
        (at(1), 2, 4, 3, 1),
        ([], 3, 3, 3, None),
        # Steps 4 and 5 were skipped: they changed no weights.
        (at(1), 5, 5, 5, 1),
    ],
)
def test_published_weights_make_up_for_a_damaged_checkpoint_whose_batches_were_released(
    positions: list[Position], durable_step: int, finished_step: int, step: int, checkpoint: int | None
) -> None:
    found = in_place_of_damaged(PLAIN, positions, durable_step=durable_step, finished_step=finished_step)
    assert found is not None
    assert (found.version, found.step, found.checkpoint) == (3, step, checkpoint)
    assert found.rollback_of is None


@pytest.mark.parametrize(
    ("versions", "positions", "durable_step", "finished_step"),
    [
        # The batches since are retained: an exact replay.
        (PLAIN, at(2), 2, 3),
        # Weights of a step that the server does not know are not the ledger's.
        (PLAIN, at(1), 2, 2),
        ([], [], 0, 0),
        ([], at(1), 2, 2),
    ],
)
def test_otherwise_the_older_checkpoint_is_replayed_from_or_refused(
    versions: Versions, positions: list[Position], durable_step: int, finished_step: int
) -> None:
    assert (
        in_place_of_damaged(versions, positions, durable_step=durable_step, finished_step=finished_step)
        is None
    )
