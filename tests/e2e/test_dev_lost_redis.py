"""A data dir whose Redis is gone, or came back older: refused, and nothing is deleted until a person decides."""

import shutil
from pathlib import Path

import pytest

from support.audit import audit
from support.chaos import cut_tail
from support.development import RUN_ID, RunFiles, dev, finish

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

STEPS = 6


def kept(folder: Path) -> dict[str, bytes]:
    """Everything that training made: store and checkpoints."""
    data = RunFiles(folder).data_dir
    roots = [data / "store" / RUN_ID, data / "work" / "trainer-solver" / "checkpoints"]
    return {str(path): path.read_bytes() for root in roots for path in root.rglob("*") if path.is_file()}


def require_refused(folder: Path, *said: str) -> None:
    """The same command ends with an error, which says this, and has changed nothing."""
    before = kept(folder)
    with dev(folder, "--steps", str(STEPS + 1)) as launcher:
        launcher.communicate(timeout=200)
    assert launcher.returncode == 3
    assert kept(folder) == before
    message = RunFiles(folder).stderr.read_text()
    assert [part for part in said if part not in message] == []


def train(folder: Path, *arguments: str, steps: int) -> None:
    """The run goes on to this step; no version is used twice, and no part goes."""
    parts = {name for name in kept(folder) if "/parts/" in name}
    with dev(folder, "--steps", str(steps), *arguments) as launcher:
        summary = finish(launcher, folder)
    assert (summary["steps"], summary["conservation_error"]) == (steps, 0)
    assert parts <= kept(folder).keys()
    versions = [line["version"] for line in RunFiles(folder).read_metrics("version")]
    assert versions == list(range(steps + 1))


def test_a_lost_redis_is_restored_or_its_loss_accepted(tmp_path: Path) -> None:
    train(tmp_path, steps=STEPS)
    assert audit(tmp_path).violations == []
    redis, copy = RunFiles(tmp_path).data_dir / "redis", tmp_path / "copy"
    shutil.move(redis, copy)
    remedies = "Restore that Redis, or accept the loss with --accept-data-loss"
    require_refused(
        tmp_path, "with checkpoints up to step 6, but the dataflow server has no such run", remedies
    )
    shutil.rmtree(redis)
    shutil.copytree(copy, redis)
    log = max(redis.glob("**/*.incr.aof"), key=lambda path: path.stat().st_mtime).read_bytes()
    of_the_run = len(log) - log.index(b"af:{quickstart}")  # before that comes what makes the functions
    cut_tail(redis, of_the_run // 2)
    require_refused(
        tmp_path, "Redis is older than the", "the newest checkpoint is of step 6", "--accept-data-loss"
    )
    shutil.rmtree(redis)
    shutil.move(copy, redis)
    train(tmp_path, steps=STEPS + 1)
    shutil.rmtree(redis)
    train(tmp_path, "--accept-data-loss", steps=STEPS + 3)
