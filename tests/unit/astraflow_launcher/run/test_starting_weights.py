"""What `astraflow eval --weights` may name, and what is said of what is not there."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from astraflow.errors import InvalidArgumentError, RecipeError
from astraflow.recipe import Recipe
from astraflow.recipe.file import parse_recipe
from astraflow_launcher.run import starting_weights
from astraflow_launcher.run.starting_weights import weight_overrides
from support.published_models import published, read_log
from support.recipes import TINY, tiny_recipe
from support.weight_models import RUN, FaultyStore

TWO = TINY.replace("policies: {solver:", "policies: {critic: {model: {path: other/model}}, solver:")


def asked(
    *weights: str, recipe: Recipe | None = None, run: str | None = None, version: int | None = None
) -> dict[str, Any]:
    """The overrides, read."""
    recipe = recipe or tiny_recipe().recipe
    found = weight_overrides(recipe, weights, run=run, version=version)
    return {key: json.loads(value) for key, value in found.items()}


@pytest.fixture
def ran(tmp_path: Path) -> Path:
    """The folder of a run with versions 0, 1 and 2."""
    published(FaultyStore(tmp_path / "ran" / "store"), 3)
    (tmp_path / "ran" / "run.json").write_text(json.dumps({"run_id": RUN}))
    return tmp_path / "ran"


def model(folder: Path, *, rows: int, tokens: Sequence[str] = ("a", "b", "c")) -> Path:
    """A folder that looks like a model, with a tokenizer of these tokens."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"vocab_size": rows}))
    words = WordLevel({token: number for number, token in enumerate(tokens)}, unk_token=tokens[0])
    Tokenizer(words).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages[0].content }}"}))
    return folder


def test_a_folder_or_a_hub_name_is_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = model(tmp_path / "model", rows=3)
    monkeypatch.setattr(starting_weights, "hf_hub_download", lambda name, file: f"{name}/{file}")
    assert asked(str(folder)) == {"policies.solver.model": {"path": str(folder)}}
    assert asked("org/some-model") == {"policies.solver.model": {"path": "org/some-model"}}


def test_the_recipes_own_weights_need_no_override() -> None:
    assert asked() == {}


@pytest.mark.parametrize("version", [None, 1])
def test_a_runs_folder_stands_for_a_version_or_the_newest(ran: Path, version: int | None) -> None:
    (start,) = asked(str(ran), version=version).values()
    number = 2 if version is None else version
    record = read_log(FaultyStore(ran / "store")).record(number)
    assert start["from_version"] == {
        "store": (ran / "store").as_uri(),
        "run": RUN,
        "policy": "solver",
        "version": number,
        "step": number,
        "manifest_sha256": record.manifest_sha256.hex(),
    }


def test_a_store_needs_the_name_of_a_run(ran: Path) -> None:
    uri = (ran / "store").as_uri()
    assert asked(uri, run=RUN) == asked(str(ran))
    with pytest.raises(InvalidArgumentError, match="say which with --run"):
        asked(uri)


def test_the_overrides_are_a_recipe(ran: Path) -> None:
    found = weight_overrides(tiny_recipe().recipe, [str(ran)], run=None, version=0)
    recipe = parse_recipe(TINY, overrides=[f"{key}={value}" for key, value in found.items()]).recipe
    start = recipe.policy("solver").model.from_version
    assert start is not None
    assert (start.run, start.version) == (RUN, 0)


def test_of_several_policies_the_one_is_named(tmp_path: Path) -> None:
    recipe, folder = parse_recipe(TWO).recipe, model(tmp_path / "model", rows=3)
    other = model(tmp_path / "other", rows=3)
    assert list(asked(f"critic={folder}", recipe=recipe)) == ["policies.critic.model"]
    with pytest.raises(InvalidArgumentError, match="critic, solver have weights of their own; say whose"):
        asked(str(folder), recipe=recipe)
    with pytest.raises(InvalidArgumentError, match="'critic' twice"):
        asked(f"critic={folder}", f"critic={other}", recipe=recipe)


def test_a_version_that_is_not_there_is_named_with_those_that_are(ran: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"--version 3: .* has the versions 0 to 2"):
        asked(str(ran), version=3)
    with pytest.raises(InvalidArgumentError, match="no version of policy 'solver' of run 'other'"):
        asked(str(ran), run="other")


@pytest.mark.parametrize("weights", ["nowhere", "{tmp}"])
def test_what_is_neither_a_model_nor_a_run_is_refused(tmp_path: Path, weights: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"neither a model .* nor a run"):
        asked(weights.format(tmp=tmp_path))


def test_a_model_that_neither_this_machine_nor_the_hub_has_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=r"org/model: neither a folder nor .* cannot be reached"):
        asked("org/model")


def test_a_policy_that_there_is_not_is_named_with_those_there_are(ran: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="nor is 'solvr' a policy: the recipe has solver"):
        asked(f"solvr={ran}")


def test_a_version_of_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="no run is there to take a version of"):
        asked("org/model", version=3)
    with pytest.raises(InvalidArgumentError, match="give that, too"):
        asked(version=3)


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="tokens up to number 2, the model embeddings of 2"):
        asked(str(model(tmp_path / "model", rows=2)))


def test_a_model_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(RecipeError):
        asked(str(tmp_path))
