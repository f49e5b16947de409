"""Finished cells are kept, are not run again, and are never mixed with those of another configuration."""

from dataclasses import replace
from pathlib import Path

import pytest

from astraflow.errors import ConflictError, IncompatibleError
from astraflow_bench.studies.ledger import Ledger
from astraflow_bench.studies.study import Cell, Measured, Result


def cell(seed: int, *overrides: str) -> Cell:
    return Cell(arm="recipe", seed=seed, recipe="quickstart", overrides=(*overrides, f"run.seed={seed}"))


def result(seed: int, *overrides: str) -> Result:
    return Result(
        arm="recipe",
        seed=seed,
        recipe=cell(seed, *overrides).resolved(),
        measured=Measured(figures={"last": 0.9, "first": None}, curves={"heldout": [(0, 0.5), (10, 0.9)]}),
        machine="a machine",
        date="2026-01-01",
        commit="abc",
        load=1.5,
        seconds=60,
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    ledger = Ledger(tmp_path / "study.jsonl")
    for seed in (0, 1):
        ledger.append(result(seed))
    return tmp_path / "study.jsonl"


def test_a_line_holds_the_whole_configuration_and_what_was_measured(path: Path) -> None:
    first = Ledger(path).results[0]
    assert "learning_rate: 0.0005" in first.recipe
    assert first.measured.figures == {"last": 0.9, "first": None}
    assert first.measured.curves["heldout"][1] == [10, 0.9]


def test_finished_cells_are_not_missing(path: Path) -> None:
    assert [one.seed for one in Ledger(path).missing([cell(seed) for seed in range(4)])] == [2, 3]


def test_a_run_that_failed_is_kept_with_its_reason_and_runs_again_until_it_finishes(path: Path) -> None:
    cells = [cell(seed) for seed in range(3)]
    ledger = Ledger(path)
    ledger.append(replace(result(2), measured=Measured(figures={}), failed="no luck"))
    again = Ledger(path)
    assert [one.failed for one in again.failures] == ["no luck"]
    assert [one.seed for one in again.missing(cells)] == [2]
    again.append(result(2))
    assert not Ledger(path).failures
    assert not Ledger(path).missing(cells)


def test_a_line_cut_short_by_a_kill_is_a_cell_that_is_missing(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])
    ledger = Ledger(path)
    assert [one.seed for one in ledger.results] == [0]
    ledger.append(result(1))
    assert [one.seed for one in Ledger(path).results] == [0, 1]


def test_a_cell_with_another_configuration_is_refused(path: Path) -> None:
    before = path.read_bytes()
    said = r"recipe, seed 1 with run.steps 50, and it would be 7 now; give the same options as then, another --out"
    for accepts_older in (False, True):
        with pytest.raises(ConflictError, match=said):
            Ledger(path, accepts_older=accepts_older).missing([cell(0), cell(1, "run.steps=7")])
    assert path.read_bytes() == before


def rewritten(path: Path, old: str, new: str) -> Path:
    """The file, as if the release of its lines had written their recipes otherwise."""
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    return path


def test_a_cell_of_a_release_that_lacked_a_key_is_refused_until_somebody_accepts_it(path: Path) -> None:
    rewritten(path, r"  prefetch: true\n", "")
    said = (
        r"seed 0 of a release without trainer\.prefetch \(now true\); give --accept-older .*, another --out,"
    )
    with pytest.raises(ConflictError, match=said):
        Ledger(path).missing([cell(0)])
    accepting = Ledger(path, accepts_older=True)
    assert [one.seed for one in accepting.missing([cell(seed) for seed in range(3)])] == [2]
    # What the line lacks is accepted at its default only.
    with pytest.raises(
        ConflictError, match=r"with trainer.prefetch true, and it would be false now; give the same"
    ):
        accepting.missing([cell(0, "trainer.prefetch=false")])


def test_a_cell_whose_recipe_cannot_be_read_any_more_is_refused_with_the_key(path: Path) -> None:
    rewritten(path, r"  prefetch: true\n", r"  fetch_ahead: true\n")
    said = r"that this release refuses \(recipe:\d+: trainer.fetch_ahead: unknown key.*; give another --out, or delete"
    with pytest.raises(ConflictError, match=said):
        Ledger(path, accepts_older=True).missing([cell(0)])


@pytest.mark.parametrize("line", ["not json", "{}", "[]", '{"measured": {"figures": {}}, "arm": "a"}'])
def test_what_is_no_cell_is_named(path: Path, line: str) -> None:
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(IncompatibleError, match=r"line 3 is no cell of a study .* restore the file"):
        Ledger(path)
