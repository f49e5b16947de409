"""Which tests of a tester count, what it earns by them, and when a program is written again."""

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from astraflow.plugins import Episode, Message, RewardFailed, TaskSpec
from astraflow_raas.grading.scoring import RewardScorer
from astraflow_raas.workflows.solver_tester import SolverTester, cases_of
from support.agents import ScriptedPolicy

OWN = {"test_list": ["assert f(1) == 2"], "reference": "def f(x): return x + 1"}
RIGHT, WRONG = "def f(x): return 1 + x", "def f(x): return x"
VALID, USELESS, FALSE = (
    "assert f(2) == 3\nassert f(3) == 4",
    "assert f(0) != 7\n" * 2,
    "assert f(2) == 9\n" * 2,
)


def passes(task: TaskSpec, program: str) -> float:
    names: dict[str, Any] = {}
    exec(program, names)  # noqa: S102 - programs of this file
    try:
        exec("\n".join(task.data["test_list"]), names)  # noqa: S102
    except AssertionError:
        return 0.0
    return 1.0


def play(programs: list[str], tests: str, data: Mapping[str, Any] = OWN) -> Episode:
    script = list(programs)
    solver = ScriptedPolicy(lambda _: script.pop(0))
    tester = ScriptedPolicy(lambda _: tests, name="tester", role="tester")
    task = TaskSpec("t", (Message("user", "Add 1."),), data)
    workflow = SolverTester(reward=RewardScorer(passes))
    return asyncio.run(workflow.run(task, {"solver": solver, "tester": tester}))


@pytest.mark.parametrize(
    ("programs", "tests", "rewards"),
    [
        ([RIGHT], VALID, [1.0, 1.0]),
        ([WRONG, RIGHT], VALID, [0.0, 1.0, 1.0]),
        ([WRONG, WRONG], VALID, [0.0, 1.0, 0.0]),
        ([WRONG], USELESS, [0.0, 0.5]),  # the reference passes them, and so does what is wrong
        ([RIGHT], USELESS, [1.0, 1.0]),
        ([WRONG], FALSE, [0.0, 0.0]),
        ([RIGHT], "assert True\nassert 1", [1.0, 0.0]),
        ([RIGHT], "assert f(2) == 3", [1.0, 0.0]),
    ],
)
def test_tests_earn_by_the_reference_and_by_what_they_say_of_the_first_program(
    programs: list[str], tests: str, rewards: list[float]
) -> None:
    episode = play(programs, tests)
    assert [item.reward for item in episode.trajectories] == rewards
    assert [item.role for item in episode.trajectories][:2] == ["solver", "tester"]
    assert episode.metrics["retry"] == len(programs) - 1


@pytest.mark.parametrize(
    ("text", "data", "found"),
    [
        (
            "assert f(1)\nassert g(1)\n  assert f(2) == (3\nassert f(f(2))",
            OWN,
            ["assert f(1)", "assert f(f(2))"],
        ),
        ("Input: 1 2 Output: 3\nInput: 4\nOutput: 5", {"stdio": []}, [("1 2\n", "3\n"), ("4\n", "5\n")]),
        ("Input: 1 Output: 2", {"stdio": []}, None),
        ("assert f(1)\nassert " + "(" * 500, OWN, None),
    ],
)
def test_only_tests_that_can_be_run_count(
    text: str, data: Mapping[str, Any], found: list[Any] | None
) -> None:
    cases = cases_of(text, data, number=2)
    if found is None:
        assert cases is None
        return
    assert cases is not None
    stdio = [(case["stdin"], case["stdout"]) for case in cases.get("stdio", [])]
    assert (stdio or cases["test_list"]) == found


def test_a_task_without_a_reference_fails_its_episode() -> None:
    with pytest.raises(RewardFailed, match="has no `reference`"):
        play([RIGHT], VALID, {"test_list": OWN["test_list"]})
