"""The stateful test finds bugs: whichever of a list is planted, servers and model disagree.

`make soak T=tests/integration/test_planted_bugs.py` writes docs/results/planted-bugs.md when all of them were found.
"""

import platform
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from support.planted_bugs import BUGS, REPOSITORY, Bug, Found, disagreement

IN_CI = ("an old trainer is not fenced", "a settled group keeps its credit")
PARAMETERS = [
    pytest.param(bug, id=bug.name, marks=pytest.mark.ci if bug.name in IN_CI else pytest.mark.soak)
    for bug in BUGS
]
RESULTS = REPOSITORY / "docs" / "results" / "planted-bugs.md"
ABOUT = """# Bugs that are planted, and found

Written by `make soak T="tests/integration/test_planted_bugs.py -m 'ci or soak'"`. Each bug of
[a list](../../tests/support/planted_bugs.py) is planted in a copy of the services, and two servers are called, by
[a fixed tour](../../tests/support/dataflow_tour.py) of some 150 calls and then by Hypothesis, until they and
[a model](../../tests/support/dataflow_model.py) disagree. *found by* is the call whose answer was another one, or `all
is where the model has it`, which counts trajectories, credit and leases after each call; *calls* are those until then.
"""


@pytest.fixture(scope="module")
def report() -> Iterator[dict[str, Found]]:
    """What was found; written when all of the list was."""
    found: dict[str, Found] = {}
    yield found
    if found.keys() == {bug.name for bug in BUGS}:
        RESULTS.write_text(page(found))


def page(found: dict[str, Found]) -> str:
    """The page of results."""
    facts = f"{platform.machine()}, Python {platform.python_version()}, {datetime.now(tz=UTC):%Y-%m-%d}"
    table = ["| bug | in | found by | calls | CPU s |", "|---|---|---|---|---|"]
    for bug in BUGS:
        by = found[bug.name]
        table.append(
            f"| {bug.name} | `{Path(bug.file).name}` | {by.call} | {by.num_calls:,} | {by.cpu_s:.0f} |"
        )
    return "\n".join([ABOUT, f"* {len(found)} bugs, all found; {facts}", "", *table, ""])


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_the_text_that_a_bug_replaces_is_there_once(bug: Bug) -> None:
    assert (REPOSITORY / "services" / bug.file).read_text().count(bug.found) == 1


@pytest.mark.timeout(1900)
@pytest.mark.parametrize("bug", PARAMETERS)
def test_a_planted_bug_is_found(bug: Bug, tmp_path: Path, report: dict[str, Found]) -> None:
    found = disagreement(bug, tmp_path)
    assert found is not None, "servers and model agree"
    report[bug.name] = found
