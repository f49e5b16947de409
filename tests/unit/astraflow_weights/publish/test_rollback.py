"""A rollback: the old weights under a new number, by inverse deltas, once, whatever happened before."""

from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from astraflow.errors import PreconditionError
from astraflow_weights.codec.delta import encode_delta
from astraflow_weights.codec.digest import model_root
from astraflow_weights.codec.tensor_hash import tensor_digests
from astraflow_weights.collection.collector import Collector, Stage
from astraflow_weights.collection.retention import Roots
from astraflow_weights.errors import CorruptManifest, Edge, Fenced, Unavailable
from astraflow_weights.mirror.mirror import Mirror
from astraflow_weights.publish.compactor import Compactor
from astraflow_weights.publish.rollback import roll_back
from astraflow_weights.publish.version_writer import CommittedVersion
from astraflow_weights.settings import CollectionSettings, PublishSettings
from astraflow_weights.store import ObjectStore
from astraflow_weights.store.file import FileStore
from astraflow_weights.store.layout import PolicyKeys
from astraflow_weights.tools.verification import verify_version
from astraflow_weights.versions.inspection import build_version
from astraflow_weights.versions.manifest import DeltaRef
from astraflow_weights.versions.planner import plan_pull
from support.manual_clock import ManualClock
from support.published_models import ModelPublisher, open_writer, published, read_log
from support.weight_models import POLICY, RUN, FaultyStore, make_model, same_model, trained

SPARSE = PublishSettings(snapshot_every_versions=1000, snapshot_chain_ratio=100)


def back(
    store: ObjectStore, version: int, *, epoch: int = 2, settings: PublishSettings = SPARSE
) -> CommittedVersion:
    """Go back as the command does."""
    return roll_back(store, open_writer(store, epoch, settings=settings), version=version, settings=settings)


@pytest.mark.parametrize("version", [0, 3, 4])
def test_the_new_version_has_the_old_ones_weights_and_is_of_no_step(store: FileStore, version: int) -> None:
    models = published(store, 6, settings=SPARSE)
    made = back(store, version)
    log = read_log(store)
    record, old = log.record(6), log.record(version)
    assert (made.version, made.existed, made.rollback_of) == (6, False, version)
    assert (record.rollback_of, record.step, record.writer_epoch) == (version, 5, 2)
    assert record.model_root == old.model_root
    assert log.manifest(6).tensors == log.manifest(version).tensors
    assert same_model(build_version(store, log, target=6, threads=1), models[version])
    assert not verify_version(store, log, version=6, threads=1).faults


def test_the_delta_leads_from_the_newest_version_without_any_model(store: FileStore, tmp_path: Path) -> None:
    models = published(store, 5, settings=SPARSE)
    counted = FaultyStore(tmp_path / "store")
    back(counted, 2)
    log = read_log(store)
    snapshot = {part.key for part in log.record(0).snapshot or ()}
    assert snapshot.isdisjoint(counted.gets), "the inverse of RICE deltas needs no model"
    (delta,) = log.record(5).deltas
    assert delta.base_version == 4
    assert log.record(5).num_changed == sum(
        int((models[4][name] != models[2][name]).sum()) for name in models[4]
    )


def test_who_holds_the_old_version_is_there_for_next_to_nothing(store: FileStore, tmp_path: Path) -> None:
    models = published(store, 5, settings=SPARSE)
    mirror = Mirror(tmp_path / "mirror")
    mirror.advance(store, read_log(store), target=2)
    back(store, 2)
    log = read_log(store)
    plan = plan_pull(log, held=2, target=5)
    assert [step.edge for step in plan.steps] == [Edge(version=5, base_version=2)]
    assert plan.size_bytes < log.record(5).delta_bytes
    mirror.advance(store, log, target=5)
    assert same_model(mirror.load(), models[2])


def test_deltas_of_classes_of_the_base_are_inverted_with_that_base(store: FileStore) -> None:
    models = [make_model()]
    publisher = ModelPublisher(open_writer(store, 1, settings=SPARSE))
    publisher.publish(models[0], step=0)
    for step in (1, 2):
        models.append(trained(models[-1], step, density=0.01))
        writer = open_writer(store, step + 1, settings=SPARSE)
        parts = encode_delta(
            models[step - 1], models[step], context=True, base_version=step - 1, target_version=step
        )
        refs = writer.uploads.upload_parts(parts)
        deltas = (DeltaRef(base_version=step - 1, parts=refs),)
        writer.commit(step=step, tensors=tensor_digests(models[step]), deltas=deltas)
    back(store, 0, epoch=4)
    log = read_log(store)
    assert same_model(
        build_version(store, log, target=3, held=2, load_base=lambda: models[2], threads=1), models[0]
    )


def test_going_back_twice_makes_one_version(store: FileStore) -> None:
    published(store, 4, settings=SPARSE)
    first, again = back(store, 1), back(store, 1, epoch=3)
    assert (first.version, first.existed) == (4, False)
    assert (again.version, again.existed) == (4, True)
    assert len(read_log(store).records) == 5


def test_going_back_to_the_newest_version_makes_none(store: FileStore) -> None:
    published(store, 4, settings=SPARSE)
    assert (back(store, 3).version, len(read_log(store).records)) == (3, 4)


def test_one_may_go_forth_again_and_back_again(store: FileStore) -> None:
    models = published(store, 4, settings=SPARSE)
    made = [back(store, version, epoch=epoch).version for epoch, version in ((2, 1), (3, 3), (4, 1))]
    assert made == [4, 5, 6]
    log = read_log(store)
    for version, old in ((4, 1), (5, 3), (6, 1)):
        assert same_model(build_version(store, log, target=version, threads=1), models[old])


def test_a_lost_answer_of_the_commit_makes_no_second_version(tmp_path: Path) -> None:
    store = FaultyStore(tmp_path / "store")
    published(store, 4, settings=SPARSE)
    writer = open_writer(store, 2, settings=SPARSE)
    real, calls = store.put_if_absent, []

    def lose_the_manifest(key: str, data: bytes) -> object:
        result = real(key, data)
        if key == PolicyKeys(RUN, POLICY).entry(6) and not calls:
            calls.append(key)
            raise Unavailable("answer lost")
        return result

    store.put_if_absent = lose_the_manifest  # type: ignore[method-assign,assignment]
    assert roll_back(store, writer, version=1, settings=SPARSE).version == 4
    assert calls
    assert len(read_log(store).records) == 5


def test_a_snapshot_is_offered_where_one_is_due(store: FileStore) -> None:
    models = published(store, 4, settings=SPARSE)
    back(store, 1, settings=PublishSettings(snapshot_every_versions=4, snapshot_chain_ratio=100))
    log = read_log(store)
    record = log.record(4)
    assert record.snapshot is not None
    plan = plan_pull(log, held=None, target=4, avoid=frozenset({Edge(version=0, base_version=None)}))
    assert [step.edge.base_version for step in plan.steps] == [None]
    assert not verify_version(store, log, version=4, threads=1).faults
    assert model_root(tensor_digests(models[1])) == record.model_root


def test_a_merged_delta_that_is_damaged_is_passed_over(store: FileStore) -> None:
    models = published(store, 10, settings=SPARSE)
    compactor = Compactor(store, run_id=RUN, policy_id=POLICY, kept=None, settings=SPARSE)
    assert compactor.compact()
    path = next(path for path in read_log(store).record(8).added if path.base_version == 0)
    for part in path.parts:
        store.put(part.key, b"rotten")
    back(store, 0)
    assert same_model(build_version(store, read_log(store), target=10, threads=1), models[0])


def test_where_deltas_are_gone_the_models_are_compared(store: FileStore) -> None:
    models = published(store, 2, settings=SPARSE)
    publisher = ModelPublisher(
        open_writer(store, 2, settings=PublishSettings(snapshot_every_versions=1)), base=models[1]
    )
    models.append(trained(models[1], 7))
    publisher.publish(models[2], step=2)
    for part in read_log(store).record(2).deltas[0].parts:
        store.delete(part.key)
    back(store, 1, epoch=3)
    log = read_log(store)
    assert same_model(build_version(store, log, target=3, threads=1), models[1])


def test_a_version_that_cannot_be_built_is_refused_with_the_advice_to_pin(store: FileStore) -> None:
    published(store, 4, settings=SPARSE)
    for part in read_log(store).record(2).deltas[0].parts:
        store.delete(part.key)
    with pytest.raises(
        PreconditionError, match=r"version 1 can no longer be built.*pin versions that you may want back"
    ):
        back(store, 1)
    assert len(read_log(store).records) == 4


def test_a_writer_that_was_fenced_goes_nowhere(store: FileStore) -> None:
    published(store, 4, settings=SPARSE)
    writer = open_writer(store, 2, settings=SPARSE)
    open_writer(store, 3, settings=SPARSE)
    with pytest.raises(Fenced):
        roll_back(store, writer, version=1, settings=SPARSE)
    assert len(read_log(store).records) == 4


def test_publishing_goes_on_from_the_weights_that_were_gone_back_to(store: FileStore) -> None:
    models = published(store, 4, settings=SPARSE)
    back(store, 1)
    publisher = ModelPublisher(open_writer(store, 3, settings=SPARSE), base=models[1])
    again = publisher.publish(models[1], step=3)
    assert (again.version, again.rollback_of, again.existed) == (5, None, False), (
        "the step is its own version"
    )
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
    store: FileStore, rollback_of: int, refused: AbstractContextManager[object]
) -> None:
    models = published(store, 3, settings=SPARSE)
    writer = open_writer(store, 2, settings=SPARSE)
    delta = writer.uploads.upload_parts(encode_delta(models[2], models[0]))
    deltas = (DeltaRef(base_version=2, parts=delta),)
    with refused:
        writer.commit(step=2, tensors=tensor_digests(models[0]), deltas=deltas, rollback_of=rollback_of)


def collect(store: ObjectStore, *, pinned: int | None = None) -> None:
    """Let everything go that may, but for what leads to a pinned version."""
    clock = ManualClock()
    roots = Roots(pinned=frozenset() if pinned is None else frozenset([pinned]))
    collector = Collector(
        store,
        run_id=RUN,
        policy_id=POLICY,
        roots=lambda: roots,
        settings=CollectionSettings(keep_snapshots=2, grace_s=100.0),
        clock=clock,
    )
    for _ in range(10):
        if collector.step().stage is Stage.NOTHING:
            return
        clock.now_s += 100.0
    raise AssertionError("there is no end to it")


OFTEN = PublishSettings(snapshot_every_versions=3, snapshot_chain_ratio=100)


def test_a_pinned_version_comes_back_after_collection_and_its_new_version_outlives_it(
    store: FileStore,
) -> None:
    models = published(store, 11, settings=OFTEN)
    collect(store, pinned=2)
    back(store, 2, settings=OFTEN)
    for _ in range(2):
        log = read_log(store)
        assert same_model(build_version(store, log, target=11, threads=1), models[2])
        assert not verify_version(store, log, version=11, threads=1).faults
        collect(store)


def test_a_collected_version_that_was_not_pinned_is_refused(store: FileStore) -> None:
    published(store, 11, settings=OFTEN)
    collect(store)
    with pytest.raises(PreconditionError, match="pin versions that you may want back"):
        back(store, 2, settings=OFTEN)
    assert len(read_log(store).records) == 11
