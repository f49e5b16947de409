"""What is told of stored versions: codecs, routes and differences, counted independently."""

import numpy as np
import pytest

from astraflow_weights.codec import CorruptPart, summarize_delta
from astraflow_weights.codec.tiles.grid import TileCodec
from astraflow_weights.settings import PublishSettings
from astraflow_weights.versions.fetch import fetch_part
from astraflow_weights.versions.inspection import build_version, changes_between, offered_paths, routes
from astraflow_weights.versions.log import VersionLog
from support.published_models import published
from support.weight_models import FaultyStore, Models, overwrite, same_model


@pytest.fixture(autouse=True)
def models(store: FaultyStore) -> Models:
    """Versions 0 to 10; only 0 offers a snapshot."""
    settings = PublishSettings(snapshot_every_versions=100, snapshot_chain_ratio=100)
    return published(store, 11, settings=settings)


def test_codecs_of_a_delta_add_up_to_what_it_changes(store: FaultyStore, log: VersionLog) -> None:
    (path,) = offered_paths(store, log.record(3), threads=2)
    summary = summarize_delta([fetch_part(store, part) for part in log.record(3).deltas[0].parts])
    assert (path.base_version, path.size_bytes) == (2, summary.size_bytes)
    assert sum(share.num_changed for share in path.codecs) == summary.num_changed > 0
    assert {share.codec for share in path.codecs} >= {TileCodec.RICE}
    assert 0 < sum(share.body_bytes for share in path.codecs) < path.size_bytes


def test_the_first_version_offers_a_snapshot_alone(store: FaultyStore, log: VersionLog) -> None:
    (path,) = offered_paths(store, log.record(0), threads=2)
    assert path.base_version is None
    assert TileCodec.EXP_PLANE in {share.codec for share in path.codecs}


def test_a_damaged_part_is_not_counted(store: FaultyStore, log: VersionLog) -> None:
    key = log.record(3).deltas[0].parts[0].key
    overwrite(store, key, store.get(key)[:-1] + b"x")
    with pytest.raises(CorruptPart, match=key):
        offered_paths(store, log.record(3), threads=2)


def test_routes_start_from_nothing_from_one_and_from_eight_versions_before(log: VersionLog) -> None:
    found = routes(log, target=9)
    deltas = [log.record(version).delta_bytes for version in range(1, 10)]
    assert [(route.held, route.steps) for route in found] == [(None, 10), (8, 1), (1, 8)]
    whole = log.record(0).snapshot_bytes + sum(deltas)
    assert [route.size_bytes for route in found] == [whole, deltas[-1], sum(deltas[1:])]


def test_a_young_version_has_fewer_routes(log: VersionLog) -> None:
    assert [route.held for route in routes(log, target=0)] == [None]
    assert [route.held for route in routes(log, target=7)] == [None, 6]


def test_a_version_is_built_bit_by_bit(store: FaultyStore, log: VersionLog, models: Models) -> None:
    assert same_model(build_version(store, log, target=10, threads=2), models[10])


@pytest.mark.parametrize(("first", "second"), [(2, 6), (6, 2)])
def test_changes_between_two_versions(
    store: FaultyStore, log: VersionLog, models: Models, first: int, second: int
) -> None:
    changes = changes_between(store, log, first=first, second=second, threads=2)
    assert {change.spec.name: change.num_changed for change in changes} == {
        name: int(np.count_nonzero(models[2][name] != models[6][name])) for name in models[2]
    }
    shares = {change.spec.name: change.share for change in changes}
    assert 0.02 < shares["model.embed.weight"] < 0.05
    assert shares["model.empty"] == 0


def test_a_version_that_equals_itself_is_not_fetched(store: FaultyStore, log: VersionLog) -> None:
    store.delete(log.record(4).deltas[0].parts[0].key)
    assert {change.num_changed for change in changes_between(store, log, first=4, second=4, threads=2)} == {0}
