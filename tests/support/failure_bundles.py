"""Saves a support bundle for every failing test that runs daemons, and says where it is in the failure's report.

A pytest plugin, used by tests/conftest.py. Bundles lie in `.cache/failures` of the repository, which git
ignores; only the newest are kept. What a test left is found by time: folders below pytest's temporary folder
with logs written since the test's file began.
"""

import re
import time
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from astraflow.client import Connection

SECTION = "support bundle"
FOLDER = Path(".cache") / "failures"
_WATCHED = frozenset({"e2e", "chaos"})
_MAX_FOLDERS = 3
_MAX_BUNDLES = 20
_began: dict[Path, float] = {}


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Note when the tests of a file began: their shared fixtures belong to each of them."""
    _began.setdefault(item.path, time.time())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Save a bundle when a test of daemons fails, while what it started may still answer."""
    report = yield
    if report.failed and report.when != "teardown" and runs_daemons(item):
        report.sections.append((SECTION, _saved(item, report)))
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say once more, near the end of a long output, where the bundles are: CI shows the end first."""
    reports = [*terminalreporter.stats.get("failed", []), *terminalreporter.stats.get("error", [])]
    sections = [section for report in reports for section in getattr(report, "sections", [])]
    bundles = [text for title, text in sections if title == SECTION]
    if bundles:
        terminalreporter.section("support bundles of failed tests")
        for bundle in bundles:
            terminalreporter.line(bundle)


def runs_daemons(item: pytest.Item) -> bool:
    """Whether a test stands in a folder of such tests, or is marked as one."""
    return bool(_WATCHED & set(item.path.parts)) or any(item.get_closest_marker(name) for name in _WATCHED)


def _saved(item: pytest.Item, report: pytest.TestReport) -> str:
    """What the report says: the bundle's path, or why there is none."""
    # Imported when a test failed: they would make every start of pytest half a second longer.
    from astraflow_launcher.support.bundle import Evidence, save_bundle

    folder = item.config.rootpath / FOLDER
    name = re.sub(r"[^\w.-]+", "-", item.nodeid.removeprefix("tests/")).strip("-")[-100:]
    path = folder / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}.tar.gz"
    folders = left_behind(item)
    note = f"{item.nodeid} failed:\n\n{report.longreprtext}\n"
    evidence = Evidence(folders=folders, server=_server(folders), note=note)
    try:
        save_bundle(evidence, path)
    except Exception as error:  # noqa: BLE001 - the test's own failure must be what is reported
        return f"no bundle was saved: {type(error).__name__}: {error}"
    for old in sorted(folder.glob("*.tar.gz"), key=lambda found: found.stat().st_mtime)[:-_MAX_BUNDLES]:
        old.unlink(missing_ok=True)
    return str(path)


def left_behind(item: pytest.Item) -> tuple[Path, ...]:
    """The folders with logs written since the test's file began, newest first."""
    factory: pytest.TempPathFactory = item.config._tmp_path_factory  # type: ignore[attr-defined]
    began_s = _began.get(item.path, 0.0)
    written = {
        folder: _newest_log_s(folder)
        for folder in factory.getbasetemp().iterdir()
        if folder.is_dir() and not folder.is_symlink()
    }
    recent = [folder for folder, log_s in written.items() if log_s >= began_s]
    return tuple(sorted(recent, key=lambda folder: -written[folder])[:_MAX_FOLDERS])


def _newest_log_s(folder: Path) -> float:
    return max((path.stat().st_mtime for path in folder.rglob("*.log") if path.is_file()), default=-1.0)


def _server(folders: tuple[Path, ...]) -> "Connection | None":
    """The server of a run that still lives, if there is one."""
    from astraflow.commands.server import server_of_folder
    from astraflow.connecting.connection import DialFiles
    from astraflow.errors import AstraflowError

    for folder in folders:
        for run in folder.rglob("run.json"):
            try:
                return server_of_folder(run.parent).connection(DialFiles())
            except AstraflowError:
                continue  # it has ended; the bundle's index says so
    return None
