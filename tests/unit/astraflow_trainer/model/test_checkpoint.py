"""Checkpoints resume bit for bit, appear whole or not at all, and refuse what does not fit."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from astraflow.recipe import OptimizerSettings
from astraflow_trainer.batches.rows import TrainingRow
from astraflow_trainer.model.checkpoint import CheckpointError, CheckpointStore
from astraflow_trainer.model.model import PolicyModel, local_part
from astraflow_trainer.model.optimizer import MasterOptimizer
from astraflow_trainer.step.step import StepSettings, train_step

MakePolicy = Callable[..., PolicyModel]
MakeRows = Callable[..., list[TrainingRow]]
SETTINGS = OptimizerSettings(learning_rate=1e-2)


def _train(
    policy: PolicyModel, optimizer: MasterOptimizer, make_rows: MakeRows, *, steps: range
) -> list[float]:
    losses = []
    for step in steps:
        metrics = train_step(policy, optimizer=optimizer, rows=make_rows(seed=step), settings=StepSettings())
        assert metrics.loss is not None
        losses.append(metrics.loss.loss)
    return losses


def _state(optimizer: MasterOptimizer) -> dict[str, torch.Tensor]:
    return {name: local_part(value).detach().clone() for name, value in optimizer.state().items()}


def test_resuming_continues_bit_for_bit(make_policy: MakePolicy, make_rows: MakeRows, tmp_path: Path) -> None:
    policy = make_policy()
    optimizer = MasterOptimizer(policy, settings=SETTINGS)
    store = CheckpointStore(tmp_path, keep=2)
    _train(policy, optimizer, make_rows, steps=range(3))
    store.write(store.stage(optimizer, step=3, version=3))
    torch.manual_seed(7)
    straight = _train(policy, optimizer, make_rows, steps=range(3, 6))
    expected = _state(optimizer)

    resumed_policy = make_policy(seed=9)
    resumed = MasterOptimizer(resumed_policy, settings=SETTINGS)
    position = CheckpointStore(tmp_path, keep=2).restore(resumed)
    assert position is not None
    assert (position.step, position.version, position.optimizer_steps) == (3, 3, 3)
    assert _train(resumed_policy, resumed, make_rows, steps=range(3, 6)) == straight
    for name, value in _state(resumed).items():
        assert torch.equal(value, expected[name]), name


def test_staging_is_a_copy_that_later_steps_do_not_change(
    make_policy: MakePolicy, make_rows: MakeRows, tmp_path: Path
) -> None:
    policy = make_policy()
    optimizer = MasterOptimizer(policy, settings=SETTINGS)
    _train(policy, optimizer, make_rows, steps=range(1))
    store = CheckpointStore(tmp_path, keep=1)
    staged, expected = store.stage(optimizer, step=1, version=1), _state(optimizer)
    _train(policy, optimizer, make_rows, steps=range(1, 3))
    store.write(staged)
    resumed = MasterOptimizer(make_policy(seed=9), settings=SETTINGS)
    store.restore(resumed)
    assert all(torch.equal(value, expected[name]) for name, value in _state(resumed).items())


def test_random_state_is_restored(make_policy: MakePolicy, tmp_path: Path) -> None:
    optimizer = MasterOptimizer(make_policy(), settings=SETTINGS)
    store = CheckpointStore(tmp_path, keep=1)
    store.write(store.stage(optimizer, step=0, version=0))
    expected = torch.rand(3)
    store.restore(optimizer)
    assert torch.equal(torch.rand(3), expected)


def test_only_the_newest_are_kept_and_rewriting_one_is_harmless(
    make_policy: MakePolicy, tmp_path: Path
) -> None:
    optimizer = MasterOptimizer(make_policy(), settings=SETTINGS)
    store = CheckpointStore(tmp_path, keep=2)
    for step in (1, 2, 3):
        store.write(store.stage(optimizer, step=step, version=step))
    assert store.write(store.stage(optimizer, step=3, version=3)).name == "step-000000000003"
    assert store.steps() == [2, 3]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000000000002", "step-000000000003"]


def test_a_learning_rate_set_by_an_operator_is_restored_also_when_set_after_the_checkpoint(
    make_policy: MakePolicy, tmp_path: Path
) -> None:
    optimizer = MasterOptimizer(make_policy(), settings=SETTINGS)
    store = CheckpointStore(tmp_path, keep=2)
    path = store.write(store.stage(optimizer, step=1, version=1))
    tensors = {file.name: file.read_bytes() for file in path.glob("*.distcp")}
    optimizer.set_learning_rate(0.125)
    assert store.write(store.stage(optimizer, step=1, version=1)) == path
    assert {file.name: file.read_bytes() for file in path.glob("*.distcp")} == tensors

    resumed = MasterOptimizer(make_policy(), settings=SETTINGS)
    position = CheckpointStore(tmp_path, keep=2).restore(resumed)
    assert position is not None
    assert position.learning_rate == resumed.peak_learning_rate == 0.125
    resumed_store = CheckpointStore(tmp_path, keep=2)
    resumed_store.write(resumed_store.stage(resumed, step=2, version=2))
    later = MasterOptimizer(make_policy(), settings=SETTINGS)
    resumed_store.restore(later)
    assert later.peak_learning_rate == 0.125, "it outlives the checkpoint it was set in"


def test_without_an_operator_the_settings_decide_the_learning_rate(
    make_policy: MakePolicy, tmp_path: Path
) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    store.write(store.stage(MasterOptimizer(make_policy(), settings=SETTINGS), step=1, version=1))
    resumed = MasterOptimizer(make_policy(), settings=SETTINGS.model_copy(update={"learning_rate": 0.0625}))
    position = store.restore(resumed)
    assert position is not None
    assert (position.learning_rate, resumed.peak_learning_rate) == (None, 0.0625)


def test_a_half_written_checkpoint_is_ignored_and_swept(make_policy: MakePolicy, tmp_path: Path) -> None:
    optimizer = MasterOptimizer(make_policy(), settings=SETTINGS)
    store = CheckpointStore(tmp_path, keep=2)
    store.write(store.stage(optimizer, step=1, version=1))
    partial = tmp_path / ".partial-step-000000000002"
    partial.mkdir()
    (partial / "__0_0.distcp").write_bytes(b"half")
    position = CheckpointStore(tmp_path, keep=2).restore(optimizer)
    assert position is not None
    assert position.step == 1
    store.write(store.stage(optimizer, step=2, version=2))
    assert store.steps() == [1, 2]
    assert not partial.exists()


def test_an_empty_directory_has_nothing_to_restore(make_policy: MakePolicy, tmp_path: Path) -> None:
    optimizer = MasterOptimizer(make_policy(), settings=SETTINGS)
    assert CheckpointStore(tmp_path / "new", keep=1).restore(optimizer) is None


def test_another_model_or_schema_is_refused_with_the_remedy(make_policy: MakePolicy, tmp_path: Path) -> None:
    optimizer = MasterOptimizer(make_policy(), settings=SETTINGS)
    store = CheckpointStore(tmp_path, keep=1)
    path = store.write(store.stage(optimizer, step=1, version=1))
    wider = make_policy(intermediate_size=48)
    with pytest.raises(CheckpointError, match=r"\(16, 32\), this model needs \(16, 48\); resume with"):
        store.restore(MasterOptimizer(wider, settings=SETTINGS))
    position = json.loads((path / "position.json").read_text())
    (path / "position.json").write_text(json.dumps({**position, "schema_version": 99}))
    with pytest.raises(CheckpointError, match="schema version 99, this trainer reads 2"):
        store.restore(optimizer)


def test_keeping_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="keep 0 must be at least 1"):
        CheckpointStore(tmp_path, keep=0)


def test_checkpoints_of_steps_that_the_server_forgot_are_dropped(
    make_policy: MakePolicy, make_rows: MakeRows, tmp_path: Path
) -> None:
    """Step 3 will be another one: its old checkpoint must not be taken for the new one's."""
    policy = make_policy()
    optimizer = MasterOptimizer(policy, settings=SETTINGS)
    store = CheckpointStore(tmp_path, keep=2)
    for step in (2, 3):
        _train(policy, optimizer, make_rows, steps=range(step, step + 1))
        store.write(store.stage(optimizer, step=step, version=step))
    position = store.restore(optimizer, at_most=2)
    assert position is not None
    assert (position.step, store.steps()) == (2, [2])
    assert store.restore(optimizer, at_most=1) is None


def test_a_checkpoint_of_weights_that_were_given_up_is_replaced(
    make_policy: MakePolicy, make_rows: MakeRows, tmp_path: Path
) -> None:
    policy = make_policy()
    optimizer = MasterOptimizer(policy, settings=SETTINGS)
    store = CheckpointStore(tmp_path, keep=2)
    _train(policy, optimizer, make_rows, steps=range(1))
    store.write(store.stage(optimizer, step=3, version=3))
    given_up = _state(optimizer)
    _train(policy, optimizer, make_rows, steps=range(1, 2))
    store.write(store.stage(optimizer, step=3, version=3))
    unchanged = MasterOptimizer(make_policy(seed=9), settings=SETTINGS)
    store.restore(unchanged)
    assert all(torch.equal(value, given_up[name]) for name, value in _state(unchanged).items())
    store.write(store.stage(optimizer, step=3, version=5))
    assert [(position.step, position.version) for position in store.positions()] == [(3, 5)]
    resumed = MasterOptimizer(make_policy(seed=9), settings=SETTINGS)
    store.restore(resumed)
    expected = _state(optimizer)
    assert all(torch.equal(value, expected[name]) for name, value in _state(resumed).items())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000000000003"]


def test_a_chosen_step_is_restored_and_later_ones_stay(
    make_policy: MakePolicy, make_rows: MakeRows, tmp_path: Path
) -> None:
    policy = make_policy()
    optimizer = MasterOptimizer(policy, settings=SETTINGS)
    store = CheckpointStore(tmp_path, keep=3)
    for step in (1, 2, 3):
        _train(policy, optimizer, make_rows, steps=range(step - 1, step))
        store.write(store.stage(optimizer, step=step, version=step))
    position = store.restore(MasterOptimizer(make_policy(seed=9), settings=SETTINGS), step=2)
    assert position is not None
    assert (position.step, store.steps()) == (2, [1, 2, 3])
    store.forget_after(1)
    assert store.steps() == [1]
