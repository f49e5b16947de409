"""A set whose problems are known to be trivial, to be learnt, or to be out of reach."""

from collections import Counter
from itertools import islice

from astraflow_bench.studies.graded_sums import NUM_PROBLEMS, GradedSums, demonstrations
from support.recipes import recipe_code


def test_every_epoch_has_each_problem_once_in_another_order() -> None:
    data = GradedSums(seed=3)
    epochs = [[data.train(NUM_PROBLEMS * epoch + index) for index in range(NUM_PROBLEMS)] for epoch in (0, 1)]
    by_problem = [{task.data["problem"]: task.messages for task in epoch} for epoch in epochs]
    assert by_problem[0] == by_problem[1]
    assert len(by_problem[0]) == NUM_PROBLEMS
    assert [task.data["problem"] for task in epochs[0]] != [task.data["problem"] for task in epochs[1]]
    assert len({task.task_id for epoch in epochs for task in epoch}) == 2 * NUM_PROBLEMS
    kinds = Counter(
        "impossible" if "twice" in text else "trivial" if "Say" in text else "sum"
        for text in (task.messages[0].content for task in epochs[0])
    )
    assert kinds == {"trivial": 112, "sum": 96, "impossible": 112}


def test_held_out_sums_are_in_neither_set_nor_demonstrations() -> None:
    data = GradedSums(seed=0)
    held_out = {data.heldout(index).messages[0].content for index in range(300)}
    shown = {one.messages[0].content for one in islice(demonstrations(0), 3000)}
    asked = {data.train(index).messages[0].content for index in range(NUM_PROBLEMS)}
    assert all("more. How many?" in prompt for prompt in held_out)
    assert not held_out & (shown | asked)


def test_half_of_the_demonstrated_sums_are_flawed_by_a_digit() -> None:
    graded = recipe_code("quickstart")
    right = [
        graded.score(
            one.completion, total=sum(int(word) for word in one.messages[0].content.split() if word.isdigit())
        )
        for one in islice(demonstrations(0), 2000)
        if "more" in one.messages[0].content
    ]
    # Some flaws are in the work, and leave the answer as it was.
    assert 0.5 < sum(right) / len(right) < 0.9
