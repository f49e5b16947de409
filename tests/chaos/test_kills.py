"""The loop survives every kill of the matrix: whatever died came back, and the audit finds nothing wrong.

Each run of the matrix is lived once, by the first of its cells that asks; the others look at its story.
"""

from collections.abc import Callable
from typing import NamedTuple

import pytest

from support.audit import Audit, audit
from support.chaos import ROLES, Kill, Story, run_kills
from support.kill_matrix import IN_CI, MATRIX

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

_TIER = {name: pytest.mark.ci if name in IN_CI else pytest.mark.soak for name in MATRIX}
RUNS = [pytest.param(name, marks=tier) for name, tier in _TIER.items()]
CELLS = [
    pytest.param(name, kill, id=f"{name}: {kill}", marks=_TIER[name])
    for name, kills in MATRIX.items()
    for kill in kills
]


class Lived(NamedTuple):
    """A run of the matrix that has ended."""

    story: Story
    audit: Audit


@pytest.fixture(scope="module")
def lived(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Lived]:
    """Live a run of the matrix, once; a run that failed fails every cell that asks for it."""
    ended: dict[str, Lived | BaseException] = {}

    def live(name: str) -> Lived:
        if name not in ended:
            folder = tmp_path_factory.mktemp(name.replace(" ", "-"))
            try:
                story = run_kills(folder, MATRIX[name])
                ended[name] = Lived(story, audit(folder))
            except BaseException as error:  # noqa: BLE001 - kept for the other cells, which raise it
                ended[name] = error
        found = ended[name]
        if isinstance(found, BaseException):
            raise AssertionError(f"the run {name!r} did not survive: {found}") from found
        return found

    return live


def test_ci_kills_every_process_in_at_least_thirty_windows() -> None:
    kills = [kill for name in IN_CI for kill in MATRIX[name]]
    assert len({(kill.failpoint, kill.victim) for kill in kills}) >= 30
    assert {kill.victim for kill in kills} == set(ROLES)


@pytest.mark.parametrize(("name", "kill"), CELLS)
def test_a_process_killed_in_the_window_comes_back(
    lived: Callable[[str], Lived], name: str, kill: Kill
) -> None:
    story = lived(name).story
    [death] = [death for death in story.deaths if death.hit and death.hit.name == kill.failpoint]
    assert death.hit is not None
    assert (death.hit.number, death.hit.acted, death.victim) == (kill.nth, True, kill.victim)
    assert story.came_back(death)


@pytest.mark.parametrize("name", RUNS)
def test_nothing_is_lost_nothing_is_trained_twice_and_no_version_is_torn(
    lived: Callable[[str], Lived], name: str
) -> None:
    run = lived(name)
    assert run.audit.violations == []
    assert run.story.summary["conservation_error"] == 0
    assert run.audit.figures["steps"] == run.story.summary["steps"] > 0


@pytest.mark.parametrize("name", RUNS)
def test_each_step_version_and_evaluation_has_one_line_of_metrics(
    lived: Callable[[str], Lived], name: str
) -> None:
    lines = lived(name).story.files.read_metrics()
    about = [
        (line["kind"], line["step"] if line["kind"] == "step" else line["version"], line.get("final"))
        for line in lines
    ]
    assert len(about) == len(set(about)) > 0
