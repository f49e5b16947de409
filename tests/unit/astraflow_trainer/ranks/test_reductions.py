"""Two ranks, and two replicas of two, give the steps, the published bytes and the checkpoints of one, over real gloo
processes.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from astraflow_kit.lifecycle import ExitCode
from astraflow_weights.store.file import FileStore
from support import published_models

WORKER = Path(__file__).with_name("ranks_worker.py")
NUM_STEPS = 4

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the runs of one rank, of two ranks, and of two replicas of two ranks (4) left their results."""
    folder = tmp_path_factory.mktemp("ranks")
    ours = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, WORKER, folder], env=os.environ | ours, check=True, timeout=380)
    return folder


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("dies", "rank 1 of 2 exited without reporting"),
        ("takes no part", "the other ranks of 2 do not answer: "),
    ],
)
def test_a_rank_that_is_lost_in_an_exchange_is_named_and_ends_the_group_to_be_started_again(
    results: Path, how: str, said: str
) -> None:
    lost = json.loads((results / f"lost-{how}.json").read_text())
    assert said in lost["message"]
    assert (lost["kind"], lost["code"]) == ("RankLostError", ExitCode.UNAVAILABLE)


def joined(results: Path, kind: str, size: int) -> dict[str, NDArray[np.float32]]:
    """The parts of all ranks of the first replica, put together along their rows."""
    parts = [dict(np.load(results / f"{kind}-{size}-{rank}.npz")) for rank in range(min(size, 2))]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def pulled(results: Path, size: int, version: int) -> Mapping[str, NDArray[np.uint16]]:
    """A version of a run as a node gets it."""
    store = FileStore(results / f"store-{size}")
    return published_models.pulled(store, version, run_id="run", policy_id="p")


@pytest.mark.parametrize("size", [2, 4])
def test_loss_and_gradient_of_several_ranks_are_those_of_one(results: Path, size: int) -> None:
    """Sums of fp32 terms in another order: equal to a few units of the seventh digit in the first step, and
    after that as far as the weights are, whose last bits the order may have moved.
    """
    one = np.load(results / "metrics-1-0.npy")
    first, *others = (np.load(results / f"metrics-{size}-{rank}.npy") for rank in range(size))
    assert all(np.array_equal(first, other) for other in others)
    np.testing.assert_allclose(first[0], one[0], rtol=2e-6)
    np.testing.assert_allclose(first, one, rtol=2e-4)
    assert (one[:, 1] > 1e-3).all()


@pytest.mark.parametrize("size", [2, 4])
def test_a_critic_of_several_ranks_learns_what_that_of_one_does(results: Path, size: int) -> None:
    one = np.load(results / "critic-1-0.npy")
    first, *others = (np.load(results / f"critic-{size}-{rank}.npy") for rank in range(size))
    assert all(np.array_equal(first, other) for other in others)
    np.testing.assert_allclose(first, one, rtol=1e-3, atol=1e-6)
    assert (one[:, -2:] > 1e-2).all()  # value loss and the norm of its gradient


@pytest.mark.parametrize("size", [2, 4])
def test_masters_of_several_ranks_are_those_of_one_but_for_the_order_of_sums(
    results: Path, size: int
) -> None:
    one, two = joined(results, "state", 1), joined(results, "state", size)
    for name, values in one.items():
        scale = max(float(np.abs(values).max()), 1e-9)
        assert np.abs(two[name] - values).max() <= 2e-4 * scale, name


def test_both_runs_publish_the_same_first_bytes_and_later_ones_within_a_rounding(results: Path) -> None:
    """The first version is bit-equal. Later ones differ where a master lies next to a border of two bf16."""
    first = pulled(results, 1, 0), pulled(results, 2, 0)
    assert all(np.array_equal(first[0][name], first[1][name]) for name in first[0])
    one, two = pulled(results, 1, NUM_STEPS), pulled(results, 2, NUM_STEPS)
    assert one.keys() == two.keys()
    num_elements = sum(bits.size for bits in one.values())
    differing = {name: np.abs(one[name].astype(np.int32) - two[name].astype(np.int32)) for name in one}
    assert sum(int(np.count_nonzero(steps)) for steps in differing.values()) <= num_elements / 200
    assert not all(np.array_equal(first[0][name], one[name]) for name in one)


@pytest.mark.parametrize("size", [2, 4])
def test_what_several_ranks_publish_is_what_they_hold(results: Path, size: int) -> None:
    """A mirror has exactly the masters of both ranks of a replica, rounded, although no rank held them all."""
    masters = joined(results, "state", size)
    for name, bits in pulled(results, size, NUM_STEPS).items():
        rounded = torch.from_numpy(masters[f"master.{name}"]).to(torch.bfloat16).view(torch.uint16)
        assert np.array_equal(rounded.numpy(), bits), name


def test_no_rank_of_two_holds_a_whole_model_to_publish(results: Path) -> None:
    held = [json.loads((results / f"held-2-{rank}.json").read_text()) for rank in range(2)]
    assert sum(rank["shards"] for rank in held) == held[0]["whole"]
    assert max(rank["shards"] for rank in held) < 0.6 * held[0]["whole"]


def test_one_replica_of_two_publishes_and_both_have_the_same_masters(results: Path) -> None:
    held = [json.loads((results / f"held-4-{rank}.json").read_text()) for rank in range(4)]
    assert sum(rank["shards"] for rank in held[:2]) == held[0]["whole"]
    assert [rank["shards"] for rank in held[2:]] == [0, 0]
    for rank in range(2):
        own, same = (dict(np.load(results / f"state-4-{at}.npz")) for at in (rank, rank + 2))
        assert all(np.array_equal(own[name], same[name]) for name in own)


@pytest.mark.parametrize("rank", range(4))
def test_a_version_is_taken_up_by_every_replica(results: Path, rank: int) -> None:
    masters = np.load(results / f"state-4-{rank}.npz")
    for name, bits in np.load(results / f"adopted-4-{rank}.npz").items():
        rounded = torch.from_numpy(masters[f"master.{name}"]).to(torch.bfloat16).view(torch.uint16)
        assert np.array_equal(rounded.numpy().reshape(-1), bits), name


@pytest.mark.parametrize(("saved_by", "resumed_by"), [(1, 2), (2, 4), (4, 1)])
def test_another_number_of_ranks_restores_a_checkpoint(results: Path, saved_by: int, resumed_by: int) -> None:
    saved, resumed = joined(results, "state", saved_by), joined(results, "resumed", resumed_by)
    assert saved.keys() == resumed.keys()
    assert all(np.array_equal(saved[name], resumed[name]) for name in saved)


def test_ranks_go_on_from_a_checkpoint_of_another_number_alike(results: Path) -> None:
    """Each began with another's weights, which differ in last bits."""
    one, two, four = (np.load(results / f"next-{name}.npy") for name in ("1-0", "2-0", "4-0"))
    np.testing.assert_allclose(one, two, rtol=2e-3)
    np.testing.assert_allclose(four, two, rtol=2e-3)


def test_running_baselines_have_the_same_bits_on_all_ranks_of_any_number_before_and_after_a_restart(
    results: Path,
) -> None:
    ranks = [(size, rank) for size in (1, 2, 4) for rank in range(size)]
    texts = {(results / f"baselines-{size}-{rank}.json").read_text() for size, rank in ranks}
    assert len(texts) == 1
    (name, before), (same, after), means = json.loads(texts.pop())
    kept = 0.95**13
    assert name == same == "role=/source="
    assert before == pytest.approx((1 - kept) * means[0])
    assert after == pytest.approx(kept * before + (1 - kept) * means[1])


def test_a_rank_takes_up_its_own_random_state_and_a_new_rank_keeps_its_own(results: Path) -> None:
    for name, seed in (("1-0", 100), ("2-0", 100), ("2-1", 7), ("4-1", 101), ("4-2", 7)):
        expected = torch.rand(4, generator=torch.Generator().manual_seed(seed)).numpy()
        assert np.array_equal(np.load(results / f"random-{name}.npy"), expected), name


@pytest.mark.parametrize("kind", ["adamw_8bit", "muon"])
@pytest.mark.parametrize("after", ["state", "resumed"])
@pytest.mark.parametrize("size", [2, 4])
def test_steps_on_equal_gradients_have_the_same_bits_on_any_number_of_ranks(
    results: Path, kind: str, after: str, size: int
) -> None:
    """Also when each goes on from the checkpoint of another number; 33 rows, so that shards differ in size. Norms
    are AdamW's, whose kernel rounds the last few numbers of a shard otherwise.
    """
    one, two = joined(results, f"{kind}-{after}", 1), joined(results, f"{kind}-{after}", size)
    assert one.keys() == two.keys()
    for name, values in one.items():
        if "norm" in name:
            np.testing.assert_allclose(two[name], values, rtol=1e-6, atol=1e-7)
        else:
            assert np.array_equal(two[name], values), name
