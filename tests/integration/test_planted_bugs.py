"""The stateful test finds bugs: whichever of a list is planted, servers and model disagree."""

from pathlib import Path

import pytest

from support.planted_bugs import BUGS, REPOSITORY, Bug, disagreement

IN_CI = ("an old trainer is not fenced", "a settled group keeps its credit")
PARAMETERS = [
    pytest.param(bug, id=bug.name, marks=pytest.mark.ci if bug.name in IN_CI else pytest.mark.soak)
    for bug in BUGS
]


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_the_text_that_a_bug_replaces_is_there_once(bug: Bug) -> None:
    assert (REPOSITORY / "services" / bug.file).read_text().count(bug.found) == 1


@pytest.mark.timeout(1900)
@pytest.mark.parametrize("bug", PARAMETERS)
def test_a_planted_bug_is_found(bug: Bug, tmp_path: Path) -> None:
    assert "AssertionError" in disagreement(bug, tmp_path)
