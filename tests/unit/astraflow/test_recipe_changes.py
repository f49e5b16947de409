"""Which keys of a recipe may change while its run goes on, how the differences are shown, and that defaults which a
release changed do not touch a run, and are said when it is resumed.
"""

from collections.abc import Mapping
from pathlib import Path

import pytest

from astraflow.errors import ConflictError, IncompatibleError
from astraflow.recipe.file import CodeFile, LoadedRecipe, load_recipe, parse_recipe
from astraflow.recipe.shipped import shipped_recipes
from astraflow.recipe_changes import (
    code_differences,
    differences,
    file_digests,
    plugin_changes,
    read_recipe_of,
    resume,
    trainer_changes,
)
from support.recipes import TINY, tiny_recipe


def _changes(*overrides: str) -> list[str]:
    return trainer_changes(tiny_recipe().recipe, tiny_recipe(*overrides).recipe)


@pytest.mark.parametrize(
    "override",
    [
        "trainer.tokens_per_microbatch=4096",
        "trainer.gradient_sync=micro_batch",
        "trainer.checkpoint_every_steps=3",
        "trainer.keep_checkpoints=7",
        "trainer.algorithm.truncated=mask",
        "trainer.algorithm.kl={coefficient: 0.1}",
        "trainer.optimizer.beta1=0.5",
        "policies.solver.trainer={optimizer: {beta1: 0.5}}",
    ],
)
def test_what_only_the_trainer_reads_may_change(override: str) -> None:
    changes = _changes(override)
    assert changes
    section = override.partition("=")[0].partition("{")[0]
    assert all(change.startswith(section) and " → " in change for change in changes)


@pytest.mark.parametrize(
    "override",
    [
        "run.seed=3",
        "run.steps=0",
        "dataflow.max_staleness=3",
        "policies.solver.sampling.temperature=0.5",
        "trainer.publish.max_behind=3",
        "trainer.algorithm.advantage=rloo",
        "trainer.optimizer.kind=muon",
        "trainer.optimizer.average={decay: 0.9}",
    ],
)
def test_what_others_read_too_is_refused_by_name(override: str) -> None:
    key = override.partition("=")[0]
    with pytest.raises(ConflictError, match=f"this may not change: {key}"):
        _changes(override, "trainer.optimizer.beta1=0.5")


def test_equal_recipes_and_other_numbers_of_steps_are_no_change() -> None:
    assert _changes() == _changes("run.steps=9") == _changes("policies.solver.steps=9") == []


@pytest.mark.parametrize(
    "override",
    ["dataflow.filters=[recipe:Filter]", "policies.solver.dataflow={batch_needs: {min_sources: 2}}"],
)
def test_plugins_of_the_data_path_may_change(override: str) -> None:
    old, new = tiny_recipe().recipe, tiny_recipe(override).recipe
    assert plugin_changes(old, old) == []
    assert plugin_changes(old, new)
    with pytest.raises(
        ConflictError, match=r"but for curators, filters, .* may not change: run\.steps: 100 → 5"
    ):
        plugin_changes(old, tiny_recipe(override, "run.steps=5").recipe)


PLAIN = tiny_recipe()
LEASE = "dataflow.lease_ttl_s"


def run_of_another_release(*overrides: str, without: str = "") -> LoadedRecipe:
    """The resolved recipe of a run whose release had these defaults, and did not know the key `without`."""
    text = tiny_recipe(*overrides).yaml_text
    lines = [line for line in text.splitlines() if not (without and line.strip().startswith(f"{without}:"))]
    return parse_recipe("\n".join(lines))


@pytest.mark.parametrize("written", [PLAIN.written, ""], ids=["written is kept", "of an earlier release"])
def test_a_default_that_a_release_changed_stays_as_the_run_was_created_and_is_said(written: str) -> None:
    run = run_of_another_release(f"{LEASE}=7.5")
    resumed = resume(PLAIN, run=run, written=written)
    assert resumed.loaded.recipe == run.recipe
    (note,) = resumed.notes
    assert note == f"{LEASE} stays 7.5, as the run was created; the default of this release is " + str(
        PLAIN.recipe.dataflow.lease_ttl_s
    )


@pytest.mark.parametrize("written", [PLAIN.written, ""], ids=["written is kept", "of an earlier release"])
def test_a_key_that_a_release_added_takes_its_default_and_is_said(written: str) -> None:
    run = run_of_another_release(without="lease_ttl_s")
    resumed = resume(PLAIN, run=run, written=written)
    assert resumed.loaded.recipe == run.recipe == PLAIN.recipe
    default = PLAIN.recipe.dataflow.lease_ttl_s
    assert resumed.notes == (f"{LEASE} is new in this release; the run takes its default, {default}",)


@pytest.mark.parametrize("written", [PLAIN.written, ""], ids=["written is kept", "of an earlier release"])
@pytest.mark.parametrize(
    "override",
    [
        "dataflow.group_size=16",
        "trainer.algorithm.loss=gspo",
        "trainer.algorithm.preset=dapo",
        "raas.reward=recipe:Other",
        "raas.reward={use: recipe:Reward, with: {scale: 2}}",
        "dataflow.hedge={}",
        "policies.solver.trainer={optimizer: {beta1: 0.5}}",
    ],
)
def test_what_the_author_changed_is_the_authors_change(override: str, written: str) -> None:
    run = run_of_another_release(f"{LEASE}=7.5")
    resumed = resume(tiny_recipe(override), run=run, written=written)
    expected = tiny_recipe(override, f"{LEASE}=7.5").recipe
    assert differences(resumed.loaded.recipe, expected) == {}
    assert differences(run.recipe, resumed.loaded.recipe), "the change is seen"
    assert [note.partition(" ")[0] for note in resumed.notes] == [LEASE]


def test_a_key_that_the_author_took_out_is_a_change_where_what_was_written_is_kept() -> None:
    was = tiny_recipe(f"{LEASE}=7.5")
    resumed = resume(PLAIN, run=parse_recipe(was.yaml_text), written=was.written)
    assert resumed.notes == ()
    assert list(differences(was.recipe, resumed.loaded.recipe)) == [LEASE]


@pytest.mark.parametrize("name", shipped_recipes())
def test_a_shipped_recipe_is_resumed_by_its_own_release_without_a_word(name: str) -> None:
    loaded = load_recipe(Path(name))
    run = parse_recipe(loaded.yaml_text)
    for written in (loaded.written, ""):
        resumed = resume(loaded, run=run, written=written)
        assert resumed.notes == ()
        assert resumed.loaded is loaded
    assert parse_recipe(loaded.written).recipe == loaded.recipe


def test_what_is_written_does_not_depend_on_spaces_order_and_comments() -> None:
    other = """
    # The same.
    raas: {reward: 'recipe:Reward'}
    policies:
      solver:
        model:
          path: some/model
    run:
      dataset: recipe:Data   # of its own
      name: tiny
    """
    assert parse_recipe(other).written == parse_recipe(TINY).written
    assert parse_recipe(other, overrides=["run.seed=3"]).written != parse_recipe(TINY).written


def test_a_recipe_with_a_key_that_this_release_does_not_know_names_the_release_that_wrote_it() -> None:
    text = PLAIN.yaml_text.replace("lease_ttl_s", "lease_seconds")
    with pytest.raises(
        IncompatibleError,
        match=r"run\.yaml was written by astraflow 9\.9\.9, .*lease_seconds.* resume the run with",
    ):
        read_recipe_of(text, source="run.yaml", release="astraflow 9.9.9")


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"recipe.py": b"1", "data.json": b"1"}, ""),
        ({"recipe.py": b"2", "data.json": b"1"}, "changed: recipe.py"),
        ({"recipe.py": b"1"}, "missing: data.json"),
        ({"recipe.py": b"1", "data.json": b"1", "more.py": b"1"}, "new: more.py"),
        ({"recipe.py": b"2", "more.py": b"1"}, "changed: recipe.py; missing: data.json; new: more.py"),
    ],
)
def test_files_of_the_code_that_differ_are_named(asked: Mapping[str, bytes], words: str) -> None:
    run = {"recipe.py": b"1", "data.json": b"1"}
    digests = [file_digests(CodeFile(*file) for file in files.items()) for files in (asked, run)]
    assert code_differences(digests[0], run=digests[1]) == words
