"""A solver writes a program, a tester writes tests for the same problem, and a program that fails them is written anew.

Invariant: programs earn the recipe's reward; a tester earns by tests that the task's reference solution passes, and
more if they say of the first program what the task's own tests say. Named by a recipe as
`astraflow_raas.workflows.solver_tester:SolverTester`; docs/roles.md describes it.
"""

import ast
import re
from collections.abc import Mapping, Sequence
from typing import Any

from astraflow.plugins import (
    Episode,
    Message,
    Policy,
    PolicyUnavailable,
    RewardFailed,
    Scorer,
    TaskSpec,
    Trajectory,
    TrajectoryBuilder,
)
from astraflow_raas.workflows.prompts import fill, problem_of, require_places

_TESTER_PROMPT = """\
{problem}

Do not solve this. Write {cases} tests for a solution: one `assert` on each line if it is a function, or
`Input: ... Output: ...` on each line if it is a program that reads and prints."""
_RETRY_PROMPT = """\
Your program fails at least one of these tests:
{tests}

Write it again, whole."""
_ASSERT = re.compile(r"^\s*(assert .+?)\s*$", re.M)
_CASE = re.compile(r"Input:[ \t]*(.+?)\s*Output:[ \t]*(.+?)\s*$", re.M)


class SolverTester:
    """Plays roles `solver` and `tester`: a program, `cases` tests, and another program where they find a fault.

    A task's data has `reference`, a solution, beside `test_list` or `stdio`; with `statement` the tester sees that
    instead of the messages, which may show tests. A tester earns (valid + diagnosis) / 2: valid if the reference passes
    all its tests, diagnosis if besides the first program passes them exactly when it is right. The solver is asked
    again, with its program and `retry_prompt` (place `{tests}`), where valid tests fail a program that is wrong.
    """

    roles = ("solver", "tester")

    def __init__(
        self,
        *,
        reward: Scorer,
        cases: int = 2,
        tester_prompt: str = _TESTER_PROMPT,
        retry_prompt: str = _RETRY_PROMPT,
        correct_from: float = 1.0,
    ) -> None:
        if not 1 <= cases <= _MAX_CASES:
            raise ValueError(f"cases is {cases}; give 1 to {_MAX_CASES}")
        require_places("tester_prompt", tester_prompt, "problem")
        require_places("retry_prompt", retry_prompt, "tests")
        self._reward, self._cases, self._correct_from = reward, cases, correct_from
        self._tester_prompt, self._retry_prompt = tester_prompt, retry_prompt

    async def run(self, task: TaskSpec, policies: Mapping[str, Policy]) -> Episode:
        """Return the programs and the tests, of the roles that want them; without a tester, the first program."""
        solver, tester = policies["solver"], policies["tester"]
        trajectories: list[Trajectory] = []
        first, program = await _ask(solver, task.messages)
        score = await self._reward(task, program, policies=policies)
        if solver.wants_trajectory:
            trajectories.append(first.build(reward=score.reward))
        metrics = {"first": score.reward, "team": score.reward, "retry": 0.0}
        problem = str(task.data.get("statement") or problem_of(task.messages))
        prompt = fill(self._tester_prompt, problem=problem, cases=str(self._cases))
        try:
            testing, tests = await _ask(tester, [Message("user", prompt)])
        except PolicyUnavailable:
            if not trajectories:
                raise
            return Episode(tuple(trajectories))
        is_right = score.reward >= self._correct_from
        valid, passes = await self._judge(task, tests, program)
        diagnosis = valid and passes is is_right
        if tester.wants_trajectory:
            trajectories.append(testing.build(reward=(valid + diagnosis) / 2))
        if valid and not passes and not is_right:
            retry = Message("user", fill(self._retry_prompt, tests=tests))
            second, program = await _ask(solver, (*task.messages, Message("assistant", program), retry))
            score = await self._reward(task, program, policies=policies)
            if solver.wants_trajectory:
                trajectories.append(second.build(reward=score.reward))
            metrics |= {"team": score.reward, "retry": 1.0}
        metrics |= {"tests_valid": float(valid), "diagnosis": float(diagnosis)}
        return Episode(tuple(trajectories), metrics)

    async def _judge(self, task: TaskSpec, tests: str, program: str) -> tuple[bool, bool]:
        """Whether the reference passes the tests, and if so, whether the program does."""
        reference = str(task.data.get("reference", ""))
        if not reference:
            raise RewardFailed(
                f"task {task.task_id} has no `reference` in its data, by which tests are judged"
            )
        data = cases_of(tests, task.data, number=self._cases)
        if data is None:
            return False, False
        own = TaskSpec(task.task_id, task.messages, data)
        valid = (await self._reward(own, reference)).reward >= self._correct_from
        return valid, valid and (await self._reward(own, program)).reward >= self._correct_from


_MAX_CASES = 16


def cases_of(tests: str, data: Mapping[str, Any], *, number: int) -> Mapping[str, Any] | None:
    """Return the first `number` tests in the format of the task's own; None where there are fewer that could be run.

    An assert counts only if it calls what the reference defines: `assert True` tests nothing.
    """
    if "stdio" in data:
        cases = [{"stdin": f"{given}\n", "stdout": f"{wanted}\n"} for given, wanted in _CASE.findall(tests)]
        return {"stdio": cases[:number]} if len(cases) >= number else None
    defined = re.findall(r"^(?:async )?(?:def|class)\s+(\w+)", str(data.get("reference", "")), re.M)
    asserts = [line for line in _ASSERT.findall(tests) if _calls(line, defined)]
    if len(asserts) < number:
        return None
    return {key: data[key] for key in ("test_imports", "test_setup_code") if key in data} | {
        "test_list": asserts[:number]
    }


def _calls(line: str, defined: Sequence[str]) -> bool:
    try:
        nodes = list(ast.walk(ast.parse(line)))
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return False
    return any(isinstance(node, ast.Call) and ast.unparse(node.func) in defined for node in nodes)


async def _ask(policy: Policy, messages: Sequence[Message]) -> tuple[TrajectoryBuilder, str]:
    turn = TrajectoryBuilder(policy)
    turn.add_prompt(messages)
    return turn, (await turn.generate()).text
