"""Publishing keeps a whole chain in the store, across crashes at every window and across resumes."""

from pathlib import Path

import numpy as np
import pytest

from astraflow.errors import ConflictError
from astraflow_kit import failpoints
from astraflow_kit.failpoints import FailpointRaised
from astraflow_weights.errors import Fenced, ModelMismatch
from astraflow_weights.settings import PublishSettings
from support.armed import armed
from support.published_models import (
    ModelPublisher,
    open_writer,
    publish_all,
    published,
    pulled,
    read_log,
    steps,
)
from support.weight_models import FaultyStore, copied, make_model, same_model, trained


def test_snapshots_come_back_at_the_latest_after_the_set_number(store: FaultyStore) -> None:
    settings = PublishSettings(snapshot_every_versions=3, snapshot_chain_ratio=100)
    committed = publish_all(ModelPublisher(open_writer(store, settings=settings)), steps(8))
    assert [entry.version for entry in committed if entry.snapshot_bytes] == [0, 3, 6]
    assert all(entry.delta_bytes for entry in committed[1:])
    first, second, *_ = committed
    assert (first.delta_bytes, first.density) == (0, 0.0)
    assert 0 < second.delta_bytes < first.snapshot_bytes
    assert 0.002 < second.density < 0.02


def test_the_model_may_change_after_the_call(store: FaultyStore, publisher: ModelPublisher) -> None:
    before, after = steps(2)
    live = copied(before)
    publisher.publish(live, step=0)
    for name, array in after.items():
        live[name][...] = array
    publisher.publish(live, step=1)
    assert same_model(pulled(store, 1), after)


def test_a_step_that_changes_nothing_is_a_version(publisher: ModelPublisher) -> None:
    _, committed = publish_all(publisher, [make_model(), make_model()])
    assert (committed.version, committed.num_changed) == (1, 0)


@pytest.fixture
def publisher(store: FaultyStore) -> ModelPublisher:
    return ModelPublisher(open_writer(store))


@pytest.mark.parametrize(
    "window",
    ["weights.publish.parts_uploaded", "weights.publish.before_manifest", "weights.publish.after_manifest"],
)
def test_a_publication_cut_off_anywhere_is_completed_by_repeating_it(
    store: FaultyStore, publisher: ModelPublisher, tmp_path: Path, window: str
) -> None:
    models = steps(3)
    publisher.publish(models[0], step=0)
    log = tmp_path / "failpoints.log"
    with armed(f"{window}=raise@1", log_path=log):
        with pytest.raises(FailpointRaised):
            publisher.publish(models[1], step=1)
        committed = publisher.publish(models[1], step=1)
    assert [hit.name for hit in failpoints.read_hits(log) if hit.acted] == [window]
    assert committed.version == 1
    assert committed.existed is (window == "weights.publish.after_manifest")
    assert publisher.publish(models[2], step=2).version == 2
    assert same_model(pulled(store, 2), models[2])


def test_going_on_after_a_publication_of_unknown_outcome_is_refused(publisher: ModelPublisher) -> None:
    """Version 1 is in the log, but the publisher never learnt it: its base is version 0."""
    models = steps(3)
    publisher.publish(models[0], step=0)
    with armed("weights.publish.after_manifest=raise@1"), pytest.raises(FailpointRaised):
        publisher.publish(models[1], step=1)
    with pytest.raises(ConflictError, match=r"not the newest version in the log \(1\)"):
        publisher.publish(models[2], step=2)


def test_a_resumed_trainer_repeats_steps_and_goes_on(store: FaultyStore, publisher: ModelPublisher) -> None:
    """Steps 1 and 2 are recomputed: the first gives the same bytes, the second differs."""
    models = steps(3)
    publish_all(publisher, models)
    resumed = ModelPublisher(open_writer(store, 2), base=pulled(store, 2))
    same = resumed.publish(models[1], step=1)
    assert (same.version, same.existed) == (1, True)
    other = trained(models[1], 77)
    different = resumed.publish(other, step=2)
    assert (different.version, different.writer_epoch, different.existed) == (3, 2, False)
    assert different.delta_bytes > 0
    assert same_model(pulled(store, 3), other)
    with pytest.raises(Fenced):
        publisher.publish(trained(other, 5), step=3)


@pytest.mark.parametrize("known", [False, True])
def test_a_base_that_is_not_the_newest_version_is_refused(store: FaultyStore, known: bool) -> None:
    models = published(store, 2)
    with pytest.raises(ConflictError, match="fetch that with a Mirror"):
        ModelPublisher(open_writer(store, 2), base=models[0] if known else None)


def test_another_architecture_is_refused_and_changes_nothing(publisher: ModelPublisher) -> None:
    publisher.publish(make_model(), step=0)
    with pytest.raises(ModelMismatch, match="publish this model as a new policy"):
        publisher.publish(make_model(rows=25), step=1)
    assert publisher.publish(trained(make_model(), 1), step=1).version == 1


def test_learning_rate_and_counts_are_in_the_manifest(store: FaultyStore, publisher: ModelPublisher) -> None:
    before, after = steps(2)
    publisher.publish(before, step=0)
    committed = publisher.publish(after, step=1, learning_rate=3e-6)
    log = read_log(store)
    manifest = log.manifest(1)
    changed = sum(int(np.count_nonzero(before[name] != after[name])) for name in before)
    assert (manifest.learning_rate, manifest.num_changed, committed.num_changed) == (3e-6, changed, changed)
