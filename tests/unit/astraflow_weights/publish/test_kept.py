"""What is lent stays as it was while newer versions are kept."""

import numpy as np
import pytest

from astraflow_weights.codec.shards import ShardedModel, whole
from astraflow_weights.errors import ModelMismatch
from astraflow_weights.publish.kept import KeptVersion
from support.weight_models import make_model, trained

MODELS = [make_model(), trained(make_model(), 1, density=0.5), trained(make_model(), 2, density=0.5)]


def keep(kept: KeptVersion, version: int) -> None:
    kept.keep(whole(MODELS[version]), version=version, root=bytes([version]))


def is_version(shards: ShardedModel, version: int) -> bool:
    expected = whole(MODELS[version])
    return all(
        np.array_equal(shard.elements, expected.shards[spec.name].elements) for spec, shard in shards.held()
    )


def test_the_copy_is_written_over_unless_it_is_lent() -> None:
    kept = KeptVersion()
    keep(kept, 0)
    first = kept.newest
    keep(kept, 1)
    assert first is not None
    assert kept.newest is not None
    assert kept.newest.shards is first.shards
    assert (kept.newest.version, kept.newest.root) == (1, b"\x01")
    assert is_version(kept.newest.shards, 1)


def test_a_lent_copy_does_not_change() -> None:
    kept = KeptVersion()
    keep(kept, 0)
    with kept.lend() as lent:
        keep(kept, 1)
        keep(kept, 2)
        assert lent is not None
        assert lent.version == 0
        assert is_version(lent.shards, 0)
        assert kept.newest is not None
        assert is_version(kept.newest.shards, 2)
    second = kept.newest
    keep(kept, 1)
    assert kept.newest is not None
    assert kept.newest.shards is second.shards


def test_nothing_is_lent_before_something_is_kept() -> None:
    with KeptVersion().lend() as lent:
        assert lent is None


def test_another_architecture_is_refused() -> None:
    kept = KeptVersion()
    keep(kept, 0)
    with pytest.raises(ModelMismatch):
        kept.keep(whole(make_model(rows=12)), version=1, root=b"r")
