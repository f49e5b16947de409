"""What a whole node takes from its engine: the same engine process under the node, and asked directly, in turns.

Invariant: `astraflow dev` runs as users run it, with a step too large ever to be full, so that the node never waits for
the trainer; while the engine is asked directly the node is stopped, and what is asked are the run's own tasks. Both
keep the same number of sequences in the engine. CPU time is compared, because it holds on a busy machine too.
"""

import asyncio
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, astuple, dataclass
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median

import httpx
import psutil

from astraflow.recipe.file import load_recipe
from astraflow_bench.development import development_run
from astraflow_bench.figures import Figure, cpu_seconds
from astraflow_bench.rollout.callbacks import CallbackWatch
from astraflow_bench.rollout.models import Shape
from astraflow_dataflow.runs.mixed_dataset import make_dataset
from astraflow_kit.plugins import RecipeSource
from astraflow_raas.engine.base import GenerateCall
from astraflow_raas.engine.http import HttpEngine
from astraflow_raas.policies.tokenizer import load_tokenizer

MOST_OVERHEAD = 0.05
EPISODES = 64
_GROUP = 8
_START_S = 300.0
_WARM_UP_S = 2.0
_GENERATIONS = 2
"""Answers of each place in a turn, at least."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """What is asked of the node: which model, answers of how many tokens at most, and how long each turn takes."""

    name: str
    shape: Shape
    num_new_tokens: int
    seconds: float
    turns: int
    is_target: bool
    """Whether the target is for this model: the quickstart's is so small that a request costs as much as its tokens."""


@dataclass(frozen=True)
class _Turn:
    """Since some moment: tokens and passes of the engine, CPU seconds of engine and node, seconds."""

    tokens: float
    passes: float
    engine_s: float
    node_s: float
    wall_s: float

    def since(self, earlier: "_Turn") -> "_Turn":
        return _Turn(*(now - then for now, then in zip(astuple(self), astuple(earlier), strict=True)))


async def measure_node(recipe: Path, load: Load, *, folder: Path) -> list[Figure]:
    """The node's overhead. Raises CalledProcessError when the run ends by itself, TimeoutError when it never begins."""
    watch = CallbackWatch(module="astraflow_raas", file=folder / "callbacks.jsonl")
    with _run(recipe, load, folder=folder, environment=watch.environment) as run:
        node, engine = await _until_sampling(run)
        watch.new()  # those of its start
        prompts = await asyncio.to_thread(_prompts, recipe, engine)
        num_tokens = _GENERATIONS * EPISODES * load.num_new_tokens
        turn = partial(_turn, node, engine, seconds=load.seconds, num_tokens=num_tokens)
        through, direct = list[_Turn](), list[_Turn]()
        for _ in range(load.turns):
            through.append(await turn())
            node.send_signal(signal.SIGSTOP)
            asking = asyncio.create_task(_ask(engine, prompts, num_new_tokens=load.num_new_tokens))
            direct.append(await turn())
            asking.cancel()
            await asyncio.wait([asking])
            node.send_signal(signal.SIGCONT)
    return [*_figures(load, through, direct), watch.figure(load.name)]


def _figures(load: Load, through: Sequence[_Turn], direct: Sequence[_Turn]) -> list[Figure]:
    engine_s, alone_s = _per(through, "engine_s", "tokens"), _per(direct, "engine_s", "tokens")
    rate, share = (
        partial(Figure, subject="CPU engine", unit="tokens/CPU-s"),
        partial(Figure, subject="", unit="of 1"),
    )
    most = MOST_OVERHEAD if load.is_target else None
    passes = _per(through, "tokens", "passes") / _per(direct, "tokens", "passes")
    clock = _per(through, "tokens", "wall_s") / _per(direct, "tokens", "wall_s")
    return [
        rate(what=f"{load.name}: engine under the node", value=1 / engine_s),
        rate(what=f"{load.name}: engine asked directly", value=1 / alone_s),
        share(what=f"{load.name}: throughput that the engine loses", value=1 - alone_s / engine_s, most=most),
        share(
            what=f"{load.name}: CPU of the node, of the engine's", value=_per(through, "node_s", "engine_s")
        ),
        share(what=f"{load.name}: sequences in a pass, of those asked directly", value=passes),
        share(what=f"{load.name}: tokens/s by the clock, of those asked directly", value=clock),
    ]


def _per(turns: Sequence[_Turn], figure: str, other: str) -> float:
    """The median of a quotient over the turns."""
    return float(median(getattr(turn, figure) / getattr(turn, other) for turn in turns))


def _run(
    recipe: Path, load: Load, *, folder: Path, environment: Mapping[str, str]
) -> AbstractContextManager[psutil.Popen]:
    model, shape = "policies.solver.model", load.shape
    sizes = [f"{model}.architecture.{name}={value}" for name, value in asdict(shape).items()]
    settings = [
        *sizes,
        f"{model}.architecture.max_position_embeddings=512",
        f"{model}.warm_start.steps=1",
        f"policies.solver.sampling.max_new_tokens={load.num_new_tokens}",
        f"dataflow.group_size={_GROUP}",
        "dataflow.groups_per_step=65536",
        f"raas.max_concurrent_tasks={EPISODES // _GROUP}",
        # The first version is evaluated whatever is said: a thousand prompts that nobody shares, for minutes.
        "dataflow.evaluation.every_versions=0",
        "dataflow.evaluation.final_samples=1",
    ]
    return development_run(recipe, settings, folder=folder, environment=environment)


async def _until_sampling(run: psutil.Popen) -> tuple[psutil.Process, psutil.Process]:
    """The processes of the node and of its engine, once tokens flow."""
    async with asyncio.timeout(_START_S), httpx.AsyncClient(trust_env=False) as client:
        while True:
            if run.poll() is not None:
                raise subprocess.CalledProcessError(run.returncode, run.args)
            found = {name: _child(run, name) for name in ("astraflow_raas", "astraflow_engine")}
            node, engine = found["astraflow_raas"], found["astraflow_engine"]
            if node is not None and engine is not None and await _count(client, engine) is not None:
                await asyncio.sleep(_WARM_UP_S)
                return node, engine
            await asyncio.sleep(0.2)


def _child(run: psutil.Popen, module: str) -> psutil.Process | None:
    """The process below the run that is this module, not the one that guards it."""
    for child in run.children(recursive=True):
        try:
            words = child.cmdline()
        except psutil.Error:
            continue
        # Engines are kept from the current folder by their environment, not by -P.
        if [word for word in words[1:4] if word != "-P"][:2] == ["-m", module]:
            return child
    return None


async def _count(client: httpx.AsyncClient, engine: psutil.Process) -> tuple[float, float] | None:
    """Tokens and passes of the engine so far; None before the first token."""
    try:
        answer = await client.get(
            f"{_url(engine)}/server_info", headers={"authorization": f"Bearer {_key(engine)}"}
        )
    except httpx.TransportError:
        return None
    (state,) = answer.json()["internal_states"]
    return (state["num_generated_tokens"], state["num_passes"]) if state["num_running"] else None


def _option(engine: psutil.Process, name: str) -> str:
    words = engine.cmdline()
    return words[words.index(name) + 1]


def _url(engine: psutil.Process) -> str:
    return f"http://127.0.0.1:{_option(engine, '--port')}"


def _key(engine: psutil.Process) -> str:
    return Path(_option(engine, "--api-key-file")).read_text().strip()


async def _turn(node: psutil.Process, engine: psutil.Process, *, seconds: float, num_tokens: int) -> _Turn:
    """What happened in some seconds and tokens, after a moment in which the last turn's sequences end.

    Answers must begin and end within it: without prefill, an engine that has just been filled looks faster than it is.
    """

    async def now() -> _Turn:
        found = None
        while found is None:
            found = await _count(client, engine)
        engine_s, node_s = (cpu_seconds([process.pid], with_children=False) for process in (engine, node))
        return _Turn(*found, engine_s, node_s, time.monotonic())

    async with httpx.AsyncClient(trust_env=False, timeout=60.0) as client:
        await asyncio.sleep(_WARM_UP_S)
        began = await now()
        while True:
            await asyncio.sleep(seconds)
            passed = (await now()).since(began)
            if passed.tokens >= num_tokens:
                return passed


def _prompts(recipe: Path, engine: psutil.Process) -> list[tuple[int, ...]]:
    """Tasks of the run as its engine gets them."""
    loaded = load_recipe(recipe)
    source = RecipeSource(folder=loaded.folder)
    dataset = make_dataset(loaded.recipe, source)
    tokenizer = load_tokenizer(Path(_option(engine, "--model-path")))
    tasks = (dataset.train(index) for index in range(1024))
    return [tokenizer.encode(task.messages) for task in tasks if task is not None]


async def _ask(engine: psutil.Process, prompts: Sequence[tuple[int, ...]], *, num_new_tokens: int) -> None:
    """Keep `EPISODES` sequences in the engine, in groups of one prompt, until cancelled."""
    client, numbers = HttpEngine(_url(engine), api_key=_key(engine)), count()

    async def one_group() -> None:
        for number in numbers:
            calls = [
                GenerateCall(
                    rid=f"direct-{number}-{member};",
                    prompt_ids=prompts[number % len(prompts)],
                    max_new_tokens=num_new_tokens,
                    temperature=1.0,
                    top_p=1.0,
                    top_k=0,
                    seed=_GROUP * number + member,
                )
                for member in range(_GROUP)
            ]
            await client.generate(calls)

    try:
        async with asyncio.TaskGroup() as groups:
            for _ in range(EPISODES // _GROUP):
                groups.create_task(one_group())
    finally:
        await client.close()
