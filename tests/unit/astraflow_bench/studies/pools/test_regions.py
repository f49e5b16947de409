"""What a run over regions needs is named before anything is made; pools move as steps are finished."""

from __future__ import annotations

import json
from pathlib import Path
from threading import Event

import pytest

from astraflow.errors import PreconditionError
from astraflow_bench.studies.pools import regions
from astraflow_bench.studies.study import Cell

CELL = Cell(arm="heterogeneous", seed=0, recipe="quickstart", overrides=())


def test_a_machine_that_lacks_something_is_told_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(regions, "missing_tools", lambda: "needs root")
    with pytest.raises(PreconditionError, match="needs root"):
        regions.run_in_regions(CELL, tmp_path, (), Event())
    assert not list(tmp_path.iterdir())


def test_pools_may_join_when_the_server_listens_and_move_by_the_newest_step(tmp_path: Path) -> None:
    assert regions._finished_step(tmp_path) == -1
    (tmp_path / "addresses").mkdir()
    (tmp_path / "addresses" / "dataflow.json").touch()
    assert regions._finished_step(tmp_path) == 0
    lines = [
        {"kind": kind, "policy": "solver", "seconds": 1.0, name: number}
        for kind, name, number in (("step", "step", 1), ("version", "version", 9), ("step", "step", 2))
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert regions._finished_step(tmp_path) == 2
