"""Publisher and mirror over an S3 service that fails at random: no torn version, nothing lost, and an end to it."""

import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest

from astraflow_weights.errors import CorruptManifest, Unavailable, VerificationFailed
from astraflow_weights.mirror.mirror import Mirror
from astraflow_weights.settings import PublishSettings
from astraflow_weights.store import ObjectInfo, ObjectStore
from astraflow_weights.store.file import FileStore
from astraflow_weights.store.layout import PolicyKeys
from astraflow_weights.versions.log import VersionLog
from support import store_census
from support.published_models import ModelPublisher, open_writer, published, read_log, steps
from support.s3_server import S3Server
from support.store_proxy import Fault, StoreProxy
from support.weight_models import POLICY, RUN, make_model, same_model, trained

pytestmark = pytest.mark.integration

T = TypeVar("T")
VERSIONS = 5
SETTINGS = PublishSettings(snapshot_every_versions=3, snapshot_chain_ratio=100)
# What a store or the path to it does to one request. A stall costs real seconds and is drawn less often.
OFTEN: list[Fault | int] = [500, 503, 429, Fault.RESET, Fault.LOST, Fault.CUT, Fault.WRONG, Fault.GARBAGE]
FAULTS = [*OFTEN * 3, Fault.STALL, Fault.LATE]
PASSING = (Unavailable, VerificationFailed, CorruptManifest)


def until_it_works(operation: Callable[[], T]) -> T:
    """What a trainer or node does: call again after a fault that may pass. Faults run out, so this ends."""
    while True:
        with suppress(*PASSING):
            return operation()


def publish_and_pull(
    store: ObjectStore, honest: ObjectStore, proxy: StoreProxy, folder: Path, seed: int
) -> int:
    """Returns how many faults were met."""
    draw = random.Random(seed)
    models = steps(VERSIONS, density=0.1, seed=seed)
    proxy.faults = [draw.choice(FAULTS) for _ in range(60)]
    writer = until_it_works(lambda: open_writer(store, epoch=1, settings=SETTINGS))
    publisher, mirror = ModelPublisher(writer), Mirror(folder / "mirror")
    log = VersionLog(store, run_id=RUN, policy_id=POLICY)
    for step, model in enumerate(models):
        until_it_works(partial(publisher.publish, model, step=step))
        until_it_works(log.refresh)
        held = mirror.version
        while mirror.version != step:
            with suppress(*PASSING):
                mirror.advance(store, log, target=step)
                break
            assert mirror.version == held, "a failed pull changed what is held"
        assert same_model(mirror.load(), model)
    met = 60 - len(proxy.faults)
    proxy.faults = []
    census = store_census.take(honest, run_id=RUN, policy_id=POLICY)
    assert census.steps == list(range(VERSIONS))
    return met


def met_over_seeds(s3_server: S3Server, folder: Path, seeds: range) -> int:
    """Faults that were met, each seed in a bucket of its own."""
    met = 0
    for seed in seeds:
        bucket = s3_server.create_bucket(f"faults-{seed}")
        with StoreProxy(s3_server.url) as proxy:
            faulty = s3_server.store(bucket, endpoint_url=proxy.url, read_timeout_s=0.4)
            met += publish_and_pull(faulty, s3_server.store(bucket), proxy, folder / str(seed), seed)
    return met


@pytest.mark.slow
def test_versions_travel_whole_over_a_store_that_fails_at_random(s3_server: S3Server, tmp_path: Path) -> None:
    assert met_over_seeds(s3_server, tmp_path, range(1)) > 20


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_versions_travel_whole_over_stores_that_fail_a_thousand_times(
    s3_server: S3Server, tmp_path: Path
) -> None:
    assert met_over_seeds(s3_server, tmp_path, range(100, 125)) > 1_000


class DisorderlyStore(FileStore):
    """Lists in any order, twice over, and every other time not yet what was created last.

    Counted by prefix, because a refresh lists several at a time.
    """

    def __init__(self, root: Path, draw: random.Random) -> None:
        super().__init__(root)
        self.draw = draw
        self.late: Counter[str] = Counter()
        self._listed: Counter[str] = Counter()

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        """What the contract does not promise away."""
        found = list(super().list(prefix, after=after))
        self._listed[prefix] += 1
        if self._listed[prefix] % 2 and found:
            self.late[prefix] += 1
            found = found[:-1]
        found = found * 2
        self.draw.shuffle(found)
        return iter(found)


def test_a_listing_out_of_order_and_late_hides_versions_at_most(tmp_path: Path) -> None:
    honest, draw = FileStore(tmp_path / "store"), random.Random(1)
    store = DisorderlyStore(tmp_path / "store", draw)
    publisher = ModelPublisher(open_writer(store))
    log, mirror = VersionLog(store, run_id=RUN, policy_id=POLICY), Mirror(tmp_path / "mirror")
    model = make_model()
    for step in range(12):
        model = trained(model, step)
        publisher.publish(model, step=step)
        seen = log.refresh()
        assert seen is None or seen <= step
        while log.refresh() != step:
            pass
        mirror.advance(store, log, target=step)
        assert same_model(mirror.load(), model)
    assert store.late[PolicyKeys(RUN, POLICY).entries] >= 12, "each version was once listed late, at least"
    assert store_census.take(honest, run_id=RUN, policy_id=POLICY).steps == list(range(12))


def test_a_part_that_is_missing_for_good_is_told_and_the_old_version_stays(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "store")
    models = published(store, 3)
    log, mirror = read_log(store), Mirror(tmp_path / "mirror")
    mirror.advance(store, log, target=0)
    store.delete(log.record(1).deltas[0].parts[0].key)
    with pytest.raises(VerificationFailed, match="missing"):
        mirror.advance(store, log, target=2)
    assert mirror.version == 0
    assert same_model(mirror.load(), models[0])
