"""The three recipes of math: real rows to their policies and rewards, splits that never meet, three lines apart."""

import gzip
import json
import re
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import pytest

from astraflow.errors import PluginError
from astraflow.plugins import TaskSpec
from astraflow.recipe.file import load_recipe
from astraflow.recipe_changes import settings_of
from support.recipes import played, recipe_code, task_data
from support.source_tree import REPOSITORY

recipe = recipe_code("math")
FOLDER = "run.dataset.with.folder"


def boxed(answer: object) -> str:
    return f"So it is \\boxed{{{answer}}}."


async def test_a_gsm8k_row_earns_1_for_its_answer_and_0_for_another(tmp_path: Path) -> None:
    async with played("math", f"{FOLDER}={task_data('gsm8k')}", scratch=tmp_path) as math:
        for index in range(3):
            task = math.dataset.heldout(index)
            assert task is not None
            answer = float(task.data["answer"])
            for said, reward in ((f"{answer:,}", 1.0), (answer + 1, 0.0)):
                episode = await math.episode(task, solver=lambda _, said=said: boxed(said))
                assert [(each.policy, each.reward) for each in episode.trajectories] == [("solver", reward)]


async def test_all_rows_of_gsm8k_have_an_answer_and_no_question_is_in_both_splits(tmp_path: Path) -> None:
    async with played("math", f"{FOLDER}={task_data('gsm8k')}", scratch=tmp_path) as math:
        train, test = tasks(math.dataset.train, 7473), tasks(math.dataset.heldout, 1320)
        assert (len(train), len(test)) == (7473, 1319)
        assert all(re.fullmatch(r"-?\d+", task.data["answer"]) for task in [*train, *test])
        assert not {task.data["problem"] for task in train} & {task.data["problem"] for task in test}


async def test_a_rejected_solver_tries_again_and_each_answer_goes_to_its_policy(tmp_path: Path) -> None:
    async with played("math-multi-agent", f"{FOLDER}={task_data('gsm8k')}", scratch=tmp_path) as math:
        task = math.dataset.train(0)
        assert task is not None
        right = task.data["answer"]

        def solve(prompt: str) -> str:
            return boxed(right if "rejected it" in prompt else "-1")

        def verify(prompt: str) -> str:
            return "APPROVE" if boxed(right) in prompt else "It is wrong. REJECT"

        episode = await math.episode(task, solver=solve, verifier=verify)
        given = [(each.policy, each.role, each.reward) for each in episode.trajectories]
        first, verdict, second = (
            ("solver", "solver", 0.0),
            ("verifier", "verifier", 1.0),
            ("solver", "solver", 1.0),
        )
        assert given[:3] == [first, verdict, second]
        assert (episode.metrics["first"], episode.metrics["team"], episode.metrics["retry"]) == (
            0.0,
            1.0,
            1.0,
        )


async def test_a_verifier_that_is_wrong_about_a_generated_problem_earns_nothing(tmp_path: Path) -> None:
    async with played("math-multi-agent/small.yaml", scratch=tmp_path) as math:
        task = math.dataset.heldout(0)
        assert task is not None
        right = int(task.data["answer"])
        episode = await math.episode(task, solver=lambda _: boxed(right), verifier=lambda _: "reject")
        assert [(each.role, each.reward) for each in episode.trajectories][:2] == [
            ("solver", 1.0),
            ("verifier", 0.0),
        ]


async def test_a_malformed_row_is_named_with_file_and_line(tmp_path: Path) -> None:
    rows = {"question": "1 + 2?", "answer": "1 + 2 = 3\n#### 3"}, {"question": "1 + 1?"}
    with gzip.open(tmp_path / "train.jsonl.gz", "wt") as file:
        file.write("\n".join(map(json.dumps, rows)))
    with pytest.raises(PluginError, match=r"train.jsonl.gz:2: no 'answer'; the row has question"):
        async with played("math", f"{FOLDER}={tmp_path}", scratch=tmp_path):
            pass


async def test_a_missing_folder_names_the_command_that_brings_it(tmp_path: Path) -> None:
    with pytest.raises(
        PluginError, match=r"no file .*train.jsonl .*: git clone https://github.com/openai/grade"
    ):
        async with played("math", f"{FOLDER}={tmp_path / 'nothing'}", scratch=tmp_path):
            pass


@pytest.mark.parametrize("file", ["recipe.yaml", "small.yaml"])
def test_efficient_data_is_math_with_three_lines_of_difference(file: str) -> None:
    folders = (REPOSITORY / "recipes" / name for name in ("math", "math-efficient-data"))
    ours, theirs = (settings_of(load_recipe(folder / file).recipe) for folder in folders)
    changed = {".".join(key[:2]) for key in {*ours, *theirs} if ours.get(key) != theirs.get(key)}
    assert changed == {"run.name", "dataflow.curators", "dataflow.filters", "dataflow.replay"}


def test_no_held_out_pair_is_trained_on_or_demonstrated_and_sums_have_two_digits() -> None:
    sums = recipe.Sums(seed=1)
    streams = recipe.demonstrations(1), recipe.verifier_demonstrations(1)
    shown = [each.messages[0].content for stream in streams for each in islice(stream, 2000)]
    trained = {
        _numbers(text) for text in [*shown, *(sums.train(index).messages[0].content for index in range(2000))]
    }
    held_out = {_numbers(sums.heldout(index).messages[0].content) for index in range(2000)}
    assert not trained & held_out
    assert len(held_out) > 150
    assert {len(sums.train(index).data["answer"]) for index in range(500)} == {2}


def test_careful_demonstrations_are_right_for_every_pair() -> None:
    for a in range(10, 90):
        for b in range(10, 100 - a):
            assert recipe.careful_answer(a, b).endswith(f"\\boxed{{{a + b}}}")
            for proposed in (a + b, a + b - 1, a + b - 10, 99):
                verdict = recipe.careful_check(a, b, proposed).split()[-1]
                assert verdict == ("approve" if proposed == a + b else "reject")
    assert recipe.careful_answer(47, 35) == r"7+5=2c 4+3=8 \boxed{82}"
    assert recipe.careful_check(47, 35, 82) == "7+5=2c:2y 4+3=8:8y approve"


def _numbers(text: str) -> tuple[str, ...]:
    return tuple(re.findall(r"\d+", text)[:2])


def tasks(method: Callable[[int], TaskSpec | None], number: int) -> list[TaskSpec]:
    return [task for task in map(method, range(number)) if task is not None]
