"""Server, node and trainer of neighbouring releases: those of one contract train together. Any other is refused at its
first call, with status 3, what both speak and what to update; the server goes on.
"""

import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest

from astraflow.connecting.compatibility import CONTRACT_VERSION
from astraflow_kit.lifecycle import read_address_file
from astraflow_kit.releases import Release
from support.development import RunFiles, beside, dev, finish, wait_for
from support.releases import THIS, checked_out, newest_of_each_contract

pytestmark = [pytest.mark.e2e, pytest.mark.ci, pytest.mark.timeout(300)]

STEPS = "2"
PARTS = ("server", "node", "trainer")
_OPTIONS = {"node": (), "trainer": ("--steps", STEPS)}


def require_refused(process: subprocess.Popen[bytes], log: Path) -> None:
    """It ended by itself, with what somebody must do."""
    assert process.wait(timeout=60) == 3, log.read_text()
    said = log.read_text()
    assert "INCOMPATIBLE" in said
    assert "speaks contract version" in said
    assert "update the " in said


@pytest.mark.parametrize("earlier", PARTS)
@pytest.mark.parametrize("release", newest_of_each_contract(), ids=str)
def test_parts_of_two_releases_work_together_or_say_which_one_to_update(
    release: Release, earlier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = RunFiles(tmp_path)
    with ExitStack() as stack:
        tree = stack.enter_context(checked_out(release, tmp_path))
        trees = {part: tree if part == earlier else THIS for part in PARTS}
        monkeypatch.setenv("PYTHONPATH", trees["server"].paths)
        without = ("--without", "raas", "--without", "trainer")
        launcher = stack.enter_context(dev(tmp_path, "--steps", STEPS, *without, recipe=THIS.recipe))
        server = files.addresses / "dataflow.json"
        wait_for(lambda: read_address_file(server), what="the server's start")
        found = read_address_file(server)
        assert found is not None
        others = [part for part in PARTS[1:] if trees[part] != trees["server"]]
        works = release.contract == CONTRACT_VERSION
        started = {
            part: stack.enter_context(
                beside(part, files, found.grpc, *_OPTIONS[part], environment=trees[part].environment)
            )
            for part in (PARTS[1:] if works else others)
        }
        if works:
            trajectories = finish(launcher, tmp_path)["trajectories"]
            assert (trajectories["trained"], trajectories["conservation_error"]) == (16, 0)
            assert started["trainer"].wait(timeout=60) == 0, (tmp_path / "trainer.log").read_text()
            return
        for part, process in started.items():
            require_refused(process, tmp_path / f"{part}.log")
        assert launcher.poll() is None, "the server goes on"
