"""The recipes of code, on MBPP's and HumanEval's own rows: references earn 1, stubs 0, each agent its own."""

import json
from itertools import islice
from pathlib import Path

import pytest

from astraflow.errors import PluginError
from astraflow.plugins import TaskSpec
from support.recipes import PlayedRecipe, played, recipe_code, task_data
from support.sandbox import needs_bubblewrap

recipe = recipe_code("code")
pytestmark = needs_bubblewrap
SMALL = ["code/small.yaml", "code-multi-agent/small.yaml", "code-multi-agent/small-testgen.yaml"]


def real_files() -> list[str]:
    mbpp, humaneval = task_data("mbpp") / "sanitized.jsonl.gz", task_data("humaneval") / "test.jsonl.gz"
    where = "run.sources.{}.dataset.with.file={}"
    return [where.format("mbpp", mbpp), where.format("humaneval", humaneval)]


def heldout(code: PlayedRecipe, index: int) -> TaskSpec:
    task = code.dataset.heldout(index)
    assert task is not None
    return task


def reference(task: TaskSpec) -> str:
    body = task.data["reference"]
    return f"```python\n{task.data.get('prompt', '')}{body}\n```"


STUB = "```python\ndef nothing(): return None\n```"


async def test_references_of_mbpp_and_humaneval_earn_1_and_stubs_0(tmp_path: Path) -> None:
    async with played("code", *real_files(), scratch=tmp_path) as code:
        tasks = [heldout(code, index) for index in range(4)]
        assert {task.source for task in tasks} == {"mbpp", "humaneval"}
        for task in tasks:
            for said, reward in ((reference(task), 1.0), (STUB, 0.0)):
                episode = await code.episode(task, solver=lambda _, said=said: said)
                assert [each.reward for each in episode.trajectories] == [reward], task.task_id


async def test_a_selector_earns_by_its_choice_between_two_programs(tmp_path: Path) -> None:
    async with played("code-multi-agent", *real_files(), scratch=tmp_path) as code:
        task = heldout(code, 0)
        programs = [reference(task), STUB] * 4
        for said, reward in (("A is right, so A", 1.0), ("B", 0.0), ("neither", 0.0)):
            episode = await code.episode(
                task, solver=lambda _: programs.pop(0), selector=lambda _, said=said: said
            )
            given = [(each.policy, each.reward) for each in episode.trajectories]
            assert given == [("solver", 1.0), ("solver", 0.0), ("selector", reward)]


async def test_a_tester_earns_by_valid_tests_and_a_wrong_program_is_written_again(tmp_path: Path) -> None:
    async with played("code-multi-agent/testgen.yaml", *real_files()[:1], scratch=tmp_path) as code:
        task = heldout(code, 0)
        tests = "\n".join(task.data["test_list"][:2])

        def solve(prompt: str) -> str:
            return reference(task) if "fails at least one" in prompt else STUB

        episode = await code.episode(task, solver=solve, tester=lambda _: f"Here:\n{tests}")
        given = [(each.policy, each.reward) for each in episode.trajectories]
        assert given == [("solver", 0.0), ("tester", 1.0), ("solver", 1.0)]
        assert (episode.metrics["first"], episode.metrics["team"]) == (0.0, 1.0)
        shown: list[str] = []
        wrong = await code.episode(
            task, solver=solve, tester=lambda said: shown.append(said) or "assert True\n" * 2
        )
        assert [each.reward for each in wrong.trajectories] == [0.0, 0.0]
        assert not any(test in shown[0] for test in task.data["test_list"])


@pytest.mark.parametrize("file", SMALL)
async def test_generated_programs_are_graded_by_what_they_print(file: str, tmp_path: Path) -> None:
    async with played(file, scratch=tmp_path) as code:
        task = heldout(code, 0)
        (case, _) = task.data["stdio"]
        right = task.data["reference"]
        others = {
            "selector": lambda _: "A",
            "tester": lambda _: f"Input: {case['stdin']}Output: {case['stdout']}Input: 2 Output: 1",
        }
        answers = {name: others[name] for name in code.recipe.resolved_roles if name in others}
        for said, reward in ((right, 1.0), ("print(1)", 0.0)):
            episode = await code.episode(task, solver=lambda _, said=said: said, **answers)
            assert episode.trajectories[0].reward == reward


async def test_a_program_that_never_ends_costs_its_episode_and_nothing_else(tmp_path: Path) -> None:
    limits = (
        'raas.reward={use: "astraflow_raas.rewards.code_tests:CodeTests", with: {test_s: 0.5, wall_s: 20}}'
    )
    async with played("code/small.yaml", limits, scratch=tmp_path) as code:
        task = heldout(code, 0)
        late = await code.episode(task, solver=lambda _: "while True: pass")
        assert (late.trajectories[0].reward, late.metrics["program_timeout"]) == (0.0, 1.0)
        assert (await code.episode(task, solver=lambda _: task.data["reference"])).trajectories[
            0
        ].reward == 1.0


async def test_missing_data_and_rows_without_tests_are_named(tmp_path: Path) -> None:
    file = tmp_path / "mbpp.jsonl"
    for brings in ("curl -L", "mbpp.jsonl:1: no 'tests|test_list'"):
        with pytest.raises(PluginError) as caught:
            async with played("code", f"run.sources.mbpp.dataset.with.file={file}", scratch=tmp_path):
                pass
        assert brings in caught.value.message
        file.write_text(json.dumps({"task_id": 601, "text": "Add.", "code": "def add(): ..."}))


def test_no_held_out_numbers_are_trained_on_or_demonstrated() -> None:
    lines = recipe.Lines(seed=1)
    asked = {lines.train(index).messages[0].content for index in range(1000)}
    held_out = {lines.heldout(index).messages[0].content for index in range(1000)}
    asked |= {each.messages[0].content for each in islice(recipe.demonstrations(1), 1000)}
    streams = recipe.selector_demonstrations(1), recipe.tester_demonstrations(1)
    shown = "\n".join(each.messages[0].content for stream in streams for each in islice(stream, 1000))
    assert not held_out & asked
    assert not [question for question in held_out if question in shown]
