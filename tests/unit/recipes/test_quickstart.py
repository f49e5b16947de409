"""The quickstart's task: one split for ever, any index at any time, an exact reward, a stated share of flaws."""

import random
import re
from collections.abc import Callable, Iterator
from itertools import islice

import pytest

from astraflow.plugins import Dataset, Demonstration, Demonstrations, Reward, TaskSpec
from support.recipes import recipe_code

recipe = recipe_code("quickstart")
ALL_PAIRS = [(a, b) for a in range(10, 100) for b in range(10, 100)]


def _pair(prompt: str) -> tuple[int, int]:
    """The two numbers as a reader of the prompt finds them, independent of how the task was drawn."""
    a, b = re.findall(r"\d+", prompt)
    return int(a), int(b)


def _training_pairs(seed: int, size: int) -> Iterator[tuple[int, int]]:
    dataset = recipe.AdditionProblems(seed=seed)
    return (_pair(dataset.train(index).messages[0].content) for index in range(size))


def _demonstrations(seed: int, size: int) -> list[Demonstration]:
    return list(islice(recipe.demonstrations(seed), size))


def _shown_pairs(seed: int, size: int) -> Iterator[tuple[int, int]]:
    return (_pair(example.messages[0].content) for example in _demonstrations(seed, size))


def test_the_classes_are_the_plug_ins_that_the_daemons_ask_for() -> None:
    assert isinstance(recipe.AdditionProblems(seed=0), Dataset)
    assert isinstance(recipe.BoxedSum(), Reward)
    assert isinstance(recipe.demonstrations, Demonstrations)


def test_the_split_is_the_one_that_results_were_measured_with() -> None:
    held_out = [(a, b) for a, b in ALL_PAIRS if recipe.is_held_out(a, b)]
    assert (len(held_out), held_out[:3]) == (818, [(10, 12), (10, 27), (10, 44)])


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("pairs_of", [_training_pairs, _shown_pairs], ids=["training", "the warm start"])
def test_what_learns_never_sees_a_held_out_pair(pairs_of: Callable[..., Iterator], seed: int) -> None:
    assert not [pair for pair in pairs_of(seed, 4000) if recipe.is_held_out(*pair)]


def test_evaluation_sees_held_out_pairs_only_and_covers_most_of_them() -> None:
    dataset = recipe.AdditionProblems(seed=0)
    shown = {_pair(dataset.heldout(index).messages[0].content) for index in range(4000)}
    held_out = {pair for pair in ALL_PAIRS if recipe.is_held_out(*pair)}
    assert shown <= held_out
    assert len(shown) > 0.95 * len(held_out)


def test_training_covers_more_than_a_few_pairs() -> None:
    assert len(set(_training_pairs(0, 4000))) > 2500


def test_a_task_is_the_same_whenever_and_in_whatever_order_it_is_asked_for() -> None:
    indices = list(range(200))
    forward = [recipe.AdditionProblems(seed=7).train(index) for index in indices]
    random.Random(0).shuffle(indices)
    fresh = recipe.AdditionProblems(seed=7)
    assert all(fresh.train(index) == forward[index] for index in indices)


def test_seeds_and_splits_give_different_streams_and_task_ids_are_unique() -> None:
    one, two = recipe.AdditionProblems(seed=1), recipe.AdditionProblems(seed=2)
    assert [one.train(i).messages for i in range(20)] != [two.train(i).messages for i in range(20)]
    ids = [task.task_id for i in range(500) for task in (one.train(i), one.heldout(i))]
    assert len(set(ids)) == len(ids)


def test_a_task_carries_the_sum_of_the_numbers_in_its_prompt() -> None:
    dataset = recipe.AdditionProblems(seed=3)
    tasks: list[TaskSpec] = [dataset.train(index) for index in range(500)]
    assert all(sum(_pair(task.messages[0].content)) == task.data["total"] for task in tasks)


def test_the_stream_of_demonstrations_is_random_access_and_repeats_for_its_seed() -> None:
    stream = _demonstrations(5, 300)
    assert stream == _demonstrations(5, 300)
    assert stream != _demonstrations(6, 300)
    shown, answer = recipe.demonstration(123, seed=5)
    assert (shown.prompt, answer) == (stream[123].messages[0].content, stream[123].completion)


def test_half_of_the_demonstrations_are_careful_and_guesses_are_almost_never_right() -> None:
    shown = [recipe.demonstration(index, seed=0) for index in range(8000)]
    careful, careless = [], []
    for problem, answer in shown:
        scores = careful if "=" in answer else careless
        scores.append(recipe.score(answer, total=problem.total))
    assert abs(len(careful) / len(shown) - recipe.CAREFUL_SHARE) < 0.02
    assert set(careful) == {1.0}
    assert sum(careless) / len(careless) < 0.03


@pytest.mark.parametrize(
    ("a", "b", "answer"),
    [
        (47, 35, "7+5=2c 4+3=8 \\boxed{82}"),
        (12, 13, "2+3=5 1+1=2 \\boxed{25}"),
        (60, 70, "0+0=0 6+7=3c \\boxed{130}"),
        (99, 99, "9+9=8c 9+9=9c \\boxed{198}"),
        (45, 54, "5+4=9 4+5=9 \\boxed{99}"),
        (55, 45, "5+5=0c 5+4=0c \\boxed{100}"),
    ],
)
def test_careful_work_carries_where_paper_does(a: int, b: int, answer: str) -> None:
    assert recipe.careful_answer(a, b) == answer


def test_careful_work_is_right_for_every_pair() -> None:
    assert all(recipe.score(recipe.careful_answer(a, b), total=a + b) == 1.0 for a, b in ALL_PAIRS)


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("\\boxed{82}", 1.0),
        ("7+5=2c 4+3=8 \\boxed{82}", 1.0),
        ("\\boxed{ 82 }", 1.0),
        ("\\boxed{81} \\boxed{82}", 1.0),
        ("\\boxed{82} \\boxed{81}", 0.0),
        ("\\boxed{82} \\boxed{81", 1.0),  # the last complete box counts
        ("\\boxed{82", 0.0),
        ("\\boxed 82", 0.0),
        ("\\boxed{}", 0.0),
        ("\\boxed{{82}}", 0.0),
        ("boxed{82}", 0.0),
        ("\\boxed{8 2}", 0.0),
        ("\\boxed{082}", 0.0),
        ("\\boxed{82.0}", 0.0),
        ("\\boxed{+82}", 0.0),
        ("\\boxed{47+35}", 0.0),
        ("\\boxed{\u0668\u0662}", 0.0),  # Arabic-Indic digits are not what was asked for
        ("82", 0.0),
        ("", 0.0),
    ],
)
def test_only_the_exact_sum_in_the_last_box_is_rewarded(completion: str, reward: float) -> None:
    task = TaskSpec(task_id="train-0", messages=(), data={"total": 82})
    assert recipe.BoxedSum()(task, completion) == reward
