"""The study's claim: at least nine of ten seeds learn, and a run without learning does not."""

import json
import os
import sys
from pathlib import Path

import pytest

from astraflow_bench import study
from astraflow_bench.study import CONTROL, Trial

PLAYED = """
import json, pathlib, sys
arguments = sys.argv[1:]
value = lambda name: arguments[arguments.index(name) + 1]
control = "trainer.optimizer.learning_rate=0" in arguments
last = FINALS["control" if control else value("--seed")]
folder = pathlib.Path(value("--data-dir"))
lines = [
    {"kind": "step", "step": 1},
    {"kind": "evaluation", "version": 0, "seconds": 1.0, "heldout_reward": 0.2},
    {"kind": "evaluation", "version": 9, "seconds": 9.0, "heldout_reward": last},
]
(folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\\n" for line in lines))
print("a line before the object")
print(json.dumps({**SUMMARY, "heldout_first": 0.2, "heldout_last": last}))
"""


def _summary(first: float | None = 0.2, last: float | None = 0.8) -> dict[str, object]:
    return {
        "heldout_first": first,
        "heldout_last": last,
        "heldout_n": 1024,
        "steps": 50,
        "first_reward_s": 21.4,
        "wall_s": 180.6,
        "staleness": {"p50": 1.0, "p99": 2.0, "max": 2},
        "delta_bytes_mean": 250.0,
        "snapshot_bytes": 1000,
        "density_mean": 0.0812,
        "peak_pss_bytes": 3 * 2**29,
        "conservation_error": 0,
    }


def _play(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Run the whole study over a program that plays `astraflow dev`: seed 0 learns, seed 1 does not."""
    finals = {"0": 0.8, "1": 0.3, "control": 0.2}
    player = folder / "player.py"
    player.write_text(f"FINALS = {finals!r}\nSUMMARY = {_summary()!r}\n{PLAYED}")
    interpreter = folder / "python"
    interpreter.write_text(f'#!/bin/sh\nexec {sys.executable} -S {player} "$@"\n')
    interpreter.chmod(0o755)
    monkeypatch.setattr(sys, "executable", os.fspath(interpreter))
    monkeypatch.setattr(sys, "argv", ["study", "--seeds", "2", "--out", str(folder / "out")])
    study.main()


@pytest.mark.parametrize(
    ("first", "last", "learned"),
    [
        (0.2, 0.70, True),
        (0.2, 0.69, False),
        (0.5, 0.75, True),
        (0.5, 0.74, False),
        (0.75, 0.99, False),
        (None, 0.8, False),
        (0.2, None, False),
    ],
)
def test_a_seed_has_learned_when_it_ends_high_and_well_above_its_start(
    first: float | None, last: float | None, learned: bool
) -> None:
    assert Trial("seed 0", _summary(first, last), []).learned is learned


@pytest.mark.parametrize(
    ("learned", "seeds", "control", "status"),
    [(10, 10, 0.2, 0), (9, 10, 0.2, 0), (8, 10, 0.2, 1), (10, 10, 0.8, 1), (3, 3, 0.2, 0), (2, 3, 0.2, 1)],
)
def test_nine_of_ten_seeds_must_learn_rounded_up_and_the_control_must_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, learned: int, seeds: int, control: float, status: int
) -> None:
    """Exit status of a study whose trials are given instead of run, and not drawn."""

    def trial(_: Path, name: str, arguments: list[str]) -> Trial:
        seed_last = 0.8 if int(arguments[1]) < learned else 0.3
        return Trial(name, _summary(last=control if name == CONTROL else seed_last), [])

    monkeypatch.setattr(study, "_run", trial)
    monkeypatch.setattr(study, "_draw", lambda trials, path: None)
    monkeypatch.setattr(sys, "argv", ["study", "--seeds", str(seeds), "--out", str(tmp_path)])
    assert study.main() == status


def test_the_results_hold_each_trial_and_a_picture(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _play(monkeypatch, tmp_path)
    raw = json.loads((tmp_path / "out" / "quickstart-study.json").read_text())
    assert [trial["name"] for trial in raw] == ["seed 0", "seed 1", CONTROL]
    assert raw[0]["evaluations"] == [[0, 1.0, 0.2], [9, 9.0, 0.8]]
    assert (tmp_path / "out" / "quickstart-study.png").read_bytes().startswith(b"\x89PNG")
    report = (tmp_path / "out" / "quickstart-study.md").read_text()
    assert "learned: 1 of 2 seeds; mean final held-out reward 0.550" in report


def test_the_report_has_a_row_for_each_trial_under_its_heading() -> None:
    trials = [Trial("seed 0", _summary(), []), Trial(CONTROL, _summary(last=0.21), [])]
    heading, line, *rows = [row for row in study._report(trials).splitlines() if row.startswith("|")]
    assert rows == [
        "| seed 0 | 0.200 → 0.800 (1024) | yes | 50 | 21 | 181 | 1/2/2 | 0.25 | 0.081 | 1.50 | 0 |",
        "| control | 0.200 → 0.210 (1024) | no | 50 | 21 | 181 | 1/2/2 | 0.25 | 0.081 | 1.50 | 0 |",
    ]
    assert {row.count("|") for row in (heading, line, *rows)} == {12}
