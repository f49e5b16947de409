"""Log-probs in chunks beside whole logits: peak memory and time.

Invariant: each way runs in a fresh process of its own, on the same numbers; memory is what the process grew by beyond
weights and hidden states, at its peak, the gradient of the weights included. Called by `experiment`.
"""

from __future__ import annotations

import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from astraflow_bench.figures import Figure
from astraflow_bench.trainer.sizes import TrainerSizes
from astraflow_bench.trainer.workload import same_numbers
from astraflow_trainer.model.logprobs import token_scores

_Way = Literal["chunked", "whole"]
_MOST_MEMORY = 0.25
_TEMPERATURE = 0.7


def measure_logits(sizes: TrainerSizes, _folder: Path) -> list[Figure]:
    """Forward and backward from hidden states to log-probs, of which the chunked way also has the entropy."""
    found = {}
    for way in ("chunked", "whole"):
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            found[way] = pool.submit(_work, way, sizes).result()
    same_numbers([norm for _, _, norm in found.values()], what="the gradient of the hidden states")
    what = f"logits of {sizes.logit_tokens} tokens, {sizes.logit_vocab} words"
    figures = []
    for way, (cpu_s, peak_bytes, _) in found.items():
        row = partial(Figure, subject=way)
        figures += [
            row(what=f"{what}: peak memory", value=peak_bytes / 1e6, unit="MB"),
            row(what=f"{what}: time", value=cpu_s, unit="CPU-s"),
        ]
    ratio = partial(Figure, subject="chunked over whole", unit="×")
    (chunked_s, chunked_bytes, _), (whole_s, whole_bytes, _) = found["chunked"], found["whole"]
    return [
        *figures,
        ratio(what=f"{what}: peak memory", value=chunked_bytes / max(1, whole_bytes), most=_MOST_MEMORY),
        ratio(what=f"{what}: time", value=chunked_s / whole_s),
    ]


def _work(way: _Way, sizes: TrainerSizes) -> tuple[float, int, float]:
    """Least CPU-seconds, bytes at the peak, norm of the gradient of the hidden states."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    scale = sizes.logit_hidden**-0.5
    hidden_ND = torch.randn(sizes.logit_tokens, sizes.logit_hidden, generator=generator, requires_grad=True)
    head_VD = (
        torch.randn(sizes.logit_vocab, sizes.logit_hidden, generator=generator).mul_(scale).requires_grad_()
    )
    target_N = torch.randint(sizes.logit_vocab, (sizes.logit_tokens,), generator=generator)
    temperature_N = torch.full((sizes.logit_tokens,), _TEMPERATURE)
    before = _forget_peak()
    spent_s, norm = [], 0.0
    for _ in range(sizes.turns):
        started = time.process_time()
        if way == "chunked":
            logprob_N, _ = token_scores(
                hidden_ND, head_VD=head_VD, target_N=target_N, temperature_N=temperature_N
            )
        else:
            logits_NV = (hidden_ND @ head_VD.T) / temperature_N[:, None]
            logprob_N = torch.log_softmax(logits_NV, -1).gather(1, target_N[:, None])[:, 0]
            del logits_NV
        logprob_N.sum().backward()
        spent_s.append(time.process_time() - started)
        assert hidden_ND.grad is not None
        norm = float(hidden_ND.grad.norm())
        hidden_ND.grad = head_VD.grad = None
    return min(spent_s), _memory("VmHWM") - before, norm


def _forget_peak() -> int:
    """Let the peak count from now on, when so many bytes are resident."""
    Path("/proc/self/clear_refs").write_text("5")
    return _memory("VmRSS")


def _memory(name: str) -> int:
    """Bytes, as Linux counts them for this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return 1024 * int(line.split()[1])
    raise ValueError(f"/proc/self/status has no {name}; memory is measured on Linux only")
