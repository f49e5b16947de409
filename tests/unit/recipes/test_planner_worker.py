"""A plan earns what its answers earn, on GSM8K's rows and on generated sums; each goes to its own policy."""

from itertools import islice
from pathlib import Path

import pytest

from support.recipes import played, recipe_code, task_data

recipe = recipe_code("math")


async def test_a_plan_of_a_gsm8k_row_earns_the_mean_of_its_answers(tmp_path: Path) -> None:
    folder = f"run.dataset.with.folder={task_data('gsm8k')}"
    async with played("planner-worker", folder, scratch=tmp_path) as math:
        task = math.dataset.heldout(0)
        assert task is not None
        said = iter([f"\\boxed{{{task.data['answer']}}}", "\\boxed{-1}"])
        prompts: list[str] = []
        episode = await math.episode(
            task, planner=lambda _: "Count twice.", worker=lambda prompt: prompts.append(prompt) or next(said)
        )
        given = [(each.policy, each.reward) for each in episode.trajectories]
        assert given == [("planner", 0.5), ("worker", 1.0), ("worker", 0.0)]
        assert all("Count twice." in prompt and task.data["problem"] in prompt for prompt in prompts)


@pytest.mark.parametrize(("slip", "earned"), [(0, 1.0), (1, 0.0)])
async def test_a_worker_that_follows_a_wrong_plan_earns_nothing_for_both(
    slip: int, earned: float, tmp_path: Path
) -> None:
    async with played("planner-worker/small.yaml", scratch=tmp_path) as math:
        task = math.dataset.heldout(0)
        assert task is not None
        total = int(task.data["answer"])
        plan = recipe.careful_plan(total - 10 - slip, 10)

        def follow(prompt: str) -> str:
            columns = prompt.removeprefix("<user>").removesuffix("¶<assistant>").split()
            ones, tens = (sum(map(int, column.split("+"))) for column in columns)
            return f"\\boxed{{{ones + 10 * tens}}}"

        episode = await math.episode(task, planner=lambda _: plan, worker=follow)
        assert [(each.policy, each.reward) for each in episode.trajectories] == [
            ("planner", earned),
            ("worker", earned),
        ]


def test_every_second_plan_names_the_columns_of_its_question_in_their_order() -> None:
    streams = recipe.planner_demonstrations(1), recipe.demonstrations(1)
    assert recipe.careful_plan(47, 35) == "7+5 4+3"
    for index, shown in enumerate(islice(streams[0], 300)):
        numbers = [
            int(word.strip(",.")) for word in shown.messages[0].content.split() if word.strip(",.").isdigit()
        ]
        ones, tens = recipe.careful_plan(*numbers).split()
        assert shown.completion == (f"{ones} {tens}" if index % 2 else f"{tens} {ones}")
