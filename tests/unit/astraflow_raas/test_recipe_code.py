"""A recipe's workflow and reward are made once, and one that cannot be used is named."""

from pathlib import Path
from typing import Any, cast

import pytest

from astraflow.dataflow.v1 import run_pb2
from astraflow.errors import PluginError, RecipeError
from astraflow.plugins import Score, TaskSpec, Workflow
from astraflow.recipe.file import CodeFile, bundle_digest, parse_recipe
from astraflow_raas.agents.endpoint import Endpoint
from astraflow_raas.environments.served import ServedEnvironments
from astraflow_raas.recipe_code import load_workflow

SINGLE_TURN = "astraflow_raas.workflows.single_turn:SingleTurn"
CODE = """
class Half:
    def __call__(self, task, completion):
        return 0.5

class NeedsMore:
    def __init__(self, threshold: float):
        self.threshold = threshold
    def __call__(self, task, completion):
        return self.threshold

def constant(task, completion, *, value: float = 1.0):
    return value

class Scores:
    def __init__(self, *, reward, text: str):
        self.reward, self.text = reward, text
    async def score(self):
        return await self.reward(None, self.text)
    async def run(self, task, policies):
        return None

class Earns(Scores):
    async def run(self, task, policies):
        return self.text, await self.score()

class Plays(Scores):
    @property
    def roles(self):
        return self.text if self.text == "solver" else self.text.split()

class Hides:
    def __init__(self, *, scratch_dir, secret_paths):
        self.hidden = (scratch_dir, *secret_paths)
    async def run(self, task, policies):
        return self.hidden

class OddWorkflow:
    def __init__(self, *, reward):
        self.reward = reward
    def run(self, task, policies):
        return None
"""


def workflow_of(
    folder: Path,
    *,
    reward: str,
    workflow: str = SINGLE_TURN,
    allowed: bool = True,
    data: str = 'dataset: "recipe:D"',
) -> Workflow:
    text = f"""
run: {{name: r, {data}}}
policies: {{solver: {{model: {{path: x}}}}}}
raas: {{reward: {reward}, workflow: {workflow}}}
"""
    sent = run_pb2.CodeFile(path="recipe.py", content=CODE.encode())
    digest = bundle_digest([CodeFile(sent.path, sent.content)])
    code = run_pb2.CodeBundle(files=[sent], sha256=digest)
    run = run_pb2.Run(run_id="r", recipe_yaml=text, code=code)
    recipe = parse_recipe(text).recipe
    return load_workflow(
        run,
        recipe,
        into=folder,
        scratch=folder,
        allowed=allowed,
        endpoint=Endpoint(),
        served=ServedEnvironments(),
        secrets=(Path("/secret"),),
    ).workflow


@pytest.mark.parametrize(
    ("reward", "earned"),
    [
        ("recipe:Half", 0.5),
        ("recipe:constant", 1.0),
        ("{use: recipe:NeedsMore, with: {threshold: 0.25}}", 0.25),
        ("{use: recipe:constant, with: {value: 3}}", 3.0),
    ],
)
async def test_the_workflow_scores_with_the_recipes_reward(
    tmp_path: Path, reward: str, earned: float
) -> None:
    workflow = workflow_of(tmp_path, reward=reward, workflow="{use: recipe:Scores, with: {text: hello}}")
    assert await cast("Any", workflow).score() == Score(earned)


def test_installed_plug_ins_need_no_leave(tmp_path: Path) -> None:
    assert workflow_of(tmp_path, reward="astraflow_raas.rewards.boxed_match:BoxedMatch", allowed=False)


@pytest.mark.parametrize(
    ("plugins", "complaint"),
    [
        ({"reward": "recipe:Half", "allowed": False}, "run r:4: raas.reward: .* --allow-recipe-code"),
        ({"reward": "recipe:NeedsMore"}, "'recipe:NeedsMore' needs the setting 'threshold'"),
        ({"reward": "recipe:Hal"}, "Did you mean 'Half'"),
        ({"reward": "recipe:Half", "workflow": "recipe:OddWorkflow"}, "is not async"),
    ],
)
def test_an_unusable_plug_in_is_named(tmp_path: Path, plugins: dict[str, Any], complaint: str) -> None:
    with pytest.raises(PluginError, match=complaint):
        workflow_of(tmp_path, **plugins)


EACH = """sources: {
  a: {dataset: "recipe:D"},
  b: {dataset: "recipe:D", workflow: {use: "recipe:Earns", with: {text: b}}, reward: "recipe:constant"},
}"""


async def test_a_task_is_run_and_graded_as_its_source_says(tmp_path: Path) -> None:
    own = "{use: recipe:Earns, with: {text: a}}"
    workflow = workflow_of(tmp_path, reward="recipe:Half", workflow=own, data=EACH)
    earned = {
        source: await workflow.run(TaskSpec("t", (), source=source), {}) for source in ("a", "a/hard", "b")
    }
    assert earned == {"a": ("a", Score(0.5)), "a/hard": ("a", Score(0.5)), "b": ("b", Score(1.0))}
    with pytest.raises(ValueError, match=r"task t has source 'c', which is none of run.sources: a, b"):
        await workflow.run(TaskSpec("t", (), source="c"), {})


async def test_a_workflow_learns_what_is_secret(tmp_path: Path) -> None:
    workflow = cast("Any", workflow_of(tmp_path, reward="recipe:Half", workflow="recipe:Hides"))
    assert await workflow.run(None, {}) == (tmp_path, Path("/secret"))


def test_sources_that_say_nothing_share_one_workflow_and_its_reward(tmp_path: Path) -> None:
    data = 'sources: {a: {dataset: "recipe:D"}, b: {dataset: "recipe:D"}}'
    workflow = cast("Any", workflow_of(tmp_path, reward="recipe:Half", data=data))
    assert len({id(made) for made in workflow._workflows.values()}) == 1


def test_a_workflow_that_declares_the_run_s_roles_is_made(tmp_path: Path) -> None:
    assert workflow_of(tmp_path, reward="recipe:Half", workflow="{use: recipe:Plays, with: {text: player}}")


@pytest.mark.parametrize(
    ("declared", "parts"),
    [
        ("planner worker", ("roles: {planner: solver, worker: solver}", "recipe:Plays")),
        ("solver", ("not a sequence", "('solver',)")),
    ],
)
def test_roles_that_do_not_fit_the_recipe_are_refused_with_their_place(
    tmp_path: Path, declared: str, parts: tuple[str, ...]
) -> None:
    with pytest.raises(RecipeError) as refused:
        workflow_of(
            tmp_path, reward="recipe:Half", workflow=f"{{use: recipe:Plays, with: {{text: {declared}}}}}"
        )
    assert all(part in refused.value.message for part in (*parts, ":4: raas.workflow")), refused.value.message
