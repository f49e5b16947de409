"""One flipped bit or one cut, anywhere in the store: noticed before a version is served, and the old one stays."""

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from astraflow_weights import errors, settings
from astraflow_weights.mirror.mirror import Mirror
from support import published_models, weight_models

SETTINGS = settings.PublishSettings(snapshot_every_versions=100, snapshot_chain_ratio=100)


class Damaged(published_models.PublishedModels):
    """A store with a fence and three versions, a mirror that holds version 1, and one damage at a time."""

    def __init__(self, folder: Path, draw: random.Random) -> None:
        self.folder = folder
        self.draw = draw
        (folder / "config.json").write_text('{"layers": 2}')
        store, assets = weight_models.FaultyStore(folder / "store"), [folder / "config.json"]
        super().__init__(store, settings=SETTINGS, density=0.05, assets=assets)
        self.publish_up_to(2)
        # The copy that readers of the newest manifest would take.
        store.delete(weight_models.KEYS.latest)
        self.known = self.log()
        """The log as it was read before any damage."""
        self.mirror = Mirror(folder / "mirror")
        self.advance(self.mirror, 1)

    def objects(self) -> dict[str, tuple[str, Callable[[], None]]]:
        """What can be damaged: its key, and what must then be refused."""
        manifest, newest = self.known.manifest(0), self.known.record(2)
        return {
            "delta": (newest.deltas[0].parts[0].key, self.advance_is_refused),
            "snapshot": ((manifest.snapshot or ())[0].key, self.a_new_mirror_is_refused),
            "asset": (manifest.assets[0].blob.key, self.a_new_mirror_is_refused),
            "manifest": (weight_models.KEYS.entry(newest.sequence), self.the_version_is_refused),
            "fence": (weight_models.KEYS.entry(0), self.the_entry_is_told),
        }

    def damage(self, key: str) -> Path:
        """Flip one bit of an object, or cut it."""
        path = self.folder / "store" / key
        content = bytearray(path.read_bytes())
        if self.draw.random() < 0.7:
            bit = self.draw.randrange(len(content) * 8)
            content[bit // 8] ^= 1 << bit % 8
        else:
            del content[self.draw.randrange(len(content)) :]
        path.write_bytes(content)
        return path

    def advance_is_refused(self) -> None:
        with pytest.raises(errors.VerificationFailed):
            self.mirror.advance(self.store, self.known, target=2)

    def a_new_mirror_is_refused(self) -> None:
        mirror = Mirror(self.folder / "cold")
        with pytest.raises(errors.VerificationFailed):
            mirror.advance(self.store, self.known, target=0)
        assert mirror.version is None

    def the_version_is_refused(self) -> None:
        """By who reads the log anew; one who read it before learns of the damage when it needs the entry again."""
        for log in (self.log(), self.known):
            with pytest.raises(errors.CorruptManifest, match="put the object back"):
                self.mirror.advance(self.store, log, target=2)

    def the_entry_is_told(self) -> None:
        """A fence names nothing."""
        assert list(self.log().unreadable) == [weight_models.KEYS.entry(0)]

    def check_old_version(self) -> None:
        """Held, whole, and not a trace of another."""
        for mirror in (self.mirror, Mirror(self.folder / "mirror")):
            assert mirror.version == 1
            assert weight_models.same_model(mirror.load(), self.models[1])


def damage_often(folder: Path, *, times: int, seed: int) -> Counter[str]:
    draw = random.Random(seed)
    world = Damaged(folder, draw)
    objects = world.objects()
    done: Counter[str] = Counter()
    for _ in range(times):
        name = draw.choice(sorted(objects))
        key, is_refused = objects[name]
        good = (folder / "store" / key).read_bytes()
        path = world.damage(key)
        is_refused()
        world.check_old_version()
        path.write_bytes(good)
        done[name] += 1
    assert world.advance(world.mirror, 2).version == 2
    return done


@pytest.mark.slow
def test_one_damage_anywhere_is_noticed_and_the_old_version_stays(tmp_path: Path) -> None:
    done = damage_often(tmp_path, times=300, seed=1)
    assert set(done) == {"delta", "snapshot", "asset", "manifest", "fence"}


def test_a_manifest_damaged_after_the_log_was_read_is_noticed(tmp_path: Path) -> None:
    world = Damaged(tmp_path, random.Random(2))
    world.damage(world.objects()["manifest"][0])
    world.the_version_is_refused()
    world.check_old_version()


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_ten_thousand_damages(tmp_path: Path) -> None:
    assert damage_often(tmp_path, times=10_000, seed=3).total() == 10_000
