"""Faults that are no clean death, in a loop that must survive them: processes that stand still, a Redis that refuses,
a store that is away, packets that vanish, clocks that jump.

`make soak T=tests/chaos/test_gray_failures.py` lives the whole table and writes its section of docs/results/chaos.md.
"""

import platform
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import pytest

from support.development import ROOT
from support.gray.faults import DAMAGES, FAULTS, Damage, Fault
from support.gray.ground import missing_tools
from support.gray.life import Lived, Row, live
from support.gray.losses import LOSSES, Loss, live_through
from support.gray.names import followed
from support.gray.resume import Resumes
from support.results_pages import replace_section

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(bool(missing_tools()), reason=missing_tools()),
    pytest.mark.timeout(900),
]

TABLE: Sequence[Fault | Damage | Loss] = (*FAULTS, *DAMAGES, *LOSSES)
IN_CI = [fault for fault in FAULTS if fault.in_ci]
_RESULTS = ROOT / "docs" / "results" / "chaos.md"
_SIDE_BY_SIDE = 3
_ABOUT = """Written by `make soak T=tests/chaos/test_gray_failures.py`. Each row is a fault that a running loop (server,
Valkey, trainer, node, engine, launcher; the quickstart in small) met and that was healed after a while; rows of one
loop met the same run, one after the other. *noticed* is how long after its beginning `astraflow why`, asked again and
again, and the launcher's lines said so, *lasted* when it was healed, *recovered* when two more steps were trained after
that. In the rows of `resume` loops a file was damaged while nothing ran: times count from the next launch to what it
said, to its first step and to its end. Where Redis lost data under a run the launch must end by itself; *recovered* is
what the same command took over a Redis that had them again. The audit is that of the kills above."""


@pytest.fixture(scope="module")
def lived(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Lived]:
    """Live the faults of a loop that CI has, once; a loop that failed fails every fault that asks for it."""
    ended: dict[str, Lived | BaseException] = {}

    def of(loop: str) -> Lived:
        if loop not in ended:
            folder = tmp_path_factory.mktemp(loop.replace(" ", "-"))
            try:
                ended[loop] = live(folder, [fault.name for fault in IN_CI if fault.loop == loop])
            except BaseException as error:  # noqa: BLE001 - kept for the other faults, which raise it
                ended[loop] = error
        found = ended[loop]
        if isinstance(found, BaseException):
            raise AssertionError(f"the loop {loop!r} did not survive: {found}") from found
        return found

    return of


def test_every_fault_has_a_name_of_its_own() -> None:
    names = [row.name for row in TABLE]
    assert len(names) == len(set(names))


@pytest.mark.ci
@pytest.mark.parametrize("fault", IN_CI, ids=lambda fault: fault.name)
def test_the_loop_trains_on_after(lived: Callable[[str], Lived], fault: Fault) -> None:
    [row] = [row for row in lived(fault.loop).rows if row.name == fault.name]
    assert row.wrong == []


@pytest.mark.ci
@pytest.mark.parametrize("loop", sorted({fault.loop for fault in IN_CI}))
def test_nothing_was_lost_doubled_or_torn(lived: Callable[[str], Lived], loop: str) -> None:
    assert lived(loop).violations == []


@pytest.mark.ci
@pytest.mark.parametrize("who", ["client", "loop"])
def test_the_name_of_a_server_is_followed_to_another_address(who: str, tmp_path: Path) -> None:
    assert followed(tmp_path, who) > 0


@pytest.mark.soak
@pytest.mark.timeout(5400)
def test_the_whole_table(tmp_path: Path) -> None:
    loops = list(dict.fromkeys(row.loop for row in TABLE))
    with ThreadPoolExecutor(_SIDE_BY_SIDE) as pool:
        found = list(pool.map(lambda loop: _live_all(tmp_path, loop), loops))
    replace_section(_RESULTS, "Gray failures: hangs, refusals, losses", _section(found))
    rows = [row for each in found for row in each.rows]
    assert {row.name: row.wrong for row in rows if row.wrong} == {}
    assert [violation for each in found for violation in each.violations] == []


def _live_all(folder: Path, loop: str) -> Lived:
    """The rows of a loop; one that did not survive is a row, too, and the others are written all the same."""
    try:
        return _live(folder / loop.replace(" ", "-").replace(":", ""), loop)
    except Exception as error:  # noqa: BLE001 - of whatever kind, it fails the test
        return Lived([Row(loop, wrong=[f"the loop did not survive: {error}"])], [], {})


def _live(home: Path, loop: str) -> Lived:
    if damages := [damage for damage in DAMAGES if damage.loop == loop]:
        return Resumes(home).live(damages)
    if losses := [loss for loss in LOSSES if loss.loop == loop]:
        return live_through(home, losses)
    return live(home, [fault.name for fault in FAULTS if fault.loop == loop])


def _section(found: Sequence[Lived]) -> str:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
    )
    rows = [row for each in found for row in each.rows]
    facts = [
        f"machine: {platform.machine()}, Python {platform.python_version()}; {_SIDE_BY_SIDE} loops side by side",
        f"date: {datetime.now(tz=UTC):%Y-%m-%d}, commit {commit.stdout.strip()}",
        f"faults: {len(rows)} in {len(found)} loops, of which CI meets {len(IN_CI)}; not as expected: "
        f"{sum(bool(row.wrong) for row in rows)}; violations: {sum(len(each.violations) for each in found)}",
    ]
    columns = ["fault", "lasted s", "noticed s", "what was said", "steps meanwhile", "recovered s"]
    columns += ["restarted", "violations"]
    table = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    table += [_line(row, len(each.violations)) for each in found for row in each.rows]
    return "\n".join([_ABOUT, "", *(f"* {fact}" for fact in facts), "", *table])


def _line(row: Row, violations: int) -> str:
    said = row.why_said or row.lines_said
    cells = [
        row.name,
        f"{row.lasted_s:.0f}",
        _seconds(row.lines_s if row.why_s is None else row.why_s),
        said.replace("|", "/"),
        row.steps_meanwhile,
    ]
    cells += [_seconds(row.recovered_s), ", ".join(row.restarted), violations]
    if row.wrong:
        cells[0] = f"{row.name} (not as expected: {'; '.join(wrong.splitlines()[0] for wrong in row.wrong)})"
    return f"| {' | '.join(str(cell) for cell in cells)} |"


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"
