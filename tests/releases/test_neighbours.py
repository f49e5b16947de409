"""Server, node and trainer of neighbouring releases: those of one contract train together. Any other is refused at its
first call, with status 3, what both speak and what to update; the server goes on.
"""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from astraflow.connecting.compatibility import CONTRACT_VERSION
from astraflow_kit.lifecycle import read_address_file
from astraflow_kit.releases import Release
from support.development import POLICY, RUN_ID, RunFiles, dev, finish, wait_for
from support.releases import THIS, Tree, checked_out, newest_of_each_contract

pytestmark = [pytest.mark.e2e, pytest.mark.ci, pytest.mark.timeout(300)]

STEPS = "2"
PARTS = ("server", "node", "trainer")


@contextmanager
def daemon(part: str, tree: Tree, files: RunFiles, address: str) -> Iterator[subprocess.Popen[bytes]]:
    """A node or the trainer of the run by the code of a release; ended by its own status, or by the block's end."""
    role, module = {"node": ("rollout", "astraflow_raas"), "trainer": ("trainer", "astraflow_trainer")}[part]
    work = files.folder / part
    options = {
        "node": ("--node-id", "node-1", "--mirror-dir", str(work / "mirror")),
        "trainer": ("--policy", POLICY, "--cache-dir", str(work / "cache"), "--steps", STEPS),
    }[part]
    command = [sys.executable, "-m", module, "--join", address, "--run-id", RUN_ID, "--allow-recipe-code"]
    command += [
        "--work-dir",
        str(work),
        "--token-file",
        str(files.data_dir / "secrets" / f"{role}.token"),
        *options,
    ]
    with (
        (files.folder / f"{part}.log").open("wb") as log,
        subprocess.Popen(
            command, env=tree.environment, stdout=log, stderr=log, start_new_session=True
        ) as process,
    ):
        try:
            yield process
        finally:
            process.terminate()


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
            part: stack.enter_context(daemon(part, trees[part], files, found.grpc))
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
