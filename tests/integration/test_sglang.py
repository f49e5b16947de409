"""Real SGLang as a node drives it: swaps under load that lose nothing, spans and log-probs that are exact, and an end
that leaves no process.
"""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import httpx
import psutil
import pytest
import pytest_asyncio
import torch
from transformers import DynamicCache

from astraflow_raas.engine.base import (
    ABORTED,
    Arithmetic,
    EngineUnavailable,
    GenerateCall,
    Generation,
    PauseMode,
)
from astraflow_raas.engine.process import EngineProcess
from astraflow_raas.policies.canary import WeightsDiffer, compare_answers
from astraflow_raas.policies.served_policy import ServedPolicy
from astraflow_trainer.model.model import PolicyModel
from astraflow_trainer.publish.probing import Prober
from astraflow_trainer.ranks.reductions import OneRank
from support.raas_parts import generate_call
from support.scripted_dataflow import eventually
from support.sglang_server import PLACES, START_DEADLINE_S, needs_sglang, on_a_cpu, report, started_sglang
from support.tiny_models import TinyShape, load_reference, save_tiny_model

pytestmark = [
    pytest.mark.ci,
    pytest.mark.integration,
    pytest.mark.usefixtures("on_cpu"),
    needs_sglang,
    pytest.mark.timeout(500),
]

NUM_SWAPS = 30
LENGTH = 400
TOLERANCE = 1e-4


in_the_engines_loop = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder, shape = tmp_path_factory.mktemp("models"), TinyShape(max_positions=1024)
    return [save_tiny_model(folder / f"model{seed}", seed=seed, shape=shape) for seed in (0, 1)]


@pytest.fixture(scope="module", params=[PauseMode.IN_PLACE, PauseMode.RETRACT])
def running(request: pytest.FixtureRequest) -> PauseMode:
    """What becomes of running calls at a swap."""
    mode: PauseMode = request.param
    return mode


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(
    tmp_path_factory: pytest.TempPathFactory, models: list[Path], running: PauseMode
) -> AsyncIterator[EngineProcess]:
    """One of each kind for all tests: to start it takes 20 s. The last of them kills it."""
    with on_a_cpu():
        folder = tmp_path_factory.mktemp("engine")
        process = await started_sglang(folder, models[0], recomputes=running is PauseMode.RETRACT)
    try:
        await process.wait_healthy(timeout_s=START_DEADLINE_S)
        await process.engine.introduce()
        await process.engine.served_version()
        yield process
    finally:
        await process.end()


@in_the_engines_loop
async def test_only_the_node_may_ask_its_engine_and_no_command_line_says_how(engine: EngineProcess) -> None:
    key = engine.engine.headers["Authorization"].removeprefix("Bearer ")
    async with httpx.AsyncClient(base_url=engine.engine.base_url, trust_env=False) as stranger:
        answers = [(await stranger.post(path)).status_code for path in ("/pause_generation", "/generate")]
    leader = psutil.Process(engine.child.pid)
    shown = [process.cmdline() for process in (leader, *leader.children(recursive=True))]
    assert answers == [401, 401]
    assert key not in str(shown)
    assert engine.key_file.stat().st_mode & 0o777 == 0o600


@dataclass
class Load:
    """Keeps the engine's places filled until it is told to stop."""

    process: EngineProcess
    answers: list[tuple[GenerateCall, Generation]]
    num_repeated: int = 0
    """Calls that SGLang took up only after the swap before which they were sent; a node makes them again."""
    stopping: bool = False

    async def one_place(self, place: int) -> None:
        number = 0
        while not self.stopping:
            call = generate_call(
                f"{place}-{number};",
                prompt_ids=(3 + place, 9, 13, number % 90),
                max_new_tokens=LENGTH,
                seed=number,
            )
            rank, taken = self.process.engine.slots.take(1)
            try:
                (answer,) = await self.process.engine.generate([call], rank=rank)
            finally:
                self.process.engine.slots.give_back(rank, taken)
            number += 1
            if answer.finish_reason == ABORTED:
                self.num_repeated += 1
            else:
                self.answers.append((call, answer))


@torch.no_grad()
def expected_logprobs(models: Sequence[Path], call: GenerateCall, answer: Generation) -> list[float]:
    """By transformers in fp32: each span under its version's weights, over the keys and values of those before it,
    which a recomputed one has made anew.
    """
    references = [load_reference(model) for model in models]
    cache, logprobs, known = DynamicCache(), list[float](), [*call.prompt_ids, *answer.token_ids]
    at = 0
    for span in answer.spans:
        end = len(call.prompt_ids) + span.end - 1
        model = references[span.version % 2]
        if span.recomputed:
            cache, at = DynamicCache(), 0
        logits = model(input_ids=torch.tensor([known[at:end]]), past_key_values=cache, use_cache=True).logits[
            0
        ]
        first = len(call.prompt_ids) + span.start - 1 - at
        for row, token in zip(
            torch.log_softmax(logits[first:], dim=-1), answer.token_ids[span.start :], strict=False
        ):
            logprobs.append(float(row[token]))
        at = end
    return logprobs


@in_the_engines_loop
async def test_swaps_under_load_lose_no_token_and_label_every_one(
    engine: EngineProcess, models: list[Path], running: PauseMode
) -> None:
    load, pauses = Load(engine, []), list[float]()
    places = [asyncio.create_task(load.one_place(place)) for place in range(PLACES)]
    for version in range(1, NUM_SWAPS + 1):
        await asyncio.sleep(0.3)
        began_s = time.monotonic()
        await engine.engine.swap(model_dir=models[version % 2], version=version, running=running)
        pauses.append(time.monotonic() - began_s)
    load.stopping = True
    await asyncio.gather(*places)
    short = [
        call.rid
        for call, answer in load.answers
        if answer.finish_reason == "length" and len(answer.token_ids) < LENGTH
    ]
    assert short == [], "a swap lost tokens"
    assert {answer.finish_reason for _, answer in load.answers} <= {"length", "stop"}
    straddling = [(call, answer) for call, answer in load.answers if len(answer.spans) > 1]
    assert straddling, "no swap met a running sequence"
    for _, answer in straddling:
        assert all(one.version < other.version for one, other in pairwise(answer.spans))
        assert {span.recomputed for span in answer.spans[1:]} == {running is PauseMode.RETRACT}
    errors = log_prob_errors(models, [*straddling[:12], *load.answers[:4]])
    report(
        running=running,
        swaps=NUM_SWAPS,
        sequences=len(load.answers),
        tokens=sum(len(answer.token_ids) for _, answer in load.answers),
        straddling=len(straddling),
        lost_tokens=0,
        repeated=load.num_repeated,
        pause_p50_ms=round(sorted(pauses)[NUM_SWAPS // 2] * 1000),
        pause_max_ms=round(max(pauses) * 1000),
        log_prob_errors=errors,
    )
    assert all(error["max"] <= TOLERANCE for error in errors.values()), errors


def log_prob_errors(
    models: Sequence[Path], answers: Sequence[tuple[GenerateCall, Generation]]
) -> dict[str, dict[str, float]]:
    """Absolute differences by where a token stands: in a first span, just after a change, later."""
    kinds: dict[str, list[float]] = {"first span": [], "first token after a swap": [], "later tokens": []}
    for call, answer in answers:
        expected = expected_logprobs(models, call, answer)
        starts = {span.start for span in answer.spans[1:]}
        for index, (found, wanted) in enumerate(zip(answer.logprobs, expected, strict=True)):
            first = index < answer.spans[0].end
            kind = (
                "first span" if first else "first token after a swap" if index in starts else "later tokens"
            )
            kinds[kind].append(abs(found - min(wanted, 0.0)))
    return {
        kind: {"tokens": len(errors), "mean": sum(errors) / len(errors), "max": max(errors)}
        for kind, errors in kinds.items()
        if errors
    }


@in_the_engines_loop
async def test_sglang_proves_its_weights_and_wrong_ones_are_told(
    engine: EngineProcess, models: list[Path], running: PauseMode
) -> None:
    """In float32; test_sglang_changes.py does so in bfloat16."""
    right, wrong = models
    probe = Prober(PolicyModel(load_reference(right)), ranks=OneRank()).answers()
    policy, version = ServedPolicy("solver"), NUM_SWAPS + 1
    assert engine.engine.arithmetic is Arithmetic.FLOAT32
    await engine.engine.swap(model_dir=right, version=version, running=running)
    assert await compare_answers(engine.engine, policy, version=version, probe=probe)
    await engine.engine.swap(model_dir=wrong, version=version + 1, running=running)
    with pytest.raises(WeightsDiffer):
        await compare_answers(engine.engine, policy, version=version + 1, probe=probe)
    await engine.engine.swap(model_dir=right, version=version + 1, running=PauseMode.ABORT)
    assert await compare_answers(engine.engine, policy, version=version + 1, probe=probe)
    await policy.close()


def family(process: EngineProcess) -> list[psutil.Process]:
    return psutil.Process(process.child.pid).children(recursive=True)


def is_gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


@in_the_engines_loop
async def test_a_dead_part_of_sglang_is_noticed_and_nothing_is_left(
    engine: EngineProcess, running: PauseMode
) -> None:
    victim = "scheduler" if running is PauseMode.IN_PLACE else "detokenizer"
    members = family(engine)
    (doomed,) = [member for member in members if victim in " ".join(member.cmdline())]
    began_s = time.monotonic()
    doomed.kill()
    async with asyncio.timeout(60):
        await engine.ended()
    report(victim=victim, noticed_after_s=round(time.monotonic() - began_s, 1))
    await eventually(lambda: all(map(is_gone, members)), what="all of it has ended")
    with pytest.raises(EngineUnavailable):
        await engine.engine.generate([generate_call()])


_NODE = """
import asyncio, sys
from pathlib import Path
from support.sglang_server import started_sglang
async def node():
    process = await started_sglang(Path(sys.argv[1]), Path(sys.argv[2]))
    sys.stderr.write(str(process.child.pid) + chr(10))
    sys.stderr.flush()
    await asyncio.Event().wait()
asyncio.run(node())
"""


@pytest.mark.parametrize("victim", ["node", pytest.param("launcher", marks=pytest.mark.soak)])
async def test_nothing_outlives_a_kill_in_the_middle_of_the_start(
    tmp_path: Path, models: list[Path], victim: str
) -> None:
    paths = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, sys.path)])
    node = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", _NODE, str(tmp_path), str(models[0])),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": paths},
    )
    try:
        assert node.stderr is not None
        guard = psutil.Process(int(await node.stderr.readline()))
        # Scheduler and detokenizer exist and still import: SGLang has not yet bound their lives to the launcher's.
        await eventually(
            lambda: len(guard.children(recursive=True)) > 2,
            what="SGLang has started its parts",
            patience_s=120.0,
        )
        members = [guard, *guard.children(recursive=True)]
        os.kill(node.pid if victim == "node" else members[1].pid, signal.SIGKILL)
        await eventually(lambda: all(map(is_gone, members)), what="all of it has ended", patience_s=30.0)
    finally:
        if node.returncode is None:
            node.kill()
            await node.wait()
