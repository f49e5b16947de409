"""One writer at a time: fences shut out older ones, lost answers and repeated calls make no second
version.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from astraflow_weights.codec import digest, tensor_hash
from astraflow_weights.codec.schema import Schema
from astraflow_weights.errors import CorruptPart, Fenced, Unavailable
from astraflow_weights.publish.version_writer import CommittedVersion, VersionWriter
from astraflow_weights.settings import PublishSettings
from astraflow_weights.versions.manifest import DeltaRef
from support import log_records, published_models
from support.weight_models import KEYS, RUN, FaultyStore, lost, overwrite

Commit = Callable[[], CommittedVersion]


def tensors(value: int) -> tuple[digest.TensorDigest, ...]:
    return tensor_hash.tensor_digests({"w": np.full(4, value, dtype=np.uint16)})


def commit(writer: VersionWriter, value: int, *, step: int | None = None) -> CommittedVersion:
    snapshot = writer.uploads.upload_parts([b"part %d" % value])
    return writer.commit(step=value if step is None else step, tensors=tensors(value), snapshot=snapshot)


@pytest.fixture
def writer(store: FaultyStore) -> VersionWriter:
    return published_models.open_writer(store, 1)


def test_versions_and_sequence_numbers_grow_by_one(store: FaultyStore, writer: VersionWriter) -> None:
    committed = [commit(writer, value) for value in range(3)]
    assert [(entry.version, entry.sequence) for entry in committed] == [(0, 1), (1, 2), (2, 3)]
    log = published_models.read_log(store)
    written = [entry.manifest_sha256 for entry in committed]
    assert [record.manifest_sha256 for record in log.records] == written
    assert log.manifest(2).parent_version == 1


def test_a_newer_epoch_shuts_out_the_older_writer(store: FaultyStore) -> None:
    old = published_models.open_writer(store, 1)
    commit(old, 0)
    new = published_models.open_writer(store, 2)
    with pytest.raises(Fenced, match="written under epoch 2; this writer has epoch 1"):
        commit(old, 1)
    assert commit(new, 2).version == 1
    assert [record.writer_epoch for record in published_models.read_log(store).records] == [1, 2]


def test_a_zombie_that_does_not_look_still_wins_nothing(store: FaultyStore) -> None:
    """The old writer's log is stale: it finds the fence only because its create-only PUT meets it."""
    old = published_models.open_writer(store, 1)
    published_models.open_writer(store, 2)
    old.log.refresh = lambda: None  # type: ignore[method-assign]
    with pytest.raises(Fenced):
        commit(old, 0)
    assert published_models.read_log(store).latest() is None


@pytest.mark.parametrize("epoch", [0, 3])
def test_an_epoch_that_is_not_the_highest_cannot_open(store: FaultyStore, epoch: int) -> None:
    published_models.open_writer(store, 3)
    with pytest.raises(Fenced):
        published_models.open_writer(store, epoch)


def test_opening_again_with_the_same_nonce_is_the_same_writer(store: FaultyStore) -> None:
    commit(published_models.open_writer(store, 1, nonce=b"a" * 16), 0)
    again = published_models.open_writer(store, 1, nonce=b"a" * 16)
    assert commit(again, 1).version == 1
    assert published_models.read_log(store).next_sequence == 3


def race(contestants: list[Callable[[], object]]) -> list[object]:
    """Run all at the same moment; the result or the error of each."""
    barrier = threading.Barrier(len(contestants))

    def run(contestant: Callable[[], object]) -> object:
        barrier.wait(timeout=10)
        try:
            return contestant()
        except Fenced as error:
            return error

    with ThreadPoolExecutor(len(contestants)) as pool:
        return list(pool.map(run, contestants))


@pytest.mark.parametrize("round_number", range(10))
def test_of_writers_racing_for_one_epoch_exactly_one_wins(store: FaultyStore, round_number: int) -> None:
    results = race([lambda: published_models.open_writer(store, 1) for _ in range(4)])
    winners = [result for result in results if isinstance(result, VersionWriter)]
    assert len(winners) == 1
    assert commit(winners[0], 0).version == 0


@pytest.mark.parametrize("round_number", range(10))
def test_of_racing_epochs_only_the_highest_goes_on(store: FaultyStore, round_number: int) -> None:
    results = race([lambda epoch=epoch: published_models.open_writer(store, epoch) for epoch in (1, 2, 3, 4)])
    writers = [result for result in results if isinstance(result, VersionWriter)]
    assert max(writer.epoch for writer in writers) == 4
    outcomes = race([lambda writer=writer: commit(writer, writer.epoch) for writer in writers])
    assert [outcome.writer_epoch for outcome in outcomes if isinstance(outcome, CommittedVersion)] == [4]
    assert published_models.read_log(store).refresh() == 0


@pytest.mark.parametrize("round_number", range(10))
def test_a_commit_racing_a_fence_is_before_it_or_not_at_all(store: FaultyStore, round_number: int) -> None:
    old = published_models.open_writer(store, 1)
    committed, new = race([lambda: commit(old, 7), lambda: published_models.open_writer(store, 2)])
    assert isinstance(new, VersionWriter)
    expected = 1 if isinstance(committed, CommittedVersion) else 0
    assert commit(new, 8).version == expected
    assert len(published_models.read_log(store).records) == expected + 1


@pytest.mark.parametrize("round_number", range(5))
def test_one_writer_per_policy_and_policies_do_not_meet(store: FaultyStore, round_number: int) -> None:
    names = [f"policy-{index}" for index in range(4)]
    race([lambda name=name: VersionWriter.open(store, run_id=RUN, policy_id=name, epoch=1) for name in names])
    for log in (published_models.read_log(store, name) for name in names):
        assert (log.owner is None, log.next_sequence) == (False, 1)


@pytest.fixture
def commit_zero(writer: VersionWriter) -> Commit:
    """Commits version 0, whose part and schema are uploaded."""
    writer.uploads.upload_schema(Schema.of(tensor.spec for tensor in tensors(0)))
    snapshot = writer.uploads.upload_parts([b"part"])
    return partial(writer.commit, step=0, tensors=tensors(0), snapshot=snapshot)


def test_a_lost_answer_to_the_commit_is_success(store: FaultyStore, commit_zero: Commit) -> None:
    store.lose_after = 1
    assert commit_zero().version == 0
    assert len(published_models.read_log(store).records) == 1


def test_a_lost_answer_to_the_fence_is_success(store: FaultyStore) -> None:
    store.lose_after = 1
    assert commit(published_models.open_writer(store, 1), 0).version == 0
    assert published_models.read_log(store).next_sequence == 2


def test_a_request_that_never_arrived_can_be_made_again(store: FaultyStore, commit_zero: Commit) -> None:
    store.lose_before = 1
    with pytest.raises(Unavailable):
        commit_zero()
    assert commit_zero().version == 0


def test_a_request_that_arrives_late_is_recognised_as_ours(store: FaultyStore, commit_zero: Commit) -> None:
    """The first PUT is thought lost, lands after the log was refreshed, and carries an older time."""
    late: list[tuple[str, bytes]] = []

    def arrive(*_: object) -> None:
        store.before_put = lambda *_: None
        store.put_if_absent(*late.pop())

    store.before_put = lambda key, data: late.append((key, data))
    store.lose_before = 1
    with pytest.raises(Unavailable):
        commit_zero()
    store.before_put = arrive
    assert commit_zero().version == 0
    assert (late, len(published_models.read_log(store).records)) == ([], 1)


def test_publishing_a_step_with_the_same_bytes_is_success(store: FaultyStore, writer: VersionWriter) -> None:
    first = commit(writer, 5)
    commit(writer, 6)
    again = commit(published_models.open_writer(store, 2), 5)
    assert again.existed
    assert (again.version, again.manifest_sha256) == (first.version, first.manifest_sha256)
    assert len(published_models.read_log(store).records) == 2


def test_a_new_step_with_the_same_bytes_is_a_new_version(writer: VersionWriter) -> None:
    assert [commit(writer, 5, step=step).version for step in (1, 2, 3)] == [0, 1, 2]


def test_the_same_step_with_other_bytes_is_a_new_version(store: FaultyStore) -> None:
    commit(published_models.open_writer(store, 1), 5, step=1)
    assert commit(published_models.open_writer(store, 2), 6, step=1).version == 1


def test_a_version_that_contradicts_itself_is_not_written(store: FaultyStore, writer: VersionWriter) -> None:
    with pytest.raises(ValueError, match="neither a snapshot nor a delta"):
        writer.commit(step=0, tensors=tensors(0))
    assert published_models.read_log(store).next_sequence == 1


def test_the_hint_may_fail_without_hurting_the_commit(store: FaultyStore, writer: VersionWriter) -> None:
    store.put = lost  # type: ignore[method-assign]
    committed = commit(writer, 0)
    assert not committed.hint_written
    assert published_models.read_log(store).refresh() == 0


def test_parts_are_named_by_their_content_and_sent_once(store: FaultyStore, writer: VersionWriter) -> None:
    first = writer.uploads.upload_parts([b"one", b"two"])
    again = writer.uploads.upload_parts([b"two", b"one"])
    assert first == again[::-1]
    assert len(list(store.list(KEYS.parts))) == 2
    assert store.get(first[0].key) == b"one"


def test_a_damaged_part_under_its_name_is_reported(store: FaultyStore, writer: VersionWriter) -> None:
    (ref,) = writer.uploads.upload_parts([b"content"])
    overwrite(store, ref.key, b"cut")
    with pytest.raises(CorruptPart, match="has 3 bytes instead of 7; delete the damaged object"):
        writer.uploads.upload_parts([b"content"])


def test_assets_are_content_named_and_sent_once(store: FaultyStore, tmp_path: Path) -> None:
    writer = published_models.open_writer(store, 1)
    files = [tmp_path / "tokenizer.json", tmp_path / "config.json"]
    for path in files:
        path.write_text(path.name)
    assets = writer.uploads.upload_assets(files)
    assert [asset.file_name for asset in assets] == ["config.json", "tokenizer.json"]
    assert all(store.get(asset.blob.key) == asset.file_name.encode() for asset in assets)
    store.lose_before = 99
    assert writer.uploads.upload_assets(files) == assets


def test_an_asset_cannot_replace_the_weights(writer: VersionWriter, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_text("")
    with pytest.raises(ValueError, match="not allowed"):
        writer.uploads.upload_assets([path])


@pytest.mark.parametrize(
    ("deltas", "following", "due"),
    [
        ([], None, True),
        ([], 10, False),
        ([], 51, True),
        ([20, 20], 10, False),
        ([20, 20], 11, True),
        ([1, 1, 1], 1, True),
        ([1, 1], 1, False),
    ],
)
def test_a_snapshot_is_due_by_bytes_or_number(
    store: FaultyStore, deltas: list[int], following: int | None, due: bool
) -> None:
    settings = PublishSettings(snapshot_every_versions=4, snapshot_chain_ratio=0.5)
    writer = published_models.open_writer(store, 1, settings=settings)
    if following is not None:
        writer.commit(step=0, tensors=tensors(0), snapshot=(log_records.part_ref(100),))
    for version, size_bytes in enumerate(deltas, start=1):
        delta = DeltaRef(base_version=version - 1, parts=(log_records.part_ref(size_bytes),))
        writer.commit(step=version, tensors=tensors(version), deltas=(delta,))
    assert writer.wants_snapshot(delta_bytes=following) is due
