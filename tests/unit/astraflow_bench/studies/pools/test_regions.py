"""What a run over regions needs is named before anything is made; pools move as steps are finished."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from threading import Event
from typing import cast

import pytest

from astraflow.errors import InternalError, PreconditionError
from astraflow_bench.studies.pools import regions
from astraflow_bench.studies.study import Cell
from astraflow_bench.wan.network import Network

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


@pytest.fixture
def region(tmp_path: Path) -> regions._Region:
    """A region without a network, whose run and node have said something."""
    (tmp_path / "logs").mkdir()
    for name in ("run", "node-far-30"):
        (tmp_path / "logs" / f"{name}.log").write_text(f"the last words of {name}")
    return regions._Region(cast("Network", None), tmp_path, {})


def started(command: str, *, stdout: int = subprocess.DEVNULL) -> subprocess.Popen[bytes]:
    return subprocess.Popen(["sh", "-c", command], stdout=stdout)


@pytest.mark.parametrize(
    ("run", "node", "lasts_s", "said"),
    [
        ("exit 3", "exec sleep 600", 600, "the run ended with status 3: the last words of run"),
        ("exec sleep 600", "exit 4", 600, "far-30 ended with status 4: the last words of node-far-30"),
        ("exec sleep 600", "exec sleep 600", 0, "the run had not ended after 1800 s: the last words of run"),
    ],
    ids=["run", "node", "deadline"],
)
def test_what_ends_a_run_too_early_is_named(
    region: regions._Region, run: str, node: str, lasts_s: float, said: str
) -> None:
    region.nodes["far-30"] = started(node)
    process, deadline_s = started(run), time.monotonic() + lasts_s
    try:
        with pytest.raises(InternalError, match=said):
            regions._followed(process, region, (), Event(), deadline_s=deadline_s)
    finally:
        process.kill()
        process.communicate()
        regions._end(region.nodes)


def test_a_node_that_has_left_ends_no_run_and_a_study_that_ends_does(region: regions._Region) -> None:
    region.nodes["far-30"] = started("exit 0")
    region.nodes["far-30"].wait()
    output = started('echo "{\\"steps\\": 3}"', stdout=subprocess.PIPE)
    assert regions._followed(output, region, (), Event(), deadline_s=time.monotonic() + 600) == {"steps": 3}
    stopped = Event()
    stopped.set()
    with pytest.raises(InternalError, match="ended with status -9"):
        regions._followed(started("exec sleep 600"), region, (), stopped, deadline_s=time.monotonic() + 600)
