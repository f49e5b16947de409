"""A run whose episodes need a node, an engine, a served environment and agent programs, each killed again and again.

`make soak T=tests/chaos/test_busy_kills.py` kills each 50 times and writes docs/results/kills.md.
"""

import platform
import time
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

import pytest

from support.audit import Audit, audit
from support.chaos import BUSY_ROLES, Story, run_busy_kills
from support.development import ROOT

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(5400)]

_RESULTS = ROOT / "docs" / "results" / "kills.md"
ABOUT = """# A node, its engine, its environment and its agents, killed at random

Written by `make soak T=tests/chaos/test_busy_kills.py`. Every second task of the run is played by an agent program that
talks to the node's OpenAI-compatible address, the others in an environment that is served by a process of its own. Each
kind of process is SIGKILLed at random instants (of the environment the service or a worker; of the agents one that
runs), and started again by whoever started it. The audit compares the node's journal, Redis, the trainer's ledger, the
accounts and the store: nothing acknowledged is lost, nothing is trained twice.
"""


@pytest.mark.parametrize(
    "kills_each",
    [pytest.param(3, marks=pytest.mark.ci), pytest.param(50, marks=pytest.mark.soak)],
    ids="{} kills each".format,
)
def test_nothing_is_lost_or_trained_twice_whatever_of_an_episode_is_killed(
    tmp_path: Path, kills_each: int
) -> None:
    started_s = time.monotonic()
    story = run_busy_kills(tmp_path, seed=1, kills=dict.fromkeys(BUSY_ROLES, kills_each))
    found = audit(tmp_path)
    assert found.violations == []
    assert story.summary["conservation_error"] == 0
    assert Counter(death.victim for death in story.deaths) == dict.fromkeys(BUSY_ROLES, kills_each)
    if kills_each >= 50:
        _RESULTS.write_text(_page(story, found, wall_s=time.monotonic() - started_s))


def _page(story: Story, found: Audit, *, wall_s: float) -> str:
    kills, figures = Counter(death.victim for death in story.deaths), found.figures
    account = story.summary["trajectories"]
    names = ("pushed", "trained", "dropped", "steps", "versions")
    facts = [
        f"machine: {platform.machine()}, Python {platform.python_version()}",
        f"date: {datetime.now(tz=UTC):%Y-%m-%d}, {wall_s:.0f} s",
        f"kills: {', '.join(f'{role} {kills[role]}' for role in BUSY_ROLES)}",
        f"trajectories and steps: {', '.join(f'{name} {figures[name]}' for name in names)}",
        f"lost: {account['conservation_error']}; violations: {len(found.violations)}",
    ]
    return "\n".join([ABOUT, *(f"* {fact}" for fact in facts), ""])
