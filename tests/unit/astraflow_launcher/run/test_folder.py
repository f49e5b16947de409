"""A run's folder is made once, resumed by the same recipe, and refused by another."""

import json
import os
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from astraflow.errors import ConflictError, IncompatibleError
from astraflow.recipe.file import CodeFile
from astraflow_launcher.run.folder import RunFolder, open_run_folder
from support.recipes import tiny_recipe

NOW = datetime(2030, 1, 2, 3, 4, 5, tzinfo=UTC)


def opened(*overrides: str, data_dir: Path | None) -> RunFolder:
    """The folder as a launcher that has ended since saw it."""
    folder = open_run_folder(tiny_recipe(*overrides), data_dir=data_dir, now=NOW)
    folder.lock.release()
    return folder


def test_a_named_folder_is_resumed_by_the_same_recipe(tmp_path: Path) -> None:
    first = opened(data_dir=tmp_path / "run")
    again = opened(data_dir=tmp_path / "run")
    assert (first.resumed, again.resumed) == (False, True)
    assert again.record == first.record
    assert first.record.run_id == "tiny"


def test_a_folder_of_another_recipe_is_refused_with_the_remedy(tmp_path: Path) -> None:
    opened(data_dir=tmp_path)
    with pytest.raises(ConflictError, match="give another --data-dir"):
        opened("run.seed=3", data_dir=tmp_path)


def test_what_only_trainers_read_may_change_and_the_run_keeps_its_recipe(tmp_path: Path) -> None:
    first = opened(data_dir=tmp_path)
    assert (first.changes, first.trainer_recipe) == ((), None)
    rate = "trainer.optimizer.learning_rate=0.125"
    again = opened(rate, "run.steps=9", data_dir=tmp_path)
    assert again.record == first.record
    assert again.recipe_yaml == first.recipe_yaml
    (change,) = again.changes
    assert change.startswith("trainer.optimizer.learning_rate: ")
    assert change.endswith(" → 0.125")
    assert again.trainer_recipe is not None
    assert again.trainer_recipe.read_text() == tiny_recipe(rate, "run.steps=9").yaml_text
    assert opened(data_dir=tmp_path).trainer_recipe is None


@pytest.mark.parametrize("key", ["run.steps", "policies.solver.steps"])
def test_a_run_may_be_continued_for_other_steps_under_its_own_recipe(tmp_path: Path, key: str) -> None:
    first = opened(f"{key}=3", data_dir=tmp_path)
    again = opened(f"{key}=6", data_dir=tmp_path)
    assert again.resumed
    assert again.record == first.record
    assert again.recipe_yaml == first.recipe_yaml == tiny_recipe(f"{key}=3").yaml_text


def rewrite_record(folder: Path, **fields: object) -> None:
    """Change run.json, as another release might have written it; a field of None is left out."""
    path = folder / "run.json"
    stored = {**json.loads(path.read_text()), **fields}
    path.write_text(json.dumps({name: value for name, value in stored.items() if value is not None}))


def as_an_earlier_release_wrote_it(folder: Path) -> None:
    """Make of run.json what release 0.1.0 wrote: a digest of the resolved recipe with its code, and no more."""
    rewrite_record(folder, schema_version=2, recipe_sha256="ab" * 32, written=None, code=None, release=None)


@pytest.mark.parametrize("earlier", [False, True], ids=["of this schema", "of an earlier release"])
def test_a_release_with_other_defaults_resumes_the_run_as_it_was_created_and_says_so(
    tmp_path: Path, earlier: bool
) -> None:
    opened(data_dir=tmp_path)
    if earlier:
        as_an_earlier_release_wrote_it(tmp_path)
    # The default was another one, and this key did not exist.
    text = tiny_recipe("dataflow.lease_ttl_s=7.5").yaml_text
    lines = [line for line in text.splitlines() if not line.strip().startswith("keep_checkpoints:")]
    (tmp_path / "recipe.yaml").write_text("\n".join(lines))
    again = opened("run.steps=9", data_dir=tmp_path)
    assert again.changes == ()
    assert again.loaded.recipe == tiny_recipe("dataflow.lease_ttl_s=7.5", "run.steps=9").recipe
    assert [note.partition(" ")[0] for note in again.notes] == [
        "dataflow.lease_ttl_s",
        "trainer.keep_checkpoints",
    ]
    with pytest.raises(ConflictError, match=r"run\.seed: 0 → 3"):
        opened("run.seed=3", data_dir=tmp_path)


def test_files_beside_the_recipe_that_differ_are_named_and_nothing_else(tmp_path: Path) -> None:
    loaded = tiny_recipe()
    first, other = (CodeFile("recipe.py", content) for content in (b"1", b"2"))
    open_run_folder(replace(loaded, code=(first,)), data_dir=tmp_path).lock.release()
    with pytest.raises(
        ConflictError, match=r"same recipe with other files beside it \(changed: recipe.py\); give"
    ):
        open_run_folder(replace(loaded, code=(other,)), data_dir=tmp_path)


def contents(folder: Path) -> dict[Path, tuple[int, bytes]]:
    """Of each file, when it was written and what is in it."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


def test_a_folder_that_another_launcher_has_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    first = open_run_folder(tiny_recipe(), data_dir=tmp_path)
    before = contents(tmp_path)
    with pytest.raises(ConflictError, match=f"in use by process {os.getpid()} "):
        opened("run.seed=3", data_dir=tmp_path)
    assert contents(tmp_path) == before
    first.lock.release()


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (1, r"schema version 1, astraflow \S+ reads 2 and 3; an earlier release reads it: go on"),
        (99, r"schema version 99, astraflow \S+ reads 2 and 3; a later release reads it: go on"),
    ],
    ids=["older", "newer"],
)
def test_a_folder_of_another_schema_is_refused(tmp_path: Path, found: int, words: str) -> None:
    opened(data_dir=tmp_path)
    rewrite_record(tmp_path, schema_version=found)
    with pytest.raises(IncompatibleError, match=words):
        opened(data_dir=tmp_path)


def test_runs_without_a_folder_get_one_each_and_share_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first, second = (opened(data_dir=None) for _ in range(2))
    assert first.root != second.root
    assert first.cache == second.cache
    assert first.root.is_relative_to(tmp_path)


def test_paths_below_the_folder_exist(tmp_path: Path) -> None:
    folder = opened(data_dir=tmp_path)
    assert all(path.is_dir() for path in (folder.redis, folder.addresses, folder.cache))
    assert not folder.store.exists(), "a store is made by whoever first writes into it, and never again"
    assert folder.log("node-1").parent.is_dir()
