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
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

from astraflow.plugins import RewardFailed, RewardLimits, Score, TaskSpec
from astraflow_kit.log import get_logger
from astraflow_raas.sandbox.bubblewrap import Sandbox, open_sandbox
from astraflow_raas.sandbox.literals import NotPlainError, decode
from astraflow_raas.sandbox.run import Order, ProgramLimits, Results, run_program

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
        self._limits = ProgramLimits(test_s=test_s, wall_s=wall_s, memory_mb=memory_mb)
        if not all(getattr(self._limits, field.name) > 0 for field in fields(self._limits)):
            raise ValueError(f"test_s, wall_s and memory_mb must be above 0, they are {self._limits}")
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
        order = order_of(task, code)
        if not code.strip():
            return Score(0.0, {"tests_passed": 0.0, "has_code": 0.0})
        async with self._free:
            found = await run_program(order, sandbox=self._sandbox, limits=self._limits)
        passed = self._num_passed(order, task, found) / max(1, _num_tests(task.data))
        timed_out = found.ending == "timeout" or any(row.get("error") == "timeout" for row in found.results)
        metrics = {"tests_passed": passed, "has_code": 1.0, "program_timeout": float(timed_out)}
        return Score(passed if self._by_fraction else float(passed == 1.0), metrics)

    def _num_passed(self, order: Order, task: TaskSpec, found: Results) -> int:
        if order.kind == "checks":
            return sum(row.get("value") is True for row in found.results)
        if order.kind == "stdio":
            wanted = [case["stdout"] for case in task.data["stdio"]]
            printed = [row.get("printed") for row in found.results]
            pairs = zip(printed, wanted, strict=False)
            return sum(ours is not None and self._same_text(ours, theirs) for ours, theirs in pairs)
        results = [case["result"] for case in task.data["calls"]]
        return sum(self._returned(row, wanted) for row, wanted in zip(found.results, results, strict=False))

    def _returned(self, row: Mapping[str, Any], wanted: object) -> bool:
        if "value" not in row:
            return False
        try:
            value = decode(row["value"], look_up=lambda _: object())
        except (NotPlainError, RecursionError):
            return False
        return self._same(value, wanted)

    def _same(self, value: object, wanted: object) -> bool:
        """Equal, sequences of either kind alike, floats within the tolerance."""
        if isinstance(value, list | tuple) and isinstance(wanted, list | tuple):
            return len(value) == len(wanted) and all(map(self._same, value, wanted))
        if isinstance(value, dict) and isinstance(wanted, dict):
            named = {str(key): item for key, item in value.items()}  # the task's data is JSON
            return named.keys() == wanted.keys() and all(
                self._same(named[key], wanted[key]) for key in wanted
            )
        if isinstance(value, float | int) and isinstance(wanted, float):
            return math.isclose(value, wanted, rel_tol=self._tolerance, abs_tol=self._tolerance)
        return value == wanted

    def _same_text(self, printed: str, wanted: str) -> bool:
        ours, theirs = ([line.split() for line in text.rstrip().split("\n")] for text in (printed, wanted))
        return len(ours) == len(theirs) and all(map(self._same_line, ours, theirs))

    def _same_line(self, ours: Sequence[str], theirs: Sequence[str]) -> bool:
        return len(ours) == len(theirs) and all(map(self._same_word, ours, theirs))

    def _same_word(self, ours: str, theirs: str) -> bool:
        if ours == theirs:
            return True
        try:
            return "." in theirs and self._same(float(ours), float(theirs))
        except ValueError:
            return False


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
        tests = {"sources": [f"{data['test']}\n\ncheck({name})"], "setup": prompt}
        return Order(kind="checks", program=program, tests=tests, name=name)
    if "test_list" in data:
        setup = "\n".join([*data.get("test_imports", ()), str(data.get("test_setup_code", ""))])
        tests = {"sources": data["test_list"], "setup": setup}
        name = _builtin_under_test(data["test_list"])
        return Order(kind="checks", program=f"{setup}\n{code}", tests=tests, name=name)
    if "stdio" in data:
        return Order(kind="stdio", program=code, tests={"inputs": [case["stdin"] for case in data["stdio"]]})
    if "calls" in data and name:
        inputs = [case["arguments"] for case in data["calls"]]
        return Order(kind="calls", program=code, tests={"inputs": inputs}, name=name)
    raise RewardFailed(
        f"task {task.task_id} has no tests: its data needs {_FORMATS}; it has {', '.join(data)}"
    )


def _builtin_under_test(tests: Sequence[str]) -> str:
    """The builtin that the tests are about, as in `assert sum(1, 2) == 3`; empty when they call anything else."""
    calls = [node.func for test in tests for node in ast.walk(ast.parse(test)) if isinstance(node, ast.Call)]
    names = {ast.unparse(called) for called in calls}
    return names.pop() if len(names) == 1 and names <= set(dir(builtins)) else ""


def _num_tests(data: Mapping[str, Any]) -> int:
    return 1 if "test" in data else len(data.get("test_list") or data.get("stdio") or data.get("calls") or ())
