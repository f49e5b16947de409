"""All measurements of the trainer, one after the other: the machine is used by one at a time.

Invariant: every figure that is compared with another comes from the same section of the same run. Called by the command
`astraflow bench trainer`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from astraflow_bench.figures import Figure
from astraflow_bench.trainer.blocking import measure_blocking
from astraflow_bench.trainer.gpu import measure_gpu
from astraflow_bench.trainer.logits import measure_logits
from astraflow_bench.trainer.losses import measure_losses
from astraflow_bench.trainer.packing import measure_packing
from astraflow_bench.trainer.prefetch import measure_prefetch
from astraflow_bench.trainer.ranks import measure_ranks
from astraflow_bench.trainer.sizes import TrainerSizes
from astraflow_bench.trainer.split import measure_split
from astraflow_bench.trainer.trainers import measure_trainers
from astraflow_trainer.memory import keep_freed_memory

_MEASURES: Mapping[str, Callable[[TrainerSizes, Path], list[Figure]]] = {
    "packing": measure_packing,
    "logits": measure_logits,
    "losses": measure_losses,
    "ranks": measure_ranks,
    "blocking": measure_blocking,
    "prefetch": measure_prefetch,
    "split": measure_split,
    "trainers": measure_trainers,
    "gpu": measure_gpu,
}


def measure(
    sizes: TrainerSizes, *, sections: Sequence[str], folder: Path, say: Callable[[str], None]
) -> list[Figure]:
    """Measure these sections with one torch thread and the allocator's settings of a trainer."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    keep_freed_memory()
    figures: list[Figure] = []
    try:
        for name in sections:
            say(name)
            (folder / name).mkdir()
            figures += _MEASURES[name](sizes, folder / name)
    finally:
        torch.set_num_threads(threads)
    return figures
