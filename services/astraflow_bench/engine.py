"""`python -m astraflow_bench.engine`: tokens per CPU-second of this engine beside transformers' `generate`.

Both run the same prompts on the same weights in the same process, one thread each, taking turns, so that
what other processes do to the machine falls on both; CPU time is compared, not wall time. Run by people.
"""

import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging

from astraflow_engine.core import CoreLimits, EngineCore
from astraflow_engine.model_config import load_model_config
from astraflow_engine.requests import Completion, GenerateRequest, SamplingParams
from astraflow_engine.scheduler import AdmissionLimits
from astraflow_engine.weights import load_weights
from astraflow_kit.clock import SystemClock

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_SHORTEST_PROMPT, _LONGEST_PROMPT = 20, 30


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Every group is one prompt sampled `group_size` times, each sample to exactly `num_new_tokens`."""

    prompts: tuple[tuple[int, ...], ...]
    group_size: int
    num_new_tokens: int

    @property
    def num_tokens(self) -> int:
        """Generated tokens of one run."""
        return len(self.prompts) * self.group_size * self.num_new_tokens


@app.command()
def bench(
    model_path: Annotated[Path | None, typer.Option(help="Checkpoint; default: random, 0.56 M.")] = None,
    num_prompts: Annotated[int, typer.Option(help="Different prompts, of 20 to 30 tokens.")] = 128,
    group_size: Annotated[int, typer.Option(help="Samples of each prompt.")] = 1,
    num_new_tokens: Annotated[int, typer.Option(help="Tokens of each sample.")] = 24,
    slots: Annotated[list[int] | None, typer.Option(help="Slots of the engine; repeat it.")] = None,
    repeats: Annotated[int, typer.Option(help="Runs of each kind; the best is reported.")] = 7,
) -> None:
    """Print one JSON line per engine, with its rate as a multiple of transformers'."""
    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as scratch:
        folder = model_path or _save_yardstick(Path(scratch))
        workload = _workload(folder, num_prompts, group_size=group_size, num_new_tokens=num_new_tokens)
        reference = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).float()
        runs: dict[str, Callable[[], object]] = {"transformers": lambda: _generate(reference, workload)}
        for count in slots or [32, 128]:
            runs[f"engine, {count} slots"] = _engine_run(folder, workload, num_slots=count)
        _report(_measure(runs, repeats=repeats), workload=workload)


def _measure(runs: dict[str, Callable[[], object]], *, repeats: int) -> dict[str, float]:
    """Least CPU-seconds of each run, after one unmeasured turn: a busy machine only ever adds."""
    spent: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(repeats + 1):
        for name, run in runs.items():
            started = time.process_time()
            run()
            if turn:
                spent[name].append(time.process_time() - started)
    return {name: min(times) for name, times in spent.items()}


def _report(seconds: dict[str, float], *, workload: Workload) -> None:
    for name, cpu_s in seconds.items():
        line = {
            "engine": name,
            "tokens_per_cpu_s": round(workload.num_tokens / cpu_s),
            "times_transformers": round(seconds["transformers"] / cpu_s, 2),
            "sequences": len(workload.prompts) * workload.group_size,
            "new_tokens": workload.num_new_tokens,
        }
        typer.echo(json.dumps(line))


def _engine_run(folder: Path, workload: Workload, *, num_slots: int) -> Callable[[], list[Completion]]:
    config = load_model_config(folder)
    limits = CoreLimits(
        num_slots=num_slots,
        capacity=_LONGEST_PROMPT + workload.num_new_tokens,
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
    for number, prompt in enumerate(workload.prompts):
        for sample in range(workload.group_size):
            core.submit(
                GenerateRequest(rid=f"{number}_{sample}", prompt=prompt, params=params, sample_index=sample)
            )


@torch.inference_mode()
def _generate(model: Qwen3ForCausalLM, workload: Workload) -> object:
    rows = [prompt for prompt in workload.prompts for _ in range(workload.group_size)]
    longest = max(map(len, rows))
    padding = [longest - len(row) for row in rows]
    # transformers annotates its own `self` as another class.
    answer: object = model.generate(  # type: ignore[misc]
        input_ids=torch.tensor([[0] * pad + list(row) for pad, row in zip(padding, rows, strict=True)]),
        attention_mask=torch.tensor([[0] * pad + [1] * (longest - pad) for pad in padding]),
        do_sample=True,
        top_k=0,
        max_new_tokens=workload.num_new_tokens,
        min_new_tokens=workload.num_new_tokens,
        output_logits=True,
        return_dict_in_generate=True,
        pad_token_id=0,
    )
    return answer


def _workload(folder: Path, num_prompts: int, *, group_size: int, num_new_tokens: int) -> Workload:
    draw = torch.Generator().manual_seed(1)
    vocab_size = load_model_config(folder).vocab_size
    lengths = torch.randint(_SHORTEST_PROMPT, _LONGEST_PROMPT + 1, (num_prompts,), generator=draw).tolist()
    prompts = (torch.randint(3, vocab_size, (length,), generator=draw).tolist() for length in lengths)
    return Workload(prompts=tuple(map(tuple, prompts)), group_size=group_size, num_new_tokens=num_new_tokens)


def _save_yardstick(folder: Path) -> Path:
    """The quickstart's architecture with random weights."""
    config = Qwen3Config(
        vocab_size=400,
        hidden_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=320,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        eos_token_id=2,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).bfloat16().save_pretrained(folder)
    return folder


if __name__ == "__main__":
    app()
