"""A study goes on where it stopped, a run that fails is a row, and the page says what is missing."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from typer.testing import CliRunner

from astraflow.errors import InternalError, PreconditionError
from astraflow_bench.commands.study import app
from astraflow_bench.studies import running

SUMMARY = {
    "heldout_first": 0.2, "steps": 50, "first_reward_s": 21.4, "wall_s": 180.6, "staleness": {"max": 2},
    "delta_bytes_mean": 250.0, "snapshot_bytes": 1000, "density_mean": 0.08, "peak_pss_bytes": 3 * 2**29,
    "conservation_error": 0, "reward_last": 0.9, "policies": {"solver": {}},
}  # fmt: skip
Played = Callable[..., tuple[dict[str, Any], Path]]


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """`astraflow dev` is played: every seed ends at 0.8 but seed 1, at 0.3, and the control. Returns what ran."""
    ran: list[str] = []

    def play(
        recipe: Path, *, overrides: Iterable[str], folder: Path, stopped: Event
    ) -> tuple[dict[str, Any], Path]:
        values = dict(item.split("=", 1) for item in overrides)
        ran.append(values["run.seed"])
        if values.get("run.steps") == "13":
            raise InternalError("`astraflow dev` ended with status 2: no such luck")
        control = values.get("trainer.optimizer.learning_rate") == "0"
        last = 0.2 if control else {"1": 0.3}.get(values["run.seed"], 0.8)
        root = tmp_path / f"run-{len(ran)}"
        root.mkdir()
        lines = [
            {"kind": "evaluation", "policy": "solver", "version": version, "heldout_reward": reward}
            for version, reward in ((0, 0.2), (9, last))
        ]
        (root / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return {**SUMMARY, "heldout_last": last}, root

    monkeypatch.setattr(running, "run_recipe", play)
    return ran


def study(folder: Path, *options: str) -> tuple[int, str]:
    command = ["quickstart", "--out", str(folder / "out"), "--runs", str(folder / "runs"), *options]
    done = CliRunner().invoke(app, command)
    return done.exit_code, done.output + str(done.exception or "")


def test_each_cell_is_a_line_and_the_page_holds_means_and_targets(played: list[str], tmp_path: Path) -> None:
    status, printed = study(tmp_path, "--seeds", "2")
    assert status == 1
    assert "| seeds that learned | of 2 | 1  | ≥ 2 | **no** |" in printed
    page = (tmp_path / "out" / "quickstart-study.md").read_text()
    assert "| recipe | 2 | 0.2 ± 0 | 0.55 ± 0.25 | 0.5 ± 0.5 |" in page
    lines = (tmp_path / "out" / "quickstart-study.jsonl").read_text().splitlines()
    assert [(json.loads(line)["arm"], json.loads(line)["seed"]) for line in lines] == [
        ("recipe", 0),
        ("control", 0),
        ("recipe", 1),
    ]
    assert (tmp_path / "out" / "quickstart-study.png").read_bytes().startswith(b"\x89PNG")
    assert not list(tmp_path.glob("run-*"))


def test_cells_of_an_older_release_count_where_somebody_accepts_them(
    played: list[str], tmp_path: Path
) -> None:
    one = ("--seeds", "1", "--only", "recipe")
    study(tmp_path, *one)
    lines = tmp_path / "out" / "quickstart-study.jsonl"
    lines.write_text(lines.read_text().replace(r"  prefetch: true\n", ""))
    assert "give --accept-older" in study(tmp_path, *one)[1]
    assert "1 of 1 cells are there" in study(tmp_path, *one, "--accept-older")[1]
    assert played == ["0"]


def test_a_study_that_is_started_again_runs_what_is_missing(played: list[str], tmp_path: Path) -> None:
    study(tmp_path, "--seeds", "1", "--only", "recipe")
    status, _ = study(tmp_path, "--seeds", "1", "--keep-runs")
    assert status == 0
    assert played == ["0", "0"]
    assert study(tmp_path, "--seeds", "1")[0] == 0
    assert len(played) == 2
    assert (tmp_path / "run-2").exists()


def test_another_configuration_is_refused_before_anything_runs(played: list[str], tmp_path: Path) -> None:
    study(tmp_path, "--seeds", "1", "--only", "recipe")
    _, said = study(tmp_path, "--seeds", "2", "--steps", "7")
    assert "recipe, seed 0 with run.steps 50, and it would be 7 now" in said
    assert played == ["0"]


def test_a_run_that_fails_is_a_row_with_the_reason_and_the_others_go_on(
    played: list[str], tmp_path: Path
) -> None:
    assert study(tmp_path, "--seeds", "1", "--steps", "13", "--only", "recipe")[0] == 1
    status, _ = study(tmp_path, "--seeds", "1", "--only", "control")
    assert (status, played) == (1, ["0", "0"])
    page = (tmp_path / "out" / "quickstart-study.md").read_text()
    assert "| recipe | 0 | `astraflow dev` ended with status 2: no such luck |" in page
    assert "| control | 1 |" in page
    played.clear()
    assert study(tmp_path, "--seeds", "1", "--steps", "13", "--only", "recipe")[0] == 1
    assert played == ["0"], "what failed is tried again"


def test_a_run_that_lacks_what_is_measured_is_a_row_and_leaves_its_folder(
    played: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(SUMMARY, "staleness")
    assert study(tmp_path, "--seeds", "1")[0] == 1
    page = (tmp_path / "out" / "quickstart-study.md").read_text()
    assert "| recipe | 0 | the run ended, and lacks what is measured: KeyError('staleness')" in page
    assert played == ["0", "0"], "the others go on"
    assert (tmp_path / "run-1").exists()


def test_what_the_machine_lacks_ends_the_study(
    played: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PreconditionError("needs root")

    monkeypatch.setattr(running, "run_recipe", refuse)
    status, said = study(tmp_path, "--seeds", "1")
    assert status == 1
    assert "needs root" in said
    assert not list((tmp_path / "out").iterdir())


def test_every_seed_of_a_recipe_stands_beside_its_control(played: list[str], tmp_path: Path) -> None:
    command = ["recipes", "--only", "quickstart", "--seeds", "2", "--out", str(tmp_path)]
    done = CliRunner().invoke(app, [*command, "--runs", str(tmp_path / "runs")])
    assert done.exit_code == 1, "seed 1 learns less, so that the gain is within two errors"
    page = (tmp_path / "recipes.md").read_text()
    assert "| gain | quickstart | 0.35 ± 0.25 (n 2) | ≥ 0.5 | **no** |" in page
    assert "| quickstart | 1 | 0.2 | 0.3 | 0.1 | 50 | 0.9 | 3.01 |" in page
    assert "| quickstart control | 2 | 0.2 ± 0 | 0.2 ± 0 |" in page


def test_what_is_missing_is_printed_without_a_run(played: list[str], tmp_path: Path) -> None:
    status, printed = study(tmp_path, "--seeds", "1", "--dry-run", "--set", "dataflow.group_size=4")
    assert status == 0
    assert "control, seed 0: trainer.optimizer.learning_rate=0 dataflow.group_size=4 run.seed=0" in printed
    assert not played


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--only", "recipes"], "recipes is no arm of quickstart; it has recipe, control"),
        (["--set", "run.stepz=3"], "stepz"),
        (["--lengths", "x"], "only async replays recorded lengths, not quickstart"),
    ],
)
def test_bad_options_are_refused(played: list[str], tmp_path: Path, options: list[str], said: str) -> None:
    status, printed = study(tmp_path, *options)
    assert status == 2
    assert said in " ".join(printed.replace("│", " ").split())
    assert not played


@pytest.mark.parametrize(
    ("content", "said"),
    [("3\nx\n", "line 2: 'x' is no number"), ("", "has 0 numbers"), ("3\n-1\n", "positive")],
)
def test_a_file_of_lengths_is_checked(tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "lengths").write_text(content)
    command = ["async", "--out", str(tmp_path), "--lengths", str(tmp_path / "lengths"), "--dry-run"]
    done = CliRunner().invoke(app, command, terminal_width=300)
    assert done.exit_code == 2
    assert said in " ".join(done.output.replace("│", " ").split())
