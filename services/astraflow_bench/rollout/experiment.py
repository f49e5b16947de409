"""All measurements of rollouts, one after the other: the machine is used by one at a time.

Invariant: every figure that is compared with another comes from the same run of this function. Called by the command
`astraflow bench rollout`.
"""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from transformers.utils import logging as transformers_logging

from astraflow_bench.figures import Figure
from astraflow_bench.rollout.endpoint import measure_endpoint
from astraflow_bench.rollout.generation import measure_generation
from astraflow_bench.rollout.models import QUICKSTART, SMALL, Workload, prompts, save_model
from astraflow_bench.rollout.node import Load, measure_node
from astraflow_bench.rollout.served import ServedFigures, measure_served
from astraflow_raas.engine.command import EngineCommand
from astraflow_raas.settings import EMBEDDED_ENGINE, SGLANG_ENGINE

_PLACES = 64
_VOCABULARY = 400
_GROUP = 8
_NODE_TURNS = 3
_LONG_ANSWER = 128
_ENDPOINT_CALLS = 400
# How SGLang runs on a CPU, in fp32 as the CPU engine does.
_SGLANG_ENVIRONMENT = {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
_SGLANG_OPTIONS = (
    *("--device=cpu", "--dtype=float32", "--attention-backend=torch_native", "--disable-cuda-graph"),
    *("--grammar-backend=none", "--max-total-tokens=40000", "--sleep-on-idle"),
    f"--max-running-requests={_PLACES + 1}",
)


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much is measured."""

    sequences: int
    new_tokens: int
    repeats: int
    swaps: int
    node_seconds: float
    is_quick: bool


async def measure(
    sizes: Sizes, *, recipe: Path, sglang: Path | None, folder: Path, say: Callable[[str], None]
) -> list[Figure]:
    """Return every figure; those of SGLang only where its Python is given."""
    transformers_logging.disable_progress_bar()
    models = {"0.56 M": save_model(folder / "quickstart", QUICKSTART)}
    if not sizes.is_quick:
        models["20 M"] = save_model(folder / "small", SMALL)
    workload = _workload(sizes, group_size=1)
    figures = []
    for groups in (workload, _workload(sizes, group_size=_GROUP)):
        what = f"{len(groups.prompts)} prompts × {groups.group_size} samples × {groups.num_new_tokens} tokens"
        say(f"engines in one process: {what}")
        figures += measure_generation(models["0.56 M"], groups, repeats=sizes.repeats, what=what)
    if sglang is not None:
        os.environ.update(_SGLANG_ENVIRONMENT)
    for name, command in _commands(sglang).items():
        found = []
        for model, checkpoint in models.items():
            say(f"{name}: rate and swaps, {model}")
            where = folder / f"{command.kind}-{checkpoint.name}"
            found.append(
                await measure_served(
                    name, command, workload, checkpoint=checkpoint, folder=where, swaps=sizes.swaps,
                    repeats=sizes.repeats,
                )
            )  # fmt: skip
        figures += [figure for one in found for figure in one.figures] + _per_gigabyte(name, found)
    say("the OpenAI endpoint")
    figures += await measure_endpoint(folder / "tokenizer", calls=_ENDPOINT_CALLS)
    for load in _loads(sizes):
        say(f"a whole node: {load.name}")
        figures += await measure_node(recipe, load, folder=folder / f"node-{load.num_new_tokens}")
    return figures


def _workload(sizes: Sizes, *, group_size: int) -> Workload:
    chosen = tuple(prompts(sizes.sequences // group_size, vocab_size=_VOCABULARY))
    return Workload(prompts=chosen, group_size=group_size, num_new_tokens=sizes.new_tokens)


def _commands(sglang: Path | None) -> dict[str, EngineCommand]:
    own = EngineCommand(
        kind=EMBEDDED_ENGINE, python=Path(sys.executable), extra_args=(), max_running_requests=_PLACES,
        num_threads=1, seed=0,
    )  # fmt: skip
    # Not resolved: what a virtual environment holds goes by the name of its link.
    other = sglang and replace(own, kind=SGLANG_ENGINE, python=sglang.absolute(), extra_args=_SGLANG_OPTIONS)
    return {"CPU engine": own, **({"SGLang": other} if other else {})}


def _per_gigabyte(name: str, found: list[ServedFigures]) -> list[Figure]:
    """What a swap takes for each gigabyte: from the smallest to the largest model, so that fixed costs fall out."""
    if len(found) < 2:
        return []
    small, large = found[0], found[-1]
    slope = (large.swap_s - small.swap_s) / ((large.model_bytes - small.model_bytes) / 1e9)
    return [Figure(what="swap, per GB of bf16", subject=name, value=slope, unit="s")]


def _loads(sizes: Sizes) -> list[Load]:
    if not sizes.node_seconds:
        return []
    load = partial(Load, seconds=sizes.node_seconds, turns=1 if sizes.is_quick else _NODE_TURNS)
    loads = [load(name="quickstart's model, 24 tokens", shape=QUICKSTART, num_new_tokens=24, is_target=False)]
    if not sizes.is_quick:
        name = f"20 M weights, {_LONG_ANSWER} tokens"
        loads.append(load(name=name, shape=SMALL, num_new_tokens=_LONG_ANSWER, is_target=True))
    return loads
