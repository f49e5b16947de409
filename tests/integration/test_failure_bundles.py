"""A failing test of daemons saves a bundle and says where: proven by a run that is made to fail."""

import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import redis

from support.source_tree import REPOSITORY
from support.valkey import ValkeyServer

FAILING = f"""
import subprocess, sys
import pytest

@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shared")
    command = [sys.executable, "-m", "astraflow.cli", "dev", {str(REPOSITORY / "recipes" / "quickstart")!r}]
    command += ["--data-dir", str(folder), "--without", "raas", "--without", "trainer", "--timeout", "1"]
    subprocess.run(command, check=True, capture_output=True)
    return folder

def test_that_passes(run):
    pass

def test_of_a_run_that_fails(run):
    assert "this run" == "a good run"

"""
CONFTEST = """
from support.failure_bundles import pytest_runtest_makereport, pytest_runtest_setup, pytest_terminal_summary
"""

pytestmark = [pytest.mark.integration, pytest.mark.slow]


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A project whose tests failed, and what pytest said."""
    project = tmp_path_factory.mktemp("project")
    (project / "pytest.ini").write_text("[pytest]\nmarkers =\n    e2e: x\n    chaos: x\n")
    (project / "conftest.py").write_text(CONFTEST)
    (project / "e2e").mkdir()
    (project / "e2e" / "test_run.py").write_text(FAILING)
    (project / "test_plain.py").write_text("def test_without_daemons():\n    assert False\n")
    paths = os.pathsep.join([str(REPOSITORY / "tests"), *filter(None, sys.path)])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["--basetemp", str(project / "tmp")]
    place = {"cwd": project, "env": os.environ | {"PYTHONPATH": paths}}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, **place)
    assert "2 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    return project, done.stdout


def test_the_failure_report_says_where_the_bundle_is(failed: tuple[Path, str]) -> None:
    project, said = failed
    [bundle] = (project / ".cache" / "failures").glob("*.tar.gz")
    report, _, summary = said.partition("support bundles of failed tests")
    assert "- support bundle -" in report
    assert str(bundle) in report
    assert str(bundle) in summary
    assert bundle.name.startswith("e2e-test_run.py-test_of_a_run_that_fails-")


def test_the_bundle_holds_the_report_the_logs_and_redis_data_that_a_server_opens(
    failed: tuple[Path, str], tmp_path: Path
) -> None:
    project, _ = failed
    [bundle] = (project / ".cache" / "failures").glob("*.tar.gz")
    with tarfile.open(bundle) as tar:
        tar.extractall(tmp_path, filter="data")
    [root] = tmp_path.iterdir()
    assert "'this run' == 'a good run'" in (root / "note.txt").read_text()
    for name in ("dataflow", "redis", "launcher"):
        assert (root / "logs" / f"{name}.log").stat().st_size > 0, name
    assert (root / "recipe.yaml").exists()
    assert "quickstart" in (root / "run.json").read_text()

    with ValkeyServer(root / "redis") as server, redis.Redis.from_url(server.url) as client:
        assert client.dbsize() > 0


def test_a_failing_test_without_daemons_saves_nothing(failed: tuple[Path, str]) -> None:
    project, _ = failed
    assert not list((project / ".cache" / "failures").glob("*test_plain*"))
