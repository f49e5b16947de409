"""A mirror holds whole verified versions: it follows the cheapest path, and any fault leaves the old version
alone.
"""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from astraflow.errors import UnknownVersionError
from astraflow_weights.codec.snapshot import encode_snapshot
from astraflow_weights.errors import Edge, MirrorBusy, MirrorMismatch, Unavailable, VerificationFailed
from astraflow_weights.mirror.mirror import Mirror
from astraflow_weights.publish.version_writer import VersionWriter
from astraflow_weights.settings import MirrorSettings, PublishSettings
from support import published_models, weight_models

pytestmark = pytest.mark.slow

NUM_VERSIONS = 7
# A snapshot at versions 0 and 4, a delta at every version but 0.
SETTINGS = PublishSettings(snapshot_every_versions=4, snapshot_chain_ratio=100)


class Published(published_models.PublishedModels):
    """A store with `NUM_VERSIONS` versions, the models in them, and a mirror to advance."""

    def __init__(self, store: weight_models.FaultyStore, folder: Path) -> None:
        self.folder = folder
        (folder / "config.json").write_text("{}")
        super().__init__(store, settings=SETTINGS, density=0.01, assets=[folder / "config.json"])
        self.publish_up_to(NUM_VERSIONS - 1)

    def mirror(self, *, at: int | None = None, **settings: int) -> Mirror:
        """The mirror as it is, or taken to a version first."""
        mirror = Mirror(self.folder / "mirror", settings=MirrorSettings(**settings))
        if at is not None:
            self.advance(mirror, at)
        return mirror

    def delta_key(self, version: int) -> str:
        return self.log().record(version).deltas[0].parts[0].key

    def snapshot_key(self, version: int) -> str:
        return (self.log().record(version).snapshot or ())[0].key

    def refused(self, mirror: Mirror, target: int, error: type[Exception], match: str | None = None) -> Any:
        """The error that ends a pull, which leaves what the mirror held."""
        held = mirror.version
        with pytest.raises(error, match=match) as caught:
            mirror.advance(self.store, self.log(), target=target)
        assert mirror.version is None if held is None else holds(mirror, self, held)
        return caught.value


@pytest.fixture
def published(store: weight_models.FaultyStore, tmp_path: Path) -> Published:
    return Published(store, tmp_path)


def holds(mirror: Mirror, published: Published, version: int) -> bool:
    """Whether the mirror, and a fresh one over the same folder, hold exactly this version."""
    return all(
        each.version == version and weight_models.same_model(each.load(), published.models[version])
        for each in (mirror, Mirror(mirror.directory.parent) if mirror.directory else mirror)
    )


def test_a_new_mirror_takes_a_snapshot_and_then_deltas_only(published: Published) -> None:
    mirror = published.mirror()
    first = published.advance(mirror, 0)
    assert (first.base_version, first.counts.snapshots_fetched, first.counts.deltas_fetched) == (None, 1, 0)
    for version in range(1, NUM_VERSIONS):
        result = published.advance(mirror, version)
        assert (result.base_version, result.counts.snapshots_fetched) == (version - 1, 0)
        assert result.counts.delta_bytes == published.log().record(version).delta_bytes
        assert holds(mirror, published, version)
    assert mirror.counts.snapshots_fetched == 1
    assert mirror.counts.delta_bytes == sum(record.delta_bytes for record in published.log().records)


@pytest.mark.parametrize(
    ("held", "target", "base", "num_deltas"),
    [(0, 3, 0, 3), (0, 6, 0, 6), (2, 5, 2, 3), (3, 6, 3, 3), (None, 6, None, 2), (6, 2, None, 2)],
)
def test_a_version_is_reached_bit_exact_through_the_chain_or_from_the_nearest_snapshot(
    published: Published, held: int | None, target: int, base: int | None, num_deltas: int
) -> None:
    mirror = published.mirror(at=held)
    result = published.advance(mirror, target)
    assert (result.base_version, result.counts.deltas_fetched) == (base, num_deltas)
    assert result.counts.snapshots_fetched == (base is None)
    assert holds(mirror, published, target)


def test_a_version_that_is_held_is_not_fetched_again(published: Published) -> None:
    mirror = published.mirror(at=5)
    log = published.log()
    published.store.gets.clear()
    assert mirror.advance(published.store, log, target=5).counts.fetched_bytes == 0
    assert published.store.gets == []
    assert holds(mirror, published, 5)


def test_assets_are_fetched_once(published: Published) -> None:
    mirror = published.mirror()
    assert [published.advance(mirror, version).counts.asset_bytes for version in (0, 1)] == [2, 0]


def test_there_is_one_loadable_checkpoint_and_no_journal_between_versions(published: Published) -> None:
    for version in range(NUM_VERSIONS):
        assert published.mirror(at=version).version == version
    sha = published.log().record(6).manifest_sha256.hex()
    folder = published.folder / "mirror"
    assert published.mirror().directory == folder / "checkpoint"
    assert (folder / "checkpoint" / "config.json").read_text() == "{}"
    found = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    assert found == [
        "checkpoint/config.json",
        "checkpoint/model.safetensors",
        "lock",
        f"meta/{sha}.manifest",
        f"meta/{sha}.schema",
        f"meta/{sha}.tiles",
        "puller",
        "state.json",
    ]


def test_a_mirror_survives_its_process(published: Published) -> None:
    published.mirror(at=2)
    reopened = published.mirror()
    assert holds(reopened, published, 2)
    result = published.advance(reopened, 3)
    assert (result.base_version, result.counts.snapshots_fetched) == (2, 0)


def test_a_corrupt_delta_keeps_the_old_version_and_names_the_path(published: Published) -> None:
    mirror = published.mirror(at=1)
    weight_models.flip(published.store, published.delta_key(2))
    message = "the delta from version 1 of version 2 cannot be used"
    refusal = published.refused(mirror, 2, VerificationFailed, message)
    assert (refusal.version, refusal.edges) == (2, {Edge(version=2, base_version=1)})


def test_a_corrupt_delta_is_gone_around_by_a_later_snapshot(published: Published) -> None:
    mirror = published.mirror(at=1)
    published.store.delete(published.delta_key(2))
    result = published.advance(mirror, 5)
    assert result.rejected == {Edge(version=2, base_version=1)}
    assert (result.base_version, result.counts.snapshots_fetched) == (None, 1)
    assert holds(mirror, published, 5)


def test_wrong_bytes_once_are_fetched_again(published: Published, monkeypatch: pytest.MonkeyPatch) -> None:
    mirror = published.mirror(at=1)
    lies, honest = {published.delta_key(2): b"garbage"}, published.store.get
    monkeypatch.setattr(published.store, "get", lambda key: lies.pop(key, None) or honest(key))
    assert published.advance(mirror, 2).rejected == frozenset()
    assert holds(mirror, published, 2)


def test_good_parts_that_give_the_wrong_model_are_refused_by_tensor(published: Published) -> None:
    """A publisher's fault: every digest of the parts is right, and the manifest promises other tensors."""
    model = weight_models.trained(published.models[-1], 99)
    promised = weight_models.copied(model)
    promised["model.norm"][3] = -promised["model.norm"][3]
    published_models.commit_parts(published.writer, promised, snapshot=encode_snapshot(model))
    refusal = published.refused(published.mirror(at=6), 7, VerificationFailed, "different in 1 of 7 tensors")
    assert (refusal.version, refusal.tensor) == (7, "model.norm")


def test_a_delta_against_another_base_is_refused(published: Published) -> None:
    """The delta of version 6 offered as if it started from version 3."""
    parts = [published.store.get(published.delta_key(6))]
    published_models.commit_parts(published.writer, published.models[6], delta=parts, base_version=3)
    published.refused(published.mirror(at=3), 7, VerificationFailed)


def test_a_store_that_does_not_answer_changes_nothing(published: Published) -> None:
    mirror, log = published.mirror(at=1), published.log()
    published.store.get = weight_models.lost  # type: ignore[method-assign]
    with pytest.raises(Unavailable):
        mirror.advance(published.store, log, target=2)
    assert holds(mirror, published, 1)


def test_a_damaged_asset_keeps_the_old_version(published: Published) -> None:
    weight_models.overwrite(published.store, published.log().manifest(0).assets[0].blob.key, b"[]")
    message = r"'config.json' of version 0 is damaged"
    published.refused(published.mirror(), 0, VerificationFailed, message)
    assert not (published.folder / "mirror" / "model.partial").exists()


def test_a_model_beyond_the_limit_is_not_fetched(published: Published) -> None:
    mirror = published.mirror(max_model_bytes=100)
    published.refused(mirror, 0, VerificationFailed, "the limit is 100: raise max_model_bytes")
    assert published.snapshot_key(0) not in published.store.gets


def test_an_unknown_version_changes_nothing(published: Published) -> None:
    published.refused(published.mirror(at=1), NUM_VERSIONS, UnknownVersionError)


def test_two_pullers_of_one_folder_do_not_mix(published: Published, monkeypatch: pytest.MonkeyPatch) -> None:
    mirror, other, log = published.mirror(), published.mirror(), published.log()

    def meet(key: str) -> bytes:
        monkeypatch.undo()
        with pytest.raises(MirrorBusy):
            other.advance(published.store, log, target=2)
        return published.store.get(key)

    monkeypatch.setattr(published.store, "get", meet)
    mirror.advance(published.store, log, target=1)
    published.advance(other, 2)
    assert other.counts.snapshots_fetched == 0
    assert holds(other, published, 2)


def test_a_folder_of_another_policy_is_refused(published: Published) -> None:
    published.mirror(at=1)
    writer = VersionWriter.open(published.store, run_id=weight_models.RUN, policy_id="verifier", epoch=1)
    published_models.ModelPublisher(writer).publish(weight_models.make_model(5), step=0)
    other = published_models.read_log(published.store, "verifier")
    with pytest.raises(MirrorMismatch, match="mirrors run-1/solver, not run-1/verifier"):
        published.mirror().advance(published.store, other, target=0)


def test_a_log_begun_anew_is_not_built_upon(published: Published) -> None:
    published.mirror(at=0)
    shutil.rmtree(published.folder / "store")
    anew = Published(weight_models.FaultyStore(published.folder / "store"), published.folder)
    mirror = anew.mirror()
    assert anew.advance(mirror, 1).base_version is None
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
