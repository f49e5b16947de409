"""Several data sets are one: by weight, to the end of each, the same from every server."""

from collections import Counter
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from astraflow.plugins import Dataset, TaskSpec
from astraflow.recipe.file import parse_recipe
from astraflow_dataflow.runs.drawing import draw
from astraflow_dataflow.runs.mixed_dataset import MixedDataset, Part, Turns, make_dataset
from astraflow_kit.plugins import RecipeSource


class Numbers:
    """Tasks `train-0`, …: `num` of them, or endless; `source` as given."""

    def __init__(self, num: int | None, source: str = "") -> None:
        self._num, self._source = num, source

    def train(self, index: int) -> TaskSpec | None:
        return self._task("train", index)

    def heldout(self, index: int) -> TaskSpec | None:
        return self._task("heldout", index) if index < 3 else None

    def _task(self, name: str, index: int) -> TaskSpec | None:
        ended = self._num is not None and index >= self._num
        return None if ended else TaskSpec(f"{name}-{index}", (), source=self._source)


class Sized(Numbers):
    """Says how many it has, and may not be asked for more."""

    def __len__(self) -> int:
        return self._num or 0

    def train(self, index: int) -> TaskSpec | None:
        assert index < len(self)
        return super().train(index)


def mixed(**parts: tuple[Dataset, int]) -> MixedDataset:
    return MixedDataset({name: Part(dataset, weight) for name, (dataset, weight) in parts.items()})


def ids(dataset: Dataset, number: int) -> list[str]:
    specs, _ = draw(dataset.train, start=0, count=number)
    return [spec.task_id for spec in specs]


def test_a_turn_has_as_many_tasks_of_each_source_as_its_weight_spread_over_it() -> None:
    mixture = mixed(a=(Numbers(None), 3), b=(Numbers(None), 1))
    assert ids(mixture, 8) == [
        *("a:train-0", "a:train-1", "b:train-0", "a:train-2"),
        *("a:train-3", "a:train-4", "b:train-1", "a:train-5"),
    ]


def test_sources_that_end_leave_the_turns_to_the_others() -> None:
    mixture = mixed(a=(Numbers(3), 2), b=(Sized(5), 1), c=(Numbers(0), 9))
    assert Counter(ids(mixture, 100)) == Counter(
        [*ids(mixed(a=(Numbers(3), 1)), 9), *ids(mixed(b=(Sized(5), 1)), 9)]
    )
    assert mixture.train(8) is None


def test_held_out_tasks_are_mixed_alike_and_end() -> None:
    specs, ended = draw(mixed(a=(Numbers(None), 1), b=(Numbers(None), 1)).heldout, start=0, count=10)
    assert [spec.task_id for spec in specs[:4]] == [
        "a:heldout-0",
        "b:heldout-0",
        "a:heldout-1",
        "b:heldout-1",
    ]
    assert (len(specs), ended) == (6, True)


def test_a_task_names_its_source_and_what_its_data_set_calls_it() -> None:
    mixture = mixed(a=(Numbers(None), 1), b=(Numbers(None, source="hard"), 1))
    sources = {spec.source for index in range(4) if (spec := mixture.train(index))}
    assert sources == {"a", "b/hard"}
    assert {task.partition(":")[0] for task in ids(mixture.of("b"), 3)} == {"b"}


def test_an_epoch_has_gone_through_every_source() -> None:
    class Rows(Numbers):
        tasks_per_epoch = 10

    # Two turns of 5 + 2 bring 10 of a; five turns 10 of b.
    assert mixed(a=(Rows(None), 5), b=(Rows(None), 2)).tasks_per_epoch == 35
    assert mixed(a=(Rows(None), 3)).tasks_per_epoch == 12
    assert mixed(a=(Rows(None), 5), b=(Numbers(None), 2)).tasks_per_epoch is None


@given(st.dictionaries(st.sampled_from("abcd"), st.tuples(st.integers(1, 7), st.integers(0, 20)), min_size=1))
def test_every_task_comes_once_in_the_order_of_its_source(sources: dict[str, tuple[int, int]]) -> None:
    weights = {name: weight for name, (weight, _) in sources.items()}
    ends = {name: end for name, (_, end) in sources.items()}
    turns = Turns(weights, ends)
    places = [turns.place(index) for index in range(sum(ends.values()))]
    for name, end in ends.items():
        assert [place[1] for place in places if place and place[0] == name] == list(range(end))
    assert turns.place(sum(ends.values())) is None


@pytest.mark.parametrize("end", [0, 1, 2, 3, 7, 8, 9, 1000])
def test_the_end_of_a_source_is_found(end: int) -> None:
    mixture = mixed(a=(Numbers(end), 5))
    assert next(index for index in count() if mixture.train(index) is None) == end


def test_a_data_set_that_shrinks_is_an_error() -> None:
    numbers = Numbers(4)
    mixture = mixed(a=(numbers, 1))
    assert mixture.train(0)
    numbers._num = 1
    with pytest.raises(ValueError, match="source 'a' has no task 2, but had one before"):
        mixture.train(2)


RECIPE = """
run:
  name: r
  sources:
    sums: {dataset: "recipe:Sums", weight: 2}
    words: {dataset: {use: "recipe:Words", with: {long: true}}, reward: "recipe:Spelled"}
policies: {solver: {model: {path: x}}}
raas: {reward: "recipe:Right"}
"""


def test_a_recipe_names_its_sources(tmp_path: object) -> None:
    recipe = parse_recipe(RECIPE).recipe
    assert {name: grading.reward and grading.reward.use for name, grading in recipe.grading.items()} == {
        "sums": "recipe:Right",
        "words": "recipe:Spelled",
    }
    assert recipe.run.data_name == "run.sources (sums, words)"
    assert parse_recipe(parse_recipe(RECIPE).yaml_text).recipe == recipe
    text = RECIPE.replace("recipe:Sums", f"{__name__}:Endless").replace(
        '{use: "recipe:Words", with: {long: true}}', f"{__name__}:Endless"
    )
    dataset = make_dataset(parse_recipe(text).recipe, RecipeSource(text=text))
    assert ids(dataset, 3) == ["sums:train-0", "words:train-0", "sums:train-1"]


class Endless(Numbers):
    """Made by the recipe above."""

    def __init__(self) -> None:
        super().__init__(None)
