"""A mirror holds whole verified versions: it follows the cheapest path, and any fault leaves the old version
alone.
"""

import shutil
from pathlib import Path

import numpy as np
import pytest

from astraflow.errors import UnknownVersionError
from astraflow_weights.codec.snapshot import encode_snapshot
from astraflow_weights.codec.tensor_hash import tensor_digests
from astraflow_weights.errors import Edge, MirrorBusy, MirrorMismatch, Unavailable, VerificationFailed
from astraflow_weights.mirror.mirror import Mirror
from astraflow_weights.publish.version_writer import VersionWriter
from astraflow_weights.settings import MirrorSettings, PublishSettings
from astraflow_weights.versions.log import VersionLog
from astraflow_weights.versions.manifest import DeltaRef
from support.published_models import ModelPublisher, PublishedModels, read_log
from support.weight_models import RUN, FaultyStore, make_model, overwrite, same_model, trained

pytestmark = pytest.mark.slow

NUM_VERSIONS = 7
# A snapshot at versions 0 and 4, a delta at every version but 0.
SETTINGS = PublishSettings(snapshot_every_versions=4, snapshot_chain_ratio=100)


class Published(PublishedModels):
    """A store with `NUM_VERSIONS` versions, the models in them, and a mirror to advance."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = FaultyStore(folder / "store")
        (folder / "config.json").write_text("{}")
        assets = [folder / "config.json"]
        super().__init__(self.store, settings=SETTINGS, density=0.01, assets=assets)
        self.publish_up_to(NUM_VERSIONS - 1)
        self.log = read_log(self.store)

    def mirror(self, *, at: int | None = None, **settings: int) -> Mirror:
        """The mirror as it is, or taken to a version first."""
        mirror = Mirror(self.folder / "mirror", settings=MirrorSettings(**settings))
        if at is not None:
            mirror.advance(self.store, self.log, target=at)
        return mirror

    def delta_key(self, version: int) -> str:
        return self.log.record(version).deltas[0].parts[0].key

    def snapshot_key(self, version: int) -> str:
        snapshot = self.log.record(version).snapshot
        assert snapshot is not None
        return snapshot[0].key


@pytest.fixture
def published(tmp_path: Path) -> Published:
    return Published(tmp_path)


def holds(mirror: Mirror, published: Published, version: int) -> bool:
    """Whether the mirror, and a fresh one over the same folder, hold exactly this version."""
    return all(
        each.version == version and same_model(each.load(), published.models[version])
        for each in (mirror, Mirror(mirror.directory.parent) if mirror.directory else mirror)
    )


def test_a_new_mirror_takes_a_snapshot_and_then_deltas_only(published: Published) -> None:
    mirror = published.mirror()
    first = mirror.advance(published.store, published.log, target=0)
    assert (first.base_version, first.counts.snapshots_fetched, first.counts.deltas_fetched) == (None, 1, 0)
    for version in range(1, NUM_VERSIONS):
        result = mirror.advance(published.store, published.log, target=version)
        assert (result.base_version, result.counts.snapshots_fetched) == (version - 1, 0)
        assert result.counts.delta_bytes == published.log.record(version).delta_bytes
        assert holds(mirror, published, version)
    assert mirror.counts.snapshots_fetched == 1
    assert mirror.counts.delta_bytes == sum(record.delta_bytes for record in published.log.records)


@pytest.mark.parametrize(("held", "target"), [(0, 3), (0, 6), (2, 5), (3, 6)])
def test_catching_up_through_a_chain_ends_bit_exact(published: Published, held: int, target: int) -> None:
    mirror = published.mirror(at=held)
    result = mirror.advance(published.store, published.log, target=target)
    assert (result.base_version, result.counts.deltas_fetched) == (held, target - held)
    assert holds(mirror, published, target)


def test_a_cold_mirror_starts_at_the_nearest_snapshot(published: Published) -> None:
    mirror = published.mirror()
    result = mirror.advance(published.store, published.log, target=6)
    assert (result.counts.snapshots_fetched, result.counts.deltas_fetched) == (1, 2)
    assert published.snapshot_key(4) in published.store.gets
    assert holds(mirror, published, 6)


def test_going_back_to_an_older_version(published: Published) -> None:
    mirror = published.mirror(at=6)
    mirror.advance(published.store, published.log, target=2)
    assert holds(mirror, published, 2)


def test_a_version_that_is_held_is_not_fetched_again(published: Published) -> None:
    mirror = published.mirror(at=5)
    published.store.gets.clear()
    assert mirror.advance(published.store, published.log, target=5).counts.fetched_bytes == 0
    assert published.store.gets == []
    assert holds(mirror, published, 5)


def test_the_folder_is_a_loadable_checkpoint_with_its_assets(published: Published) -> None:
    result = published.mirror().advance(published.store, published.log, target=1)
    names = sorted(path.name for path in result.directory.iterdir())
    assert names == ["config.json", "model.safetensors"]


def test_assets_are_fetched_once(published: Published) -> None:
    mirror = published.mirror()
    assert mirror.advance(published.store, published.log, target=0).counts.asset_bytes == 2
    assert mirror.advance(published.store, published.log, target=1).counts.asset_bytes == 0


def test_there_is_one_copy_and_the_journal_is_empty_between_versions(published: Published) -> None:
    for version in range(NUM_VERSIONS):
        assert published.mirror(at=version).version == version
    sha = published.log.record(6).manifest_sha256.hex()
    folder = published.folder / "mirror"
    found = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    assert found == [
        "checkpoint/config.json",
        "checkpoint/model.safetensors",
        "lock",
        f"meta/{sha}.manifest",
        f"meta/{sha}.tiles",
        "puller",
        "state.json",
    ]


def test_a_mirror_survives_its_process(published: Published) -> None:
    published.mirror(at=2)
    reopened = published.mirror()
    assert holds(reopened, published, 2)
    result = reopened.advance(published.store, published.log, target=3)
    assert (result.base_version, result.counts.snapshots_fetched) == (2, 0)


def damaged(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


def test_a_corrupt_delta_keeps_the_old_version_and_names_the_path(published: Published) -> None:
    mirror = published.mirror(at=1)
    key = published.delta_key(2)
    overwrite(published.store, key, damaged(published.store.get(key)))
    with pytest.raises(
        VerificationFailed, match="the delta from version 1 of version 2 cannot be used"
    ) as caught:
        mirror.advance(published.store, published.log, target=2)
    assert caught.value.version == 2
    assert caught.value.edges == {Edge(version=2, base_version=1)}
    assert holds(mirror, published, 1)


def test_a_corrupt_delta_is_gone_around_by_a_later_snapshot(published: Published) -> None:
    mirror = published.mirror(at=1)
    published.store.delete(published.delta_key(2))
    result = mirror.advance(published.store, published.log, target=5)
    assert result.rejected == {Edge(version=2, base_version=1)}
    assert (result.base_version, result.counts.snapshots_fetched) == (None, 1)
    assert holds(mirror, published, 5)


def test_wrong_bytes_from_the_network_are_fetched_again(published: Published) -> None:
    mirror = published.mirror(at=1)
    key, honest = published.delta_key(2), published.store.get
    lies = [b"garbage"]
    published.store.get = lambda wanted: lies.pop() if wanted == key and lies else honest(wanted)  # type: ignore[method-assign]
    assert mirror.advance(published.store, published.log, target=2).rejected == frozenset()
    assert holds(mirror, published, 2)


def test_good_parts_that_give_the_wrong_model_are_refused_by_tensor(published: Published) -> None:
    """A publisher's fault: every digest of the parts is right, and the manifest promises other tensors."""
    model = trained(published.models[-1], 99)
    promised = {name: array.copy() for name, array in model.items()}
    promised["model.norm"][3] = -promised["model.norm"][3]
    parts = published.writer.uploads.upload_parts(encode_snapshot(model))
    published.writer.commit(step=99, tensors=tensor_digests(promised), snapshot=parts)
    published.log.refresh()
    mirror = published.mirror(at=6)
    with pytest.raises(VerificationFailed, match="different in 1 of 7 tensors") as caught:
        mirror.advance(published.store, published.log, target=7)
    assert (caught.value.version, caught.value.tensor) == (7, "model.norm")
    assert holds(mirror, published, 6)


def test_a_delta_against_another_base_is_refused(published: Published) -> None:
    """The delta of version 6 offered as if it started from version 3."""
    published.writer.commit(
        step=99,
        tensors=tensor_digests(published.models[6]),
        deltas=(DeltaRef(base_version=3, parts=published.log.record(6).deltas[0].parts),),
    )
    published.log.refresh()
    mirror = published.mirror(at=3)
    with pytest.raises(VerificationFailed):
        mirror.advance(published.store, published.log, target=7)
    assert holds(mirror, published, 3)


def test_a_store_that_does_not_answer_changes_nothing(published: Published) -> None:
    mirror = published.mirror(at=1)
    published.store.get = lambda key: lost(key)  # type: ignore[method-assign]
    with pytest.raises(Unavailable):
        mirror.advance(published.store, published.log, target=2)
    assert holds(mirror, published, 1)


def lost(key: str) -> bytes:
    raise Unavailable(f"{key} timed out")


def test_a_damaged_asset_keeps_the_old_version(published: Published) -> None:
    mirror = published.mirror()
    asset = published.log.manifest(0).assets[0]
    overwrite(published.store, asset.blob.key, b"[]")
    with pytest.raises(VerificationFailed, match=r"'config.json' of version 0 is damaged"):
        mirror.advance(published.store, published.log, target=0)
    assert mirror.version is None
    assert not (published.folder / "mirror" / "model.partial").exists()


def test_a_model_beyond_the_limit_is_not_fetched(published: Published) -> None:
    mirror = published.mirror(max_model_bytes=100)
    with pytest.raises(VerificationFailed, match="the limit is 100: raise max_model_bytes"):
        mirror.advance(published.store, published.log, target=0)
    assert published.snapshot_key(0) not in published.store.gets


def test_an_unknown_version_changes_nothing(published: Published) -> None:
    mirror = published.mirror(at=1)
    with pytest.raises(UnknownVersionError):
        mirror.advance(published.store, published.log, target=NUM_VERSIONS)
    assert holds(mirror, published, 1)


def test_two_pullers_of_one_folder_do_not_mix(published: Published) -> None:
    mirror, other = published.mirror(), published.mirror()
    honest = published.store.get

    def meet(key: str) -> bytes:
        published.store.get = honest  # type: ignore[method-assign]
        with pytest.raises(MirrorBusy):
            other.advance(published.store, published.log, target=2)
        return honest(key)

    published.store.get = meet  # type: ignore[method-assign]
    mirror.advance(published.store, published.log, target=1)
    other.advance(published.store, published.log, target=2)
    assert other.counts.snapshots_fetched == 0
    assert holds(other, published, 2)


def test_a_folder_of_another_policy_is_refused(published: Published) -> None:
    published.mirror(at=1)
    ModelPublisher(
        VersionWriter.open(published.store, run_id=RUN, policy_id="verifier", epoch=1), base=None
    ).publish(make_model(5), step=0)
    other = VersionLog(published.store, run_id=RUN, policy_id="verifier")
    other.refresh()
    with pytest.raises(MirrorMismatch, match="mirrors run-1/solver, not run-1/verifier"):
        published.mirror().advance(published.store, other, target=0)


def test_a_log_begun_anew_is_not_built_upon(published: Published) -> None:
    published.mirror(at=0)
    shutil.rmtree(published.folder / "store")
    anew = Published(published.folder)
    anew.log.refresh()
    mirror = anew.mirror()
    assert mirror.advance(anew.store, anew.log, target=1).base_version is None
    assert holds(mirror, anew, 1)


def test_an_empty_mirror_has_nothing_to_load(tmp_path: Path) -> None:
    mirror = Mirror(tmp_path / "mirror")
    assert (mirror.version, mirror.directory) == (None, None)
    with pytest.raises(ValueError, match="holds no version; advance it first"):
        mirror.load()


def test_what_is_loaded_can_be_changed_without_changing_the_mirror(published: Published) -> None:
    mirror = published.mirror(at=1)
    for array in mirror.load().values():
        np.add(array, array.dtype.type(1), out=array)
    assert holds(mirror, published, 1)
