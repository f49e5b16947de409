"""Checkpoints resume bit for bit, appear whole or not at all, and refuse what does not fit."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from astraflow.errors import IncompatibleError
from astraflow.recipe import AverageSettings, OptimizerSettings
from astraflow_trainer.model import model, optimizer
from astraflow_trainer.model.checkpoint import CheckpointError, CheckpointStore, Position, set_aside_damaged
from astraflow_trainer.model.integrity import sealed, unsealed
from astraflow_trainer.step.step import StepSettings, train_step
from support.damage import flip_a_byte
from support.tiny_training import MakePolicy, copies, make_rows, same_bits

SETTINGS = OptimizerSettings(learning_rate=1e-2)


class Trainee:
    """A policy, its optimizer and its checkpoints."""

    def __init__(
        self,
        policy: model.PolicyModel,
        folder: Path,
        *,
        keep: int = 2,
        settings: OptimizerSettings = SETTINGS,
    ) -> None:
        self.policy, self.folder = policy, folder
        self.optimizer = optimizer.MasterOptimizer(policy, settings=settings)
        self.store = CheckpointStore(folder, keep=keep)

    def train(self, *seeds: int) -> list[float]:
        """The losses of one step for each seed."""
        losses = []
        for seed in seeds:
            rows = make_rows(seed=seed)
            metrics = train_step(self.policy, optimizer=self.optimizer, rows=rows, settings=StepSettings())
            assert metrics.loss is not None
            losses.append(metrics.loss.loss)
        return losses

    def save(self, step: int, *, version: int | None = None) -> Path:
        version = step if version is None else version
        return self.store.write(self.store.stage(self.optimizer, step=step, version=version))

    def restore(self, *, step: int | None = None, at_most: int | None = None) -> Position:
        position = self.store.restore(self.optimizer, step=step, at_most=at_most)
        assert position is not None
        return position

    def state(self) -> dict[str, torch.Tensor]:
        return copies(self.optimizer.state().items())

    def names(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir())


MakeTrainee = Callable[..., Trainee]


@pytest.fixture
def make_trainee(make_policy: MakePolicy, tmp_path: Path) -> MakeTrainee:
    """Builds trainees that share one folder; equal seeds give equal weights."""
    return lambda *, seed=0, **settings: Trainee(make_policy(seed=seed), tmp_path, **settings)


@pytest.fixture
def trainee(make_trainee: MakeTrainee) -> Trainee:
    return make_trainee()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"kind": "adamw_8bit", "schedule": "cosine", "decay_steps": 9},
        {"kind": "muon", "weight_decay": 0.1, "average": AverageSettings(decay=0.5)},
    ],
    ids=["adamw", "adamw_8bit", "muon"],
)
def test_resuming_continues_bit_for_bit(make_trainee: MakeTrainee, changes: dict[str, object]) -> None:
    settings = SETTINGS.model_copy(update=changes)
    trainee = make_trainee(settings=settings)
    trainee.train(0, 1, 2)
    trainee.save(3)
    torch.manual_seed(7)
    straight = trainee.train(3, 4, 5)

    resumed = make_trainee(seed=9, settings=settings)
    position = resumed.restore()
    assert (position.step, position.version, position.optimizer_steps) == (3, 3, 3)
    assert resumed.train(3, 4, 5) == straight
    assert same_bits(resumed.state(), trainee.state())


def test_the_state_of_another_rule_is_refused(trainee: Trainee, make_trainee: MakeTrainee) -> None:
    trainee.save(1)
    other = make_trainee(settings=SETTINGS.model_copy(update={"kind": "muon"}))
    with pytest.raises(CheckpointError, match=r"exp_avg\.\S+ as .*None; resume with the model and the opt"):
        other.restore()


def test_staging_is_a_copy_that_later_steps_leave_alone(trainee: Trainee, make_trainee: MakeTrainee) -> None:
    trainee.train(0)
    staged, expected = trainee.store.stage(trainee.optimizer, step=1, version=1), trainee.state()
    trainee.train(1, 2)
    trainee.store.write(staged)
    resumed = make_trainee(seed=9)
    resumed.restore()
    assert same_bits(resumed.state(), expected)


def test_random_state_is_restored(trainee: Trainee) -> None:
    trainee.save(0)
    expected = torch.rand(3)
    trainee.restore()
    assert torch.equal(torch.rand(3), expected)


def test_only_the_newest_are_kept_and_rewriting_one_is_harmless(trainee: Trainee) -> None:
    for step in (1, 2, 3):
        trainee.save(step)
    assert trainee.save(3).name == "step-000000000003"
    assert trainee.store.steps() == [2, 3]
    assert trainee.names() == ["step-000000000002", "step-000000000003"]


def test_an_operators_learning_rate_outlives_checkpoints(trainee: Trainee, make_trainee: MakeTrainee) -> None:
    path = trainee.save(1)
    tensors = {file.name: file.read_bytes() for file in path.glob("*.distcp")}
    trainee.optimizer.set_learning_rate(0.125)
    assert trainee.save(1) == path
    assert {file.name: file.read_bytes() for file in path.glob("*.distcp")} == tensors

    resumed = make_trainee()
    assert resumed.restore().learning_rate == resumed.optimizer.peak_learning_rate == 0.125
    resumed.save(2)
    later = make_trainee()
    later.restore()
    assert later.optimizer.peak_learning_rate == 0.125, "it outlives the checkpoint it was set in"


def test_a_rate_no_operator_set_is_that_of_the_settings(trainee: Trainee, make_policy: MakePolicy) -> None:
    trainee.save(1)
    settings = SETTINGS.model_copy(update={"learning_rate": 0.0625})
    resumed = optimizer.MasterOptimizer(make_policy(), settings=settings)
    position = trainee.store.restore(resumed)
    assert position is not None
    assert (position.learning_rate, resumed.peak_learning_rate) == (None, 0.0625)


def test_a_half_written_checkpoint_is_ignored_and_swept(trainee: Trainee, tmp_path: Path) -> None:
    trainee.save(1)
    partial = tmp_path / ".partial-step-000000000002"
    partial.mkdir()
    (partial / "__0_0.distcp").write_bytes(b"half")
    position = CheckpointStore(tmp_path, keep=2).restore(trainee.optimizer)
    assert position is not None
    assert position.step == 1
    trainee.save(2)
    assert trainee.store.steps() == [1, 2]
    assert not partial.exists()


def test_another_model_is_refused_with_a_remedy(trainee: Trainee, make_policy: MakePolicy) -> None:
    trainee.save(1)
    wider = optimizer.MasterOptimizer(make_policy(intermediate_size=48), settings=SETTINGS)
    with pytest.raises(CheckpointError, match=r"\(16, 32\), this model needs \(16, 48\); resume with"):
        trainee.store.restore(wider)


@pytest.mark.parametrize("found", [3, 99], ids=["older", "newer"])
def test_a_checkpoint_of_another_schema_is_refused_wherever_it_is_read(trainee: Trainee, found: int) -> None:
    file = trainee.save(1) / "position.json"
    file.write_text(sealed({**unsealed(file), "schema_version": found}))
    for read in (trainee.restore, trainee.store.positions, lambda: set_aside_damaged(trainee.folder)):
        with pytest.raises(IncompatibleError, match=rf"schema version {found}, astraflow \S+ reads 4; "):
            read()


def test_keeping_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="keep 0 must be at least 1"):
        CheckpointStore(tmp_path, keep=0)


def test_checkpoints_of_steps_that_the_server_forgot_are_put_aside(trainee: Trainee) -> None:
    """Step 3 will be another one: its old checkpoint must not be taken for the new one's, nor be lost."""
    for step in (2, 3):
        trainee.train(step)
        trainee.save(step)
    assert (trainee.restore(at_most=2).step, trainee.store.steps()) == (2, [2])
    assert trainee.store.restore(trainee.optimizer, at_most=1) is None
    assert trainee.names() == ["superseded-000001-step-000000000003", "superseded-000002-step-000000000002"]


def test_the_oldest_of_what_was_put_aside_goes_with_a_new_checkpoint_and_never_before(
    trainee: Trainee,
) -> None:
    for step in (1, 1, 1):
        trainee.save(step)
        trainee.store.supersede_after(0)
    assert len(trainee.names()) == 3
    trainee.save(1)
    assert trainee.names() == [f"step-{1:012d}", *(f"superseded-{n:06d}-step-{1:012d}" for n in (2, 3))]


def test_a_checkpoint_of_weights_given_up_is_replaced(trainee: Trainee, make_trainee: MakeTrainee) -> None:
    trainee.train(0)
    trainee.save(3)
    given_up = trainee.state()
    trainee.train(1)
    trainee.save(3)
    unchanged, resumed = make_trainee(seed=9), make_trainee(seed=9)
    unchanged.restore()
    assert same_bits(unchanged.state(), given_up)
    trainee.save(3, version=5)
    assert [(position.step, position.version) for position in trainee.store.positions()] == [(3, 5)]
    resumed.restore()
    assert same_bits(resumed.state(), trainee.state())
    assert trainee.names() == ["step-000000000003", "superseded-000001-step-000000000003"]


def test_a_chosen_step_is_restored_and_later_ones_stay(make_trainee: MakeTrainee) -> None:
    trainee = make_trainee(keep=3)
    for step in (1, 2, 3):
        trainee.train(step)
        trainee.save(step)
    resumed = make_trainee(seed=9, keep=3)
    assert (resumed.restore(step=2).step, resumed.store.steps()) == (2, [1, 2, 3])
    trainee.store.supersede_after(1)
    assert trainee.store.steps() == [1]


def test_what_storage_changed_in_any_file_is_put_aside_and_the_one_before_restored(
    make_trainee: MakeTrainee,
) -> None:
    trainee = make_trainee(keep=9)
    names = [path.name for path in trainee.save(1).iterdir()]
    assert {".metadata", "position.json", "__0_0.distcp"} <= set(names)
    good = trainee.state()
    for step, name in enumerate(names, start=2):
        trainee.train(step)
        flip_a_byte(trainee.save(step) / name)
    assert set_aside_damaged(trainee.folder) == len(names)
    assert trainee.store.steps() == [1]
    assert len(list(trainee.folder.glob("damaged-*-step-*"))) == len(names), "nothing is deleted"
    resumed = make_trainee(seed=9)
    assert resumed.restore().step == 1
    assert same_bits(resumed.state(), good)
    resumed.save(len(names) + 1)
    assert set_aside_damaged(trainee.folder) == 0, "a newer whole one has made up for them"


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "position.json"])
def test_a_missing_or_cut_file_is_damage_too(trainee: Trainee, name: str) -> None:
    (trainee.save(1) / name).unlink()
    os.truncate(trainee.save(2) / name, 10)
    assert set_aside_damaged(trainee.folder) == 2
    assert trainee.store.steps() == []


def test_a_rate_that_an_operator_set_keeps_the_seal_whole(trainee: Trainee) -> None:
    trainee.save(1)
    trainee.optimizer.set_learning_rate(0.125)
    trainee.save(1)
    assert set_aside_damaged(trainee.folder) == 0
