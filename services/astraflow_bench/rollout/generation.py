"""Tokens per CPU-second of the CPU engine beside transformers' `generate`, in one process.

Invariant: all run the same prompts on the same weights in fp32, one thread each, taking turns, so that what other
processes do to the machine falls on all; CPU time is compared, and a row is the least of several turns.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from transformers import Qwen3ForCausalLM

from astraflow_bench.figures import Figure, least_cpu_seconds
from astraflow_bench.rollout.models import LONGEST_PROMPT, Workload
from astraflow_engine.core import CoreLimits, EngineCore
from astraflow_engine.model_config import load_model_config
from astraflow_engine.requests import Completion, GenerateRequest, SamplingParams
from astraflow_engine.scheduler import AdmissionLimits
from astraflow_engine.weights import load_weights
from astraflow_kit.clock import SystemClock

LEAST_RATIO = 1.4
_SLOTS = 128
_CPU_ENGINE = "CPU engine"
# Continuous batching (`generate_batch`) is not among them: transformers 5.23 had not answered after 100 s on a CPU.
_PATHS = {
    "transformers, dynamic cache": ("sdpa", None),
    "transformers, static cache": ("sdpa", "static"),
    "transformers, eager attention": ("eager", None),
}


def measure_generation(folder: Path, workload: Workload, *, repeats: int, what: str) -> list[Figure]:
    """A figure of each way to sample the workload, and the ratio to the best of transformers."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        runs = {name: _generate(folder, workload, *path) for name, path in _PATHS.items()}
        runs[_CPU_ENGINE] = _engine_run(folder, workload)
        seconds = least_cpu_seconds(runs, repeats=repeats)
    finally:
        torch.set_num_threads(threads)
    rates = {name: workload.num_tokens / spent for name, spent in seconds.items()}
    best = max(rates[name] for name in _PATHS)
    figures = [
        Figure(what=what, subject=name, value=rate, unit="tokens/CPU-s") for name, rate in rates.items()
    ]
    ratio = Figure(
        what=f"{what}, over the best of transformers",
        subject=_CPU_ENGINE,
        value=rates[_CPU_ENGINE] / best,
        unit="×",
        least=LEAST_RATIO,
    )
    return [*figures, ratio]


def _engine_run(folder: Path, workload: Workload) -> Callable[[], list[Completion]]:
    config = load_model_config(folder)
    limits = CoreLimits(
        num_slots=_SLOTS,
        capacity=LONGEST_PROMPT + workload.num_new_tokens,
        admission=AdmissionLimits(max_waiting=100_000, max_prefill_tokens=8192),
    )
    weights = load_weights(folder, config=config)
    core = EngineCore(config, weights, limits=limits, seed=0, version="0", clock=SystemClock())

    def run() -> list[Completion]:
        with torch.inference_mode():
            core.flush()
            _submit(core, workload)
            return [completion for _ in iter(lambda: core.has_work, False) for completion in core.step()]

    return run


def _submit(core: EngineCore, workload: Workload) -> None:
    params = SamplingParams(max_new_tokens=workload.num_new_tokens, ignore_eos=True)
    for number, prompt in enumerate(workload.rows):
        sample = number % workload.group_size
        core.submit(GenerateRequest(rid=str(number), prompt=prompt, params=params, sample_index=sample))


def _generate(folder: Path, workload: Workload, attention: str, cache: str | None) -> Callable[[], object]:
    model = Qwen3ForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, attn_implementation=attention
    ).float()
    rows = workload.rows
    longest = max(map(len, rows))
    padding = [longest - len(row) for row in rows]
    token_ids = torch.tensor([[0] * pad + list(row) for pad, row in zip(padding, rows, strict=True)])
    mask = torch.tensor([[0] * pad + [1] * (longest - pad) for pad in padding])

    @torch.inference_mode()
    def run() -> object:
        answer: object = model.generate(
            input_ids=token_ids,
            attention_mask=mask,
            do_sample=True,
            top_k=0,
            max_new_tokens=workload.num_new_tokens,
            output_logits=True,
            return_dict_in_generate=True,
            pad_token_id=0,
            cache_implementation=cache,
        )
        return answer

    return run
