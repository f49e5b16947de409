"""A recipe's workflow and reward are made once, and one that cannot be used is named."""

from pathlib import Path
from typing import Any, cast

import pytest

from astraflow.dataflow.v1 import run_pb2
from astraflow.errors import PluginError, RecipeError
from astraflow.plugins import Score, Workflow
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

class Plays(Scores):
    @property
    def roles(self):
        return self.text if self.text == "solver" else self.text.split()

class OddWorkflow:
    def __init__(self, *, reward):
        self.reward = reward
    def run(self, task, policies):
        return None
"""


def workflow_of(folder: Path, *, reward: str, workflow: str = SINGLE_TURN, allowed: bool = True) -> Workflow:
    text = f"""
run: {{name: r, dataset: "recipe:D"}}
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
