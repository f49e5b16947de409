"""A run's folder is made once, resumed by the same recipe, and refused by another."""

import json
import os
from datetime import UTC, datetime
from pathlib import Path

import pytest

from astraflow.errors import ConflictError, IncompatibleError
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


def test_a_run_of_other_code_is_refused_with_both_digests(tmp_path: Path) -> None:
    own = opened(data_dir=tmp_path).record.recipe_sha256
    record = tmp_path / "run.json"
    record.write_text(record.read_text().replace(own, "0" * 64))
    with pytest.raises(ConflictError, match=f"says digest 0{{12}}, with the code here it is {own[:12]}"):
        opened(data_dir=tmp_path)


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


def test_a_folder_of_another_release_is_refused(tmp_path: Path) -> None:
    opened(data_dir=tmp_path)
    stored = json.loads((tmp_path / "run.json").read_text())
    (tmp_path / "run.json").write_text(json.dumps({**stored, "schema_version": 99}))
    with pytest.raises(IncompatibleError, match="99"):
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
