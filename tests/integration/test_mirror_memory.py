"""A mirror takes no more memory than promised beside its weights file, however large the model is."""

from pathlib import Path

import numpy as np
import pytest

from astraflow_weights.codec.delta import encode_delta
from astraflow_weights.codec.snapshot import encode_snapshot
from astraflow_weights.codec.tensor_hash import tensor_digests
from astraflow_weights.publish.version_writer import VersionWriter
from astraflow_weights.store.file import FileStore
from astraflow_weights.versions.manifest import DeltaRef
from support.measured import measured
from support.weight_models import POLICY, RUN, gaussian_bf16

MIB = 2**20
THREADS = 2
BOUND = (64 + 16 * THREADS) * MIB


def publish(folder: Path) -> None:
    """256 MiB of weights as a snapshot, and a delta that changes a twentieth of them."""
    draw = np.random.default_rng(0)
    block = gaussian_bf16(draw, (2**22,))
    moved = (draw.random(2**22) < 0.05).astype(np.uint16)
    models = [
        {f"t{number}": np.resize(values, 2**25) for number in range(4)} for values in (block, block + moved)
    ]
    writer = VersionWriter.open(FileStore(folder / "store"), run_id=RUN, policy_id=POLICY, epoch=1)
    snapshot = writer.uploads.upload_parts(encode_snapshot(models[0]))
    writer.commit(step=0, tensors=tensor_digests(models[0]), snapshot=snapshot)
    parts = writer.uploads.upload_parts(encode_delta(*models))
    writer.commit(step=1, tensors=tensor_digests(models[1]), deltas=(DeltaRef(base_version=0, parts=parts),))


@pytest.mark.ci
@pytest.mark.timeout(600)
def test_scratch_of_a_pull_stays_below_its_bound(tmp_path: Path) -> None:
    publish(tmp_path)
    for target in ("0", "1"):
        assert measured("support.mirror_memory", str(tmp_path), target, str(THREADS)) <= BOUND, target
