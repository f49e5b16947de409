"""A recipe's workflow and reward are made once, and one that cannot be used is named."""

from pathlib import Path

import pytest

from astraflow.dataflow.v1 import run_pb2
from astraflow.errors import PluginError
from astraflow.recipe import Recipe
from astraflow.recipe_file import CodeFile, bundle_digest, parse_recipe
from astraflow_kit.recipe_code import install_code
from astraflow_raas.recipe_code import load_workflow

CODE = """
class Half:
    def __call__(self, task, completion):
        return 0.5

class NeedsMore:
    def __init__(self, threshold):
        pass
    def __call__(self, task, completion):
        return 0.5

def constant(task, completion):
    return 1.0

class OddWorkflow:
    def __init__(self, *, reward):
        self.reward = reward
    def run(self, task, policies):
        return None
"""


def bundle(**files: str) -> run_pb2.CodeBundle:
    listed = [
        CodeFile(path.replace("__", "/") + ".py", text.encode()) for path, text in sorted(files.items())
    ]
    return run_pb2.CodeBundle(
        files=[run_pb2.CodeFile(path=file.path, content=file.content) for file in listed],
        sha256=bundle_digest(listed),
    )


def recipe(reward: str, workflow: str = "astraflow_raas.workflows.single_turn:SingleTurn") -> Recipe:
    text = f"""
run: {{name: r, dataset: "recipe:D"}}
policies: {{solver: {{model: {{path: x}}}}}}
raas: {{reward: "{reward}", workflow: "{workflow}"}}
"""
    return parse_recipe(text).recipe


def test_plug_ins_of_the_recipe_are_loaded_from_its_folder(tmp_path: Path) -> None:
    folder = install_code(bundle(recipe=CODE), into=tmp_path, allowed=True)
    for name in ("Half", "constant"):
        assert load_workflow(recipe(f"recipe:{name}"), folder=folder)


def test_installed_plug_ins_need_no_code() -> None:
    assert load_workflow(recipe("astraflow_raas.rewards.boxed_match:BoxedMatch"), folder=None)


def test_a_recipe_that_needs_its_code_says_how_to_allow_it() -> None:
    with pytest.raises(PluginError, match="--allow-recipe-code"):
        load_workflow(recipe("recipe:Half"), folder=None)


@pytest.mark.parametrize(
    ("reward", "workflow", "complaint"),
    [
        ("recipe:NeedsMore", "astraflow_raas.workflows.single_turn:SingleTurn", "NeedsMore"),
        ("recipe:Hal", "astraflow_raas.workflows.single_turn:SingleTurn", "Half"),
        ("recipe:Half", "recipe:OddWorkflow", "async"),
    ],
)
def test_a_plug_in_that_cannot_be_used_is_named(
    tmp_path: Path, reward: str, workflow: str, complaint: str
) -> None:
    folder = install_code(bundle(recipe=CODE), into=tmp_path, allowed=True)
    with pytest.raises(PluginError, match=complaint):
        load_workflow(recipe(reward, workflow), folder=folder)
