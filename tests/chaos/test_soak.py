"""Random processes killed at random instants, hundreds of times; and how soon a killed server answers again.

`make soak T=tests/chaos` takes about 25 minutes on two cores and writes its section of docs/results/chaos.md.
"""

import platform
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import pytest

from astraflow.client import Client, Connection, RetryPolicy
from astraflow.commands.server import server_of_folder
from astraflow.connecting.connection import DialFiles
from astraflow.dataflow.v1.admin_service_pb2 import StatusRequest
from astraflow.errors import AstraflowError
from support.audit import Audit, audit
from support.chaos import ROLES, Monkey, Story, run_random_kills
from support.development import ROOT, RUN_ID, RunFiles, dev, finish, wait_for
from support.results_pages import replace_section

pytestmark = [pytest.mark.e2e, pytest.mark.soak, pytest.mark.timeout(3600)]

SEEDS = {1: 1, 2: 1, 3: 1, 4: 2, 5: 2}
"""Seed to the dataflow servers that the run has behind its port."""
KILLS_PER_SEED = 60
RESTARTS = 20
_RESULTS = ROOT / "docs" / "results" / "chaos.md"


ABOUT = """Written by `make soak T=tests/chaos/test_soak.py`. Each seed is one run of the quickstart's loop in small,
whose processes were SIGKILLed at random instants; a quarter of Valkey's kills also cut one byte, another quarter 400
bytes, off the end of its append-only file. Columns with a process's name count its kills (where a run has two dataflow
`servers` behind one port, of either or of both at once), `restarts` the processes started beyond the first of each
role, `replayed` the steps taken again after a resume. The audit compares the nodes' journals, Redis, the trainer's
ledger, the accounts and the store.
"""


@dataclass
class Report:
    """What the soak found; written when all of it ran."""

    rows: list[str] = field(default_factory=list)
    kills: Counter[str] = field(default_factory=Counter)
    violations: int = 0
    restart_s: list[float] = field(default_factory=list)

    def add(self, seed: int, story: Story, found: Audit, *, wall_s: float) -> None:
        """Take in one seed."""
        kills = Counter(death.victim for death in story.deaths)
        self.kills += kills
        self.violations += len(found.violations)
        figures = found.figures
        restarts = sum(max(0, len(pids) - 1) for pids in story.pids.values())
        cells = [
            seed,
            SEEDS[seed],
            *(kills[role] for role in ROLES),
            kills.total(),
            restarts,
            figures["steps"],
        ]
        cells += [figures["ledger lines"] - figures["steps"], figures["pushed"], figures["trained"]]
        cells += [figures["dropped"], figures["versions"], len(found.violations), round(wall_s)]
        self.rows.append(f"| {' | '.join(map(str, cells))} |")

    def text(self) -> str:
        """The section."""
        command = ["git", "rev-parse", "--short", "HEAD"]
        commit = subprocess.run(command, capture_output=True, text=True, check=True)
        waits = sorted(self.restart_s)
        columns = [
            "seed",
            "servers",
            *ROLES,
            "kills",
            "restarts",
            "steps",
            "replayed",
            "pushed",
            "trained",
            "dropped",
        ]
        columns += ["versions", "violations", "wall s"]
        facts = [
            f"machine: {platform.machine()}, Python {platform.python_version()}",
            f"date: {datetime.now(tz=UTC):%Y-%m-%d}, commit {commit.stdout.strip()}",
            f"kills: {self.kills.total()} at random instants; violations: {self.violations}",
            f"a killed dataflow server answered `Status` again after p50 {waits[len(waits) // 2]:.2f} s, "
            f"max {waits[-1]:.2f} s ({len(waits)} kills, restarted by the launcher)",
        ]
        table = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}", *self.rows]
        return "\n".join([ABOUT, *(f"* {fact}" for fact in facts), "", *table, ""])


@pytest.fixture(scope="module")
def report() -> Iterator[Report]:
    """Collect the figures of all tests; write them when none is missing."""
    found = Report()
    yield found
    if len(found.rows) == len(SEEDS) and len(found.restart_s) == RESTARTS:
        replace_section(_RESULTS, "Random kills: is anything lost?", found.text())


@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_is_lost_over_kills_at_random_instants(
    tmp_path: Path, report: Report, capsys: pytest.CaptureFixture[str], seed: int
) -> None:
    started_s = time.monotonic()
    servers = {"ASTRAFLOW_PROCESSES": str(SEEDS[seed])}
    story = run_random_kills(tmp_path, seed=seed, num_kills=KILLS_PER_SEED, variables=servers)
    found = audit(tmp_path)
    report.add(seed, story, found, wall_s=time.monotonic() - started_s)
    with capsys.disabled():
        by_victim = dict(Counter(death.victim for death in story.deaths))
        print(f"\nseed {seed}: kills {by_victim}, launchers {story.lives}, {found.figures}")  # noqa: T201 - the report
    assert found.violations == []
    assert story.summary["conservation_error"] == 0
    assert len(story.deaths) == KILLS_PER_SEED


def test_how_soon_a_killed_dataflow_server_answers_again_is_reported(
    tmp_path: Path, report: Report, capsys: pytest.CaptureFixture[str]
) -> None:
    files, monkey = RunFiles(tmp_path), Monkey(Story(files=RunFiles(tmp_path)))
    with dev(tmp_path, "--steps", "100000", "--max-restarts", "1000") as launcher:
        monkey.launcher = launcher
        wait_for(lambda: files.steps_taken() >= 1)
        server = server_of_folder(files.data_dir).connection(DialFiles())
        for _ in range(RESTARTS):
            # As one that had run steadily: another kill at once would meet the launcher's backoff.
            time.sleep(6.0)
            assert monkey.kill("dataflow")
            report.restart_s.append(_seconds_until_answering(server))
        launcher.send_signal(signal.SIGINT)
        finish(launcher, tmp_path)
    waits = sorted(report.restart_s)
    with capsys.disabled():
        print(f"\nStatus answers again after p50 {waits[RESTARTS // 2]:.2f} s, max {waits[-1]:.2f} s")  # noqa: T201


def _seconds_until_answering(server: Connection) -> float:
    started_s = time.monotonic()
    with Client(server, retry=RetryPolicy(total_s=0.0)) as client:
        while True:
            with suppress(AstraflowError):
                client.call(client.admin.Status, StatusRequest(run_id=RUN_ID), timeout_s=2.0)
                return time.monotonic() - started_s
            assert time.monotonic() - started_s < 60, "the server does not come back"
            time.sleep(0.02)
