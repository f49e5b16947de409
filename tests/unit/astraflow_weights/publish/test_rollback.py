"""A rollback: the old weights under a new number, by inverse deltas, once, whatever happened before."""

from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from astraflow.errors import PreconditionError
from astraflow_weights.codec import Array, encode_delta
from astraflow_weights.collection.retention import Roots
from astraflow_weights.errors import CorruptManifest, Edge, Fenced
from astraflow_weights.mirror.mirror import Mirror
from astraflow_weights.publish.rollback import roll_back
from astraflow_weights.publish.version_writer import CommittedVersion
from astraflow_weights.settings import PublishSettings
from astraflow_weights.store import ObjectStore
from astraflow_weights.tools.verification import verify_version
from astraflow_weights.versions.inspection import build_version
from astraflow_weights.versions.planner import plan_pull
from support.manual_clock import ManualClock
from support.published_models import (
    ModelPublisher,
    collect_all,
    commit_parts,
    new_collector,
    new_compactor,
    open_writer,
    publish_all,
    published,
    read_log,
    steps,
)
from support.weight_models import KEYS, FaultyStore, Models, same_model, trained

SPARSE = PublishSettings(snapshot_every_versions=1000, snapshot_chain_ratio=100)


def back(
    store: ObjectStore, version: int, *, epoch: int = 2, settings: PublishSettings = SPARSE
) -> CommittedVersion:
    """Go back as the command does."""
    return roll_back(store, open_writer(store, epoch, settings=settings), version=version, settings=settings)


def check_built(store: ObjectStore, version: int, model: dict[str, Array]) -> None:
    """Every path of the newest log leads to these bits."""
    log = read_log(store)
    assert same_model(build_version(store, log, target=version, threads=1), model)
    assert not verify_version(store, log, version=version, threads=1).faults


@pytest.fixture
def models(store: FaultyStore) -> Models:
    """Those of versions 0 to 3; only 0 offers a snapshot."""
    return published(store, 4, settings=SPARSE)


@pytest.mark.parametrize("version", [0, 3, 4])
def test_the_new_version_has_the_old_ones_weights_and_is_of_no_step(store: FaultyStore, version: int) -> None:
    models = published(store, 6, settings=SPARSE)
    made = back(store, version)
    log = read_log(store)
    record, old = log.record(6), log.record(version)
    assert (made.version, made.existed, made.rollback_of) == (6, False, version)
    assert (record.rollback_of, record.step, record.writer_epoch) == (version, 5, 2)
    assert record.model_root == old.model_root
    assert log.manifest(6).tensors == log.manifest(version).tensors
    check_built(store, 6, models[version])


def test_the_delta_leads_from_the_newest_version_without_a_model(store: FaultyStore, models: Models) -> None:
    store.gets.clear()
    back(store, 1)
    log = read_log(store)
    snapshot = {part.key for part in log.record(0).snapshot or ()}
    assert snapshot.isdisjoint(store.gets), "the inverse of RICE deltas needs no model"
    (delta,) = log.record(4).deltas
    assert delta.base_version == 3
    changed = sum(int((models[3][name] != models[1][name]).sum()) for name in models[1])
    assert log.record(4).num_changed == changed


def test_who_holds_the_old_version_pays_little(store: FaultyStore, models: Models, tmp_path: Path) -> None:
    mirror = Mirror(tmp_path / "mirror")
    mirror.advance(store, read_log(store), target=1)
    back(store, 1)
    log = read_log(store)
    plan = plan_pull(log, held=1, target=4)
    assert [step.edge for step in plan.steps] == [Edge(version=4, base_version=1)]
    assert plan.size_bytes < log.record(4).delta_bytes
    mirror.advance(store, log, target=4)
    assert same_model(mirror.load(), models[1])


def test_deltas_of_classes_of_the_base_are_inverted_with_that_base(store: FaultyStore) -> None:
    models = steps(3)
    publish_all(ModelPublisher(open_writer(store, settings=SPARSE), context=True), models)
    back(store, 0)
    built = build_version(store, read_log(store), target=3, held=2, load_base=lambda: models[2], threads=1)
    assert same_model(built, models[0])


@pytest.mark.usefixtures("models")
def test_going_back_twice_makes_one_version(store: FaultyStore) -> None:
    first, again = back(store, 1), back(store, 1, epoch=3)
    assert (first.version, first.existed) == (4, False)
    assert (again.version, again.existed) == (4, True)
    assert len(read_log(store).records) == 5


@pytest.mark.usefixtures("models")
def test_going_back_to_the_newest_version_makes_none(store: FaultyStore) -> None:
    assert (back(store, 3).version, len(read_log(store).records)) == (3, 4)


def test_one_may_go_forth_again_and_back_again(store: FaultyStore, models: Models) -> None:
    made = [back(store, version, epoch=epoch).version for epoch, version in ((2, 1), (3, 3), (4, 1))]
    assert made == [4, 5, 6]
    for version, old in ((4, 1), (5, 3), (6, 1)):
        check_built(store, version, models[old])


@pytest.mark.usefixtures("models")
def test_a_lost_answer_of_the_commit_makes_no_second_version(store: FaultyStore) -> None:
    writer = open_writer(store, 2, settings=SPARSE)
    lost_answers = []

    def lose_the_manifest(key: str, _: bytes) -> None:
        if key == KEYS.entry(6) and not lost_answers:
            lost_answers.append(key)
            store.lose_after = 1

    store.before_put = lose_the_manifest
    assert roll_back(store, writer, version=1, settings=SPARSE).version == 4
    assert (len(lost_answers), store.lose_after) == (1, 0)
    assert len(read_log(store).records) == 5


def test_a_snapshot_is_offered_where_one_is_due(store: FaultyStore, models: Models) -> None:
    back(store, 1, settings=PublishSettings(snapshot_every_versions=4, snapshot_chain_ratio=100))
    log = read_log(store)
    record = log.record(4)
    assert record.snapshot is not None
    plan = plan_pull(log, held=None, target=4, avoid=frozenset({Edge(version=0, base_version=None)}))
    assert [step.edge.base_version for step in plan.steps] == [None]
    check_built(store, 4, models[1])


def test_a_merged_delta_that_is_damaged_is_passed_over(store: FaultyStore) -> None:
    models = published(store, 10, settings=SPARSE)
    assert new_compactor(store, kept=None, settings=SPARSE).compact()
    path = next(path for path in read_log(store).record(8).added if path.base_version == 0)
    for part in path.parts:
        store.put(part.key, b"rotten")
    back(store, 0)
    assert same_model(build_version(store, read_log(store), target=10, threads=1), models[0])


def test_where_deltas_are_gone_the_models_are_compared(store: FaultyStore) -> None:
    models = published(store, 3, settings=PublishSettings(snapshot_every_versions=1))
    lose_delta(store, 2)
    back(store, 1)
    check_built(store, 3, models[1])


def lose_delta(store: ObjectStore, version: int) -> None:
    for part in read_log(store).record(version).deltas[0].parts:
        store.delete(part.key)


@pytest.mark.usefixtures("models")
def test_a_version_that_cannot_be_built_is_refused_with_the_advice_to_pin(store: FaultyStore) -> None:
    lose_delta(store, 2)
    advice = r"version 1 can no longer be built.*pin versions that you may want back"
    with pytest.raises(PreconditionError, match=advice):
        back(store, 1)
    assert len(read_log(store).records) == 4


@pytest.mark.usefixtures("models")
def test_a_writer_that_was_fenced_goes_nowhere(store: FaultyStore) -> None:
    writer = open_writer(store, 2, settings=SPARSE)
    open_writer(store, 3, settings=SPARSE)
    with pytest.raises(Fenced):
        roll_back(store, writer, version=1, settings=SPARSE)
    assert len(read_log(store).records) == 4


def test_publishing_goes_on_from_the_weights_one_went_back_to(store: FaultyStore, models: Models) -> None:
    back(store, 1)
    publisher = ModelPublisher(open_writer(store, 3, settings=SPARSE), base=models[1])
    again = publisher.publish(models[1], step=3)
    found = (again.version, again.rollback_of, again.existed)
    assert found == (5, None, False), "the step is its own version"
    assert publisher.publish(trained(models[1], 9), step=4).version == 6


@pytest.mark.parametrize(
    ("rollback_of", "refused"),
    [
        (1, pytest.raises(CorruptManifest, match="goes back to version 1, whose model root is another one")),
        (3, pytest.raises(ValueError, match="goes back to version 3")),
        (4, pytest.raises(ValueError, match="goes back to version 4")),
    ],
)
def test_a_version_goes_back_to_an_older_one_of_its_own_weights(
    store: FaultyStore, rollback_of: int, refused: AbstractContextManager[object]
) -> None:
    models = published(store, 3, settings=SPARSE)
    writer = open_writer(store, 2, settings=SPARSE)
    with refused:
        commit_parts(
            writer, models[0], delta=encode_delta(models[2], models[0]), step=2, rollback_of=rollback_of
        )


def collect(store: ObjectStore, *, pinned: tuple[int, ...] = ()) -> None:
    """Let everything go that may, but for what leads to a pinned version."""
    clock = ManualClock()
    collect_all(new_collector(store, clock, lambda: Roots(pinned=frozenset(pinned))), clock)


OFTEN = PublishSettings(snapshot_every_versions=3, snapshot_chain_ratio=100)


def test_a_pinned_version_comes_back_after_collection_and_its_new_one_outlives_it(store: FaultyStore) -> None:
    models = published(store, 11, settings=OFTEN)
    collect(store, pinned=(2,))
    back(store, 2, settings=OFTEN)
    for _ in range(2):
        check_built(store, 11, models[2])
        collect(store)


def test_a_collected_version_that_was_not_pinned_is_refused(store: FaultyStore) -> None:
    published(store, 11, settings=OFTEN)
    collect(store)
    with pytest.raises(PreconditionError, match="pin versions that you may want back"):
        back(store, 2, settings=OFTEN)
    assert len(read_log(store).records) == 11
