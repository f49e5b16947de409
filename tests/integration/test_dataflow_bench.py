"""`astraflow bench dataflow` in its smallest size: every section measures, and what it compares with is there too."""

import json
from pathlib import Path

import pytest

from support.cli import run

pytestmark = [pytest.mark.integration, pytest.mark.ci, pytest.mark.timeout(400)]

SIZES = (
    "--tokens 16 --batch-groups 2 --batches 1 --leases 300 --streams 3 --idle-seconds 0.3 --backlog 20 --backlog 40 "
    "--open-groups 10 --open-groups 20 --ready 64 --nodes 5 --runs 1 --runs 2 --processes 1 --processes 2 "
    "--resident-mib 1"
)
ALWAYS = {
    ("push 16: rate", "AstraFlow, single"),
    ("push 16: rate", "raw gRPC stream"),
    ("push 16: Redis CPU", "raw Redis"),
    ("batch of 16 × 2k", "published buffer, in memory"),
    ("batch of 16 × 2k", "Ray's object store"),
    ("batch of 16 × 2k", "TransferQueue"),
    ("main Redis: memory of a trajectory", "payloads in a second Redis"),
    ("server: CPU of a push", "payloads in a folder"),
    ("expired leases are leased again", "300 tasks"),
    ("memory of a stream", "3 streams"),
    ("idle: Redis commands", "1 run, no stream"),
    ("lease: Redis CPU", "40 tasks wait"),
    ("push: Redis CPU", "20 open groups"),
    ("Redis memory of a trajectory beside its payload", "64 ready trajectories"),
    ("Status: server CPU", "5 nodes"),
    ("memory of a run", "2 runs"),
}


RESTART = "restart: until a server answers"


def test_every_section_measures_and_has_its_page(tmp_path: Path) -> None:
    # The status is not judged: targets are about the machine, and about sizes that mean something.
    result = run("bench", "dataflow", *SIZES.split(), "--json", "--write", str(tmp_path))
    written = json.loads((tmp_path / "dataflow.json").read_text())
    assert written == result.json
    figures = {(figure["what"], figure["subject"]): figure for figure in written["figures"]}
    assert figures.keys() >= ALWAYS
    # Two batches of 16 samples of the published system sleep twice each.
    assert figures["batch of 16 × 2k", "published buffer, in memory"]["value"] >= 100
    assert figures["push 16: Redis commands", "AstraFlow, single"]["value"] > 1
    # An idle run may well make no command in so short a time.
    rates = [figure for figure in written["figures"] if figure["what"].endswith(": rate")]
    assert {figure["what"] for figure in rates} >= {
        "push 16: rate",
        "submit: rate",
        "lease: rate",
        "push 2048: rate",
    }
    assert all(figure["value"] > 0 for figure in rates)
    assert [figure["unit"] for figure in written["figures"] if figure["what"] == RESTART] == ["s"]
    page = (tmp_path / "dataflow.md").read_text()
    assert page.count("\n| ") == len(figures) + 1


def test_a_section_that_there_is_not_is_refused_with_those_there_are() -> None:
    result = run("bench", "dataflow", "--only", "pull")
    assert result.status == 2
    assert "pull is none of push, batch" in result.errors
