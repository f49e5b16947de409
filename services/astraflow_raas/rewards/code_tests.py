"""A ready-made reward: the completion's program passes the task's tests, in a sandbox.

Invariant: tests and expected values never enter the process of the program; without a sandbox the reward cannot be
made, unless a recipe says `dangerously_without_sandbox`. Named by a recipe as
`astraflow_raas.rewards.code_tests:CodeTests`; awaited in the node's event loop, which it does not hold.
"""

import ast
import asyncio
import builtins
import math
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from astraflow.plugins import RewardFailed, RewardLimits, Score, TaskSpec
from astraflow_kit.log import get_logger
from astraflow_raas.programs.run import Order, ProgramLimits, run_program
from astraflow_raas.programs.sandbox import Sandbox, open_sandbox

log = get_logger(__name__)

_FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.S)
_FORMATS = (
    "`test` and `entry_point` (HumanEval), `test_list` (MBPP), `stdio` or `entry_point` and `calls`; see "
    "docs/plugins/reward.md"
)


class CodeTests:
    """1.0 when every test passes, else 0.0; with `reward: fraction` the share of tests that pass.

    Metrics: `tests_passed` (a share), `has_code`, `program_timeout`. The last fenced block counts, or else the whole
    completion. `concurrency` bounds the programs of this node; 0 is one per core.
    """

    limits = RewardLimits(timeout_s=3600.0)  # queued behind others; a program has limits of its own

    def __init__(
        self,
        *,
        reward: Literal["all", "fraction"] = "all",
        test_s: float = ProgramLimits.test_s,
        wall_s: float = ProgramLimits.wall_s,
        memory_mb: int = ProgramLimits.memory_mb,
        float_tolerance: float = 1e-6,
        concurrency: int = 0,
        python: str = "",
        dangerously_without_sandbox: bool = False,
    ) -> None:
        self._by_fraction = reward == "fraction"
        self._limits = ProgramLimits(
            test_s=test_s, wall_s=wall_s, memory_mb=memory_mb, cpu_s=max(1, math.ceil(wall_s))
        )
        self._tolerance = float_tolerance
        self._free = asyncio.Semaphore(concurrency or os.cpu_count() or 1)
        if dangerously_without_sandbox:
            log.warning(
                "reward.without_sandbox", message="generated programs may do whatever this user may do"
            )
            self._sandbox = Sandbox(python=Path(python or sys.executable).resolve(), isolated=False)
        else:
            self._sandbox = open_sandbox(python)

    async def __call__(self, task: TaskSpec, completion: str) -> Score:
        """Return the score. Raises RewardFailed for a task without tests, and when no sandbox can be started."""
        code = code_of(completion)
        order = replace(order_of(task, code), tolerance=self._tolerance)
        if not order.num_tests:
            raise RewardFailed(f"task {task.task_id} has an empty list of tests; its data needs {_FORMATS}")
        if not code.strip():
            return Score(0.0, {"tests_passed": 0.0, "has_code": 0.0})
        async with self._free:
            found = await run_program(order, sandbox=self._sandbox, limits=self._limits)
        passed = sum(row.get("value") is True for row in found.results) / order.num_tests
        timed_out = found.ending == "timeout" or any(row.get("error") == "timeout" for row in found.results)
        metrics = {"tests_passed": passed, "has_code": 1.0, "program_timeout": float(timed_out)}
        return Score(passed if self._by_fraction else float(passed == 1.0), metrics)


def code_of(completion: str) -> str:
    """The last fenced block, or the whole completion when there is none."""
    blocks = _FENCED.findall(completion)
    return blocks[-1] if blocks else completion


def order_of(task: TaskSpec, code: str) -> Order:
    """What to run for the task's tests, by the keys of its data. Raises RewardFailed."""
    data = task.data
    name = str(data.get("entry_point", ""))
    if "test" in data and name:
        prompt = str(data.get("prompt", ""))
        whole = re.search(rf"^\s*(?:async\s+)?(?:def|class)\s+{re.escape(name)}\b", code, re.M)
        program = f"{prompt}\n\n{code}" if whole else f"{prompt}{code}"
        tests: dict[str, Any] = {"sources": [f"{data['test']}\n\ncheck({name})"], "setup": prompt}
        return Order(kind="checks", program=program, tests=tests, name=name)
    if "test_list" in data:
        setup = "\n".join([*data.get("test_imports", ()), str(data.get("test_setup_code", ""))])
        tests = {"sources": data["test_list"], "setup": setup}
        name = _builtin_under_test(data["test_list"])
        return Order(kind="checks", program=f"{setup}\n{code}", tests=tests, name=name)
    if "stdio" in data:
        return Order(kind="stdio", program=code, tests=_pairs(data["stdio"], "stdin", "stdout"))
    if "calls" in data and name:
        tests = _pairs(data["calls"], "arguments", "result")
        return Order(kind="calls", program=code, tests=tests, name=name)
    raise RewardFailed(
        f"task {task.task_id} has no tests: its data needs {_FORMATS}; it has {', '.join(data)}"
    )


def _pairs(cases: Sequence[Mapping[str, Any]], given: str, wanted: str) -> dict[str, list[Any]]:
    return {"inputs": [case[given] for case in cases], "results": [case[wanted] for case in cases]}


def _builtin_under_test(tests: Sequence[str]) -> str:
    """The builtin that the tests are about, as in `assert sum(1, 2) == 3`; empty when they call anything else."""
    calls = [node.func for test in tests for node in ast.walk(ast.parse(test)) if isinstance(node, ast.Call)]
    names = {ast.unparse(called) for called in calls}
    return names.pop() if len(names) == 1 and names <= set(dir(builtins)) else ""
