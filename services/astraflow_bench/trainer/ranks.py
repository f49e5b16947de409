"""One step on several ranks: the CPU time of all of them together, beside that of one.

Invariant: every rank is a process with one torch thread that trains on its share of the same rows. Called by
`experiment`.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from astraflow_bench.figures import Figure
from astraflow_bench.trainer.sizes import TrainerSizes
from astraflow_bench.trainer.workload import geometric_lengths, optimizer_of, rows_of, trained_policy
from astraflow_kit.log import configure
from astraflow_kit.ports import free_port
from astraflow_trainer.batches.rank_batches import balanced_shares
from astraflow_trainer.memory import keep_freed_memory
from astraflow_trainer.ranks.group import join_rank_group
from astraflow_trainer.settings import RankSettings
from astraflow_trainer.step.step import Outcome, StepSettings, train_step

_MOST_OF_TWO = 1.15
_TIMEOUT_S = 600.0


def measure_ranks(sizes: TrainerSizes, _folder: Path) -> list[Figure]:
    """Summed CPU of each number of ranks; the least step counts."""
    spent = {count: _summed_cpu_s(count, sizes) for count in sizes.ranks}
    figures = []
    for count, cpu_s in spent.items():
        row = partial(Figure, subject=f"{count} ranks" if count > 1 else "1 rank")
        figures.append(row(what="step: CPU of all ranks", value=cpu_s, unit="CPU-s"))
        if count > 1 and 1 in spent:
            most = _MOST_OF_TWO if count == 2 else None
            figures.append(row(what="step: CPU over one rank", value=cpu_s / spent[1], unit="×", most=most))
    return figures


def _summed_cpu_s(count: int, sizes: TrainerSizes) -> float:
    port = free_port()
    with ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn")) as pool:
        ranks = [pool.submit(_rank, index, count, port, sizes) for index in range(count)]
        of_ranks = [rank.result() for rank in ranks]
    return min(map(sum, zip(*of_ranks, strict=True)))


def _rank(index: int, count: int, port: int, sizes: TrainerSizes) -> Sequence[float]:
    """CPU-seconds of each step of this rank but the first, in which memory is taken."""
    # What it prints must not stand in the middle of `--json`.
    configure("bench", log_format="json", stream=io.StringIO())
    # The name of this machine may lead elsewhere.
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    keep_freed_memory()
    settings = RankSettings(rank=index, world_size=count, master_port=port if count > 1 else 0)
    group = join_rank_group(settings, timeout_s=_TIMEOUT_S)
    policy = trained_policy(sizes, group)
    optimizer = optimizer_of(policy)
    rows = rows_of(geometric_lengths(sizes.rows, median=sizes.median))
    share = balanced_shares([row.num_tokens for row in rows], num_ranks=count)[index]
    mine = [rows[place] for place in share]
    spent_s = []
    for _ in range(sizes.turns + 1):
        started = time.process_time()
        metrics = train_step(
            policy, optimizer=optimizer, rows=mine, settings=StepSettings(), ranks=group.training
        )
        spent_s.append(time.process_time() - started)
        assert metrics.outcome is Outcome.COMMITTED, metrics.skip_reason
    group.farewell(None)
    dist.destroy_process_group()
    return spent_s[1:]
