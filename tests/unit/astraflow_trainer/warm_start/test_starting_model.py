"""Where the first weights come from: a folder, or a warm start that is made once from the recipe's plug-in."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from astraflow.errors import PluginError, RecipeError
from astraflow.recipe.file import parse_recipe
from astraflow_kit.plugins import RecipeSource
from astraflow_trainer.joined_run import JoinedRun
from astraflow_trainer.model.model import load_causal_lm
from astraflow_trainer.warm_start.starting_model import asset_files, starting_model
from support.scripted_dataflow import RECIPE

BUILT = """
      architecture:
        hidden_size: 16
        num_hidden_layers: 1
        num_attention_heads: 2
        num_key_value_heads: 1
        head_dim: 8
        intermediate_size: 32
      tokenizer: {vocab_size: 280, num_texts: 10}
      warm_start: {demonstrations: "recipe:PLUGIN", steps: 2, batch_size: 4}
"""
PLUGINS = """
from pathlib import Path
from astraflow.plugins import Demonstration, Message

CALLS = Path(__file__).with_name("calls.txt")

class Endless:
    def __call__(self, seed: int):
        with CALLS.open("a") as calls:
            calls.write(f"{seed}\\n")
        number = 0
        while True:
            number += 1
            question = Message(role="user", content=f"Say {number}.")
            yield Demonstration(messages=(question,), completion=f"{number} of {seed}")

def ends_after_five(seed: int):
    stream = Endless()(seed)
    return (next(stream) for _ in range(5))

def wants_no_seed():
    return iter(())
"""


@pytest.fixture
def recipe_dir(tmp_path: Path) -> Iterator[Path]:
    """A folder of recipe code, and no module of it left imported afterwards."""
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "recipe.py").write_text(PLUGINS)
    before, path = set(sys.modules), list(sys.path)
    yield folder
    sys.path[:] = path
    for name in set(sys.modules) - before:
        if "recipe" in name.split("."):
            del sys.modules[name]


def _joined(
    recipe_dir: Path | None, *, plugin: str = "recipe:Endless", code_sha256: str = "c0de", seed: int = 5
) -> JoinedRun:
    text = RECIPE.replace(" {path: somewhere}", BUILT.replace("recipe:PLUGIN", plugin))
    return JoinedRun(
        run_id="run-1",
        recipe=parse_recipe(text, overrides=[f"run.seed={seed}"]).recipe,
        policy_id="solver",
        store_uri="file:///nowhere",
        source=RecipeSource(text=text, folder=recipe_dir),
        code_sha256=code_sha256,
    )


def _start(joined: JoinedRun, cache: Path, shares: list[float] | None = None) -> Path:
    told = shares if shares is not None else []
    return starting_model(joined, cache=cache, threads=1, progress=told.append)


def test_a_model_folder_is_used_as_it_is(tmp_path: Path) -> None:
    recipe = parse_recipe(RECIPE.replace("path: somewhere", f"path: {tmp_path}")).recipe
    joined = JoinedRun("run-1", recipe, "solver", "file:///nowhere", source=RecipeSource(), code_sha256="")
    assert _start(joined, tmp_path / "cache") == tmp_path
    assert not (tmp_path / "cache").exists()


def test_assets_are_all_files_a_node_needs_besides_weights(tmp_path: Path) -> None:
    wanted = ["chat_template.jinja", "config.json", "merges.txt", "spiece.model", "tokenizer.json"]
    others = ["model.safetensors", "model.safetensors.index.json", "warm_start.json", "pytorch_model.bin"]
    for name in wanted + others:
        (tmp_path / name).touch()
    (tmp_path / "folder.json").mkdir()
    assert [path.name for path in asset_files(tmp_path)] == wanted


def test_a_warm_start_makes_a_model_with_its_tokenizer_and_tells_how_far_it_is(
    recipe_dir: Path, tmp_path: Path
) -> None:
    shares: list[float] = []
    directory = _start(_joined(recipe_dir), tmp_path / "cache", shares)
    assert shares == [0.5, 1.0]
    assert load_causal_lm(directory).config.hidden_size == 16
    assert {"config.json", "tokenizer.json"} <= {path.name for path in asset_files(directory)}
    assert set((recipe_dir / "calls.txt").read_text().split()) == {"5"}


def test_a_cached_warm_start_is_used_again(recipe_dir: Path, tmp_path: Path) -> None:
    first = _start(_joined(recipe_dir), tmp_path / "cache")
    shares: list[float] = []
    calls = (recipe_dir / "calls.txt").read_text()
    assert _start(_joined(recipe_dir), tmp_path / "cache", shares) == first
    assert shares == []
    assert (recipe_dir / "calls.txt").read_text() == calls


@pytest.mark.parametrize("changed", [{"code_sha256": "c0ffee"}, {"seed": 6}])
def test_other_recipe_code_or_another_seed_makes_another_model(
    changed: dict[str, str | int], recipe_dir: Path, tmp_path: Path
) -> None:
    first = _start(_joined(recipe_dir), tmp_path / "cache")
    assert _start(_joined(recipe_dir, **changed), tmp_path / "cache") != first  # type: ignore[arg-type]


def test_demonstrations_that_end_early_are_named_with_what_was_needed(
    recipe_dir: Path, tmp_path: Path
) -> None:
    joined = _joined(recipe_dir, plugin="recipe:ends_after_five")
    with pytest.raises(
        RecipeError, match=r"recipe:ends_after_five ended after 5 demonstrations, .* needs 10"
    ):
        _start(joined, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


UNUSABLE = [
    ("recipe:Missing", "has no 'Missing'"),
    ("recipe:wants_no_seed", "is not a Demonstrations"),
    ("no_such_package:Endless", "no_such_package"),
]


@pytest.mark.parametrize(("plugin", "complaint"), UNUSABLE)
def test_a_plug_in_that_cannot_be_used_is_refused_before_anything_is_made(
    plugin: str, complaint: str, recipe_dir: Path, tmp_path: Path
) -> None:
    with pytest.raises(PluginError, match=complaint):
        _start(_joined(recipe_dir, plugin=plugin), tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_recipe_code_that_may_not_run_here_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(PluginError, match="--allow-recipe-code"):
        _start(_joined(None), tmp_path / "cache")
