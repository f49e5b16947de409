"""Two ranks give the step, the published bytes and the checkpoint of one."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from astraflow_trainer.ranks import OneRank

WORKER = Path(__file__).with_name("ranks_worker.py")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where one run of a single rank and one of two ranks left their results."""
    folder = tmp_path_factory.mktemp("ranks")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, WORKER, folder], env=environment, check=True, timeout=180)
    return folder


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_two_ranks_train_like_one(results: Path) -> None:
    with np.load(results / "result-1.npz") as one, np.load(results / "result-2.npz") as two:
        np.testing.assert_allclose(two["metrics"], one["metrics"], rtol=1e-4, atol=1e-6)
        for name in set(one.files) - {"metrics"}:
            # A sum in another order may flip the last bit of a master and so, rarely, a rounding.
            differing = np.abs(one[name].astype(np.int32) - two[name].astype(np.int32))
            assert differing.max(initial=0) <= 1, name
            assert np.count_nonzero(differing) <= 2, name


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_shards_of_two_ranks_are_the_rows_of_the_whole_tensors(results: Path) -> None:
    with np.load(results / "result-2.npz") as whole:
        covered = {
            name: np.zeros(whole[name].shape[0], dtype=int) for name in whole.files if name != "metrics"
        }
        for rank in range(2):
            with np.load(results / f"shards-2-{rank}.npz") as shards:
                for key in shards.files:
                    name, first_row = key.split("@")
                    rows = slice(int(first_row), int(first_row) + len(shards[key]))
                    assert np.array_equal(whole[name][rows], shards[key])
                    covered[name][rows] += 1
        assert all((count == 1).all() for count in covered.values())


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_checkpoint_of_two_ranks_replaced_that_of_one(results: Path) -> None:
    assert [path.name for path in (results / "checkpoints").iterdir()] == ["step-000000000002"]


def test_one_rank_agrees_with_itself() -> None:
    values = torch.tensor([1.0, 2.0])
    ranks = OneRank()
    assert (ranks.index, ranks.size) == (0, 1)
    assert all(torch.equal(method(values), values) for method in (ranks.sum, ranks.max, ranks.gather))
