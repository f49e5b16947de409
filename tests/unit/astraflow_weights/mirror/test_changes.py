"""A record of changes names exactly the elements that differ, or says that it knows them not."""

from pathlib import Path

import numpy as np
import pytest

from astraflow_kit.failpoints import FailpointRaised
from astraflow_weights.codec.tensors import flat_unsigned
from astraflow_weights.mirror.changes import ChangedElements
from astraflow_weights.mirror.mirror import Mirror
from astraflow_weights.settings import MirrorSettings
from support.armed import armed
from support.published_models import PublishedModels
from support.weight_models import FaultyStore, make_model

pytestmark = pytest.mark.slow


@pytest.fixture
def published(tmp_path: Path) -> PublishedModels:
    models = PublishedModels(FaultyStore(tmp_path / "store"), density=0.01)
    models.publish_up_to(3)
    return models


def mirror_at_first(published: PublishedModels, folder: Path) -> Mirror:
    mirror = Mirror(folder / "mirror", settings=MirrorSettings(record_changes=True))
    assert published.advance(mirror, 0).changes is None
    return mirror


def assert_exact(changes: ChangedElements | None, published: PublishedModels, *, base: int, to: int) -> None:
    assert changes is not None
    assert (changes.base_version, changes.version) == (base, to)
    for name, before in published.models[base].items():
        differ = np.flatnonzero(flat_unsigned(before) != flat_unsigned(published.models[to][name]))
        assert changes.positions.get(name, np.empty(0)).tolist() == differ.tolist(), name


def test_positions_are_those_that_differ_over_one_delta_and_over_several(
    published: PublishedModels, tmp_path: Path
) -> None:
    mirror = mirror_at_first(published, tmp_path)
    assert_exact(published.advance(mirror, 1).changes, published, base=0, to=1)
    assert_exact(published.advance(mirror, 3).changes, published, base=1, to=3)
    # Asked for again, it is still what led here.
    assert_exact(published.advance(mirror, 3).changes, published, base=1, to=3)


def test_a_mirror_that_is_not_asked_records_nothing(published: PublishedModels, tmp_path: Path) -> None:
    mirror = Mirror(tmp_path / "mirror")
    published.advance(mirror, 0)
    assert published.advance(mirror, 1).changes is None


def test_too_many_changes_are_no_record(published: PublishedModels, tmp_path: Path) -> None:
    mirror = mirror_at_first(published, tmp_path)
    published.publish(make_model(7))
    assert published.advance(mirror, 4).changes is None


def test_a_change_that_another_process_began_is_no_record(published: PublishedModels, tmp_path: Path) -> None:
    mirror = mirror_at_first(published, tmp_path)
    with armed("weights.mirror.tile=raise@2"), pytest.raises(FailpointRaised):
        published.advance(mirror, 1)
    again = Mirror(tmp_path / "mirror", settings=MirrorSettings(record_changes=True))
    assert published.advance(again, 1).changes is None
