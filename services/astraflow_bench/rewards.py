"""What grading costs on this machine: rewards in the loop, in worker processes, and programs in the sandbox.

Invariant: every figure is of the code that nodes run; a figure is the best of several rounds, because other work on the
machine only ever adds. Called by the command `astraflow bench rewards`.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from astraflow.plugins import MissingCapability, RewardLimits, Score, TaskSpec
from astraflow.recipe.plugin_settings import PluginSettings
from astraflow_kit.plugins import RecipeSource
from astraflow_raas.grading.pool import WorkerPool
from astraflow_raas.grading.process import WorkerOrder, start_worker
from astraflow_raas.grading.scoring import RewardScorer
from astraflow_raas.rewards.boxed_match import BoxedMatch
from astraflow_raas.rewards.code_tests import CodeTests
from astraflow_raas.rewards.math_verify import MathVerify

_MATH = "astraflow_raas.rewards.math_verify:MathVerify"
_NUMBER = TaskSpec("number", (), {"answer": "18"}), r"so \boxed{18.0}"
_EXPRESSION = TaskSpec("expression", (), {"answer": r"\frac{3\sqrt{2}}{4}"}), r"so \boxed{0.75\sqrt{2}}"
_PROGRAM = (
    TaskSpec(
        "program", (), {"entry_point": "f", "calls": [{"arguments": [n], "result": n + 1} for n in range(3)]}
    ),
    "def f(n): return n + 1",
)


@dataclass(frozen=True, kw_only=True)
class Grading:
    """One row: gradings a second, and the milliseconds that one takes while `side_by_side` are under way."""

    name: str
    side_by_side: int
    per_s: float
    ms: float


async def measure(*, calls: int, rounds: int) -> list[Grading]:
    """Return every row; those of a package or program that is missing are left out."""
    rows = [await _row("BoxedMatch in the loop", RewardScorer(BoxedMatch()), _NUMBER, calls, rounds, 1)]
    rows += await _math(calls=calls, rounds=rounds)
    try:
        reward = CodeTests()
    except MissingCapability:
        return rows
    for width in (1, 2):
        scorer = RewardScorer(reward)
        rows.append(await _row("CodeTests, 3 calls", scorer, _PROGRAM, max(4, calls // 20), rounds, width))
    return rows


async def _math(*, calls: int, rounds: int) -> list[Grading]:
    try:
        scorer = RewardScorer(MathVerify())
    except MissingCapability:
        return []
    rows = [
        await _row("MathVerify in the loop, a number", scorer, _NUMBER, calls, rounds, 1),
        await _row("MathVerify in the loop, an expression", scorer, _EXPRESSION, calls, rounds, 1),
    ]
    plugin, source = PluginSettings(use=_MATH), RecipeSource()
    for processes in (1, 2):
        limits = RewardLimits(processes=processes, timeout_s=60.0)
        order = WorkerOrder(plugin=plugin, source=source, limits=limits)
        pool = WorkerPool(order)
        await asyncio.gather(*(pool.score(*_NUMBER) for _ in range(2 * processes)))
        for what, case in (("a number", _NUMBER), ("an expression", _EXPRESSION)):
            rows.append(
                await _row(f"MathVerify in workers, {what}", pool.score, case, calls, rounds, processes)
            )
        await pool.stop(deadline_s=10.0)
    return [*rows, await _start(order, rounds=rounds)]


async def _start(order: WorkerOrder, *, rounds: int) -> Grading:
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        worker = await start_worker(order)
        times.append(time.perf_counter() - began)
        await worker.end()
    return Grading(
        name="start of a worker with sympy", side_by_side=1, per_s=1 / min(times), ms=1e3 * min(times)
    )


async def _row(
    name: str,
    score: Callable[[TaskSpec, str], Awaitable[Score]],
    case: tuple[TaskSpec, str],
    calls: int,
    rounds: int,
    width: int,
) -> Grading:
    async def one_after_the_other() -> None:
        for _ in range(calls):
            assert (await score(*case)).reward == 1.0

    best = min([await _timed(one_after_the_other, width) for _ in range(rounds)])
    return Grading(name=name, side_by_side=width, per_s=width * calls / best, ms=1e3 * best / calls)


async def _timed(work: Callable[[], Awaitable[None]], width: int) -> float:
    began = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(width)))
    return time.perf_counter() - began
