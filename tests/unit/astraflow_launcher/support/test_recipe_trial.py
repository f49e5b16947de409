"""A recipe tried without a run: each plug-in that a run would fail on is named with its place."""

from pathlib import Path

import pytest

from astraflow.errors import AstraflowError
from astraflow.recipe.file import load_recipe
from astraflow_launcher.support import recipe_trial

QUICKSTART = Path(__file__).parents[4] / "recipes" / "quickstart"
GRADE = 'return score(completion, total=task.data["total"])'
ROLES = """
class Plays:
    roles = ("solver", "verifer")

    async def run(self, task, policies):
        return None
"""
PLAYS = "raas.workflow=recipe:Plays"
PROCESSES = "raas.reward_limits.processes=1"


@pytest.fixture(autouse=True)
def logging_of_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """The logs of this process are those of the tests."""
    monkeypatch.setattr(recipe_trial, "configure", lambda *_, **__: None)


def tried(folder: Path, *overrides: str, old: str = "", new: str = "") -> list[str]:
    """What is told of the quickstart with some of its code replaced."""
    folder.joinpath("recipe.yaml").write_text((QUICKSTART / "recipe.yaml").read_text())
    code = (QUICKSTART / "recipe.py").read_text()
    assert old in code
    folder.joinpath("recipe.py").write_text(code.replace(old, new) if old else code + new)
    return list(recipe_trial.try_recipe(load_recipe(folder, overrides=overrides)))


@pytest.mark.parametrize("overrides", [(), (PROCESSES,)])
def test_a_good_recipe_tells_what_was_tried(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    assert tried(tmp_path, *overrides) == [
        "roles: solver",
        "data set: task train-0",
        "reward: 0 for task train-0 and the completion 'The answer is 42.'",
        "tokenizer of solver: 26 tokens of prompt, and 24 to sample",
    ]


@pytest.mark.parametrize(
    ("old", "new", "overrides", "says"),
    [
        (
            GRADE,
            "return task.data['totl']",
            (),
            r"reward_?.* fails for task train-0 .*KeyError: 'totl' \(recipe.py:111 in",
        ),
        (GRADE, "return task.data['totl']", (PROCESSES,), r"KeyError: 'totl' \(recipe.py:111 in"),
        (GRADE, "return float('nan')", (), r"the reward returned nan; .*\(recipe.py:110 in"),
        ('data={"total": shown.total}', "data={'total': {1}}", (), "the data of task 'train-0' is not JSON"),
        (
            'return _task(f"train-{index}"',
            '1 / 0; return _task(f"train-{index}"',
            (),
            r"ZeroDivisionError.*recipe.py:",
        ),
        (
            "for index in count():",
            "for index in range(3, 1 // 0):",
            (),
            r"recipe:demonstrations raised: ZeroDivisionError",
        ),
        (
            "class BoxedSum",
            "class BoxSum",
            (),
            r"recipe.yaml:\d+: raas.reward|has no 'BoxedSum'. Did you mean 'BoxSum'",
        ),
        ("", ROLES, (PLAYS,), r"verifer"),
        (
            "",
            "",
            ("policies.solver.sampling.max_new_tokens=120",),
            "has 26 tokens, and with .* 120 that is more than the 128",
        ),
        ("", "", ("dataflow.filters=[recipe:Nothing]",), "'recipe' has no 'Nothing'"),
    ],
)
def test_what_a_run_would_fail_on_is_refused_with_its_place(
    tmp_path: Path, old: str, new: str, overrides: tuple[str, ...], says: str
) -> None:
    with pytest.raises(AstraflowError, match=says):
        tried(tmp_path, *overrides, old=old, new=new)


def test_each_source_is_tried(tmp_path: Path) -> None:
    sources = "{a: {dataset: recipe:AdditionProblems}, b: {dataset: recipe:AdditionProblems}}"
    lines = tried(tmp_path, "run.dataset=null", f"run.sources={sources}")
    assert [line.partition(", ")[0] for line in lines[1:5]] == [
        "data set of a: task a:train-0",
        "reward of a: 0 for task a:train-0 and the completion 'The answer is 42.'",
        "data set of b: task b:train-0",
        "reward of b: 0 for task b:train-0 and the completion 'The answer is 42.'",
    ]


def test_a_model_that_is_not_here_is_not_downloaded(tmp_path: Path) -> None:
    model = "policies.solver.model"
    sources = (f"{model}.path=nobody/nowhere", f"{model}.architecture=null", f"{model}.tokenizer=null")
    lines = tried(tmp_path, *sources, f"{model}.warm_start=null")
    assert lines[-1] == "tokenizer of solver: not tried, nobody/nowhere is not on this machine"
