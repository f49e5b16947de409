"""Ranks that cannot meet say so, in bounded time; a group of one needs nobody."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from astraflow.errors import FencedError, UnavailableError
from astraflow_kit.lifecycle import ExitCode, exit_code_of
from astraflow_kit.ports import free_port
from astraflow_trainer.ranks import group as group_module
from astraflow_trainer.ranks.group import join_rank_group
from astraflow_trainer.ranks.reductions import OneRank
from astraflow_trainer.ranks.watch import RankWatch
from astraflow_trainer.settings import RankSettings


@pytest.fixture(autouse=True)
def _no_process_group_left() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def test_one_rank_is_a_group_that_nobody_else_can_end() -> None:
    group = join_rank_group(RankSettings(), timeout_s=1.0)
    assert (group.index, group.size, group.watch) == (0, 1, None)
    error = FencedError("epoch 4 holds the policy")
    assert group.explain(error) is error
    group.farewell(error)


NCCL_TIMED_OUT = (
    "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(OpType=ALLREDUCE) ran for 600000 ms"
)
FAULTS = {
    "the GPU is lost": (
        torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
        "rank 0 lost cuda:1: CUDA error: an illegal memory access",
    ),
    "NCCL timed out": (
        dist.DistBackendError(NCCL_TIMED_OUT),
        "the other ranks of 1 do not answer: [Rank 1] Watchdog caught",
    ),
    "NCCL failed": (
        RuntimeError("NCCL communicator was aborted on rank 1"),
        "the other ranks of 1 do not answer: NCCL communicator was aborted",
    ),
}


@pytest.mark.parametrize(("error", "said"), FAULTS.values(), ids=FAULTS)
def test_a_lost_gpu_or_exchange_is_named_and_all_ranks_start_again_from_the_last_checkpoint(
    error: Exception, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_module, "_FAREWELL_S", 0.0)
    alone = join_rank_group(RankSettings(), timeout_s=1.0)
    group = replace(alone, device=torch.device("cuda:1"), watch=RankWatch(0, 2, {}))
    reason = group.explain(error)
    assert isinstance(reason, UnavailableError)
    assert reason.message.startswith(said)
    assert exit_code_of(reason) is ExitCode.UNAVAILABLE == 75


def test_one_rank_agrees_with_itself() -> None:
    values, ranks = torch.tensor([1.0, 2.0]), OneRank()
    assert (ranks.index, ranks.size) == (0, 1)
    assert all(torch.equal(method(values), values) for method in (ranks.sum, ranks.max, ranks.gather))
    assert (ranks.broadcast(b"x"), ranks.all_gather(b"x")) == (b"x", [b"x"])


def test_a_rank_that_finds_no_first_one_says_where_it_looked() -> None:
    port = free_port()
    settings = RankSettings(rank=1, world_size=2, master_addr="127.0.0.1", master_port=port)
    with pytest.raises(UnavailableError, match=f"rank 1 of 2 did not meet the others at 127.0.0.1:{port}"):
        join_rank_group(settings, timeout_s=1.0)


def test_a_first_rank_whose_others_do_not_come_gives_up() -> None:
    settings = RankSettings(rank=0, world_size=2, master_addr="127.0.0.1", master_port=free_port())
    with pytest.raises(UnavailableError, match="rank 0 of 2 did not meet the others"):
        join_rank_group(settings, timeout_s=1.0)


def test_a_rank_does_not_join_the_ranks_of_an_earlier_start() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    PrefixStore("start-0", store).set("place/1", "the process before")
    settings = RankSettings(rank=1, world_size=2, master_addr="127.0.0.1", master_port=store.port)
    with pytest.raises(UnavailableError, match="is taken: ranks of an earlier start are still ending"):
        join_rank_group(settings, timeout_s=5.0)
