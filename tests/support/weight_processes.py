"""A publisher and a puller of weights as processes of their own, to be killed, and what they must leave behind.

Every version's model follows from its number, so any process and any test can tell what it must hold. Used by the
tests of kills; the processes run this file.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

from astraflow_weights.codec.digest import model_root
from astraflow_weights.codec.tensor_hash import tensor_digests
from astraflow_weights.codec.tensors import Array
from astraflow_weights.mirror.checkpoint import map_model
from astraflow_weights.mirror.lock import try_hold
from astraflow_weights.mirror.mirror import Mirror
from astraflow_weights.publish.compactor import Compactor
from astraflow_weights.settings import PublishSettings
from astraflow_weights.store.file import FileStore
from support.published_models import ModelPublisher, open_writer, read_log
from support.weight_models import POLICY, RUN, make_model, same_model, trained

_ROWS = 12_000
"""About 2.5 MB of weights."""
SETTINGS = PublishSettings(snapshot_every_versions=6, snapshot_chain_ratio=100)


@lru_cache(maxsize=8)
def model_of(version: int) -> dict[str, Array]:
    """The model of a version; do not change it."""
    if version == 0:
        return make_model(rows=_ROWS)
    return trained(model_of(0), version, density=0.02)


@lru_cache(maxsize=1000)
def root_of(version: int) -> bytes:
    """The model root that the version's manifest must have."""
    return model_root(tensor_digests(model_of(version)))


def publish(folder: Path, *, epoch: int, versions: int | None = None) -> None:
    """Fence, take up the newest version, and publish until killed, or until there are so many versions; merged
    deltas and snapshots are made beside it, as in a trainer.
    """
    store = FileStore(folder / "store")
    writer = open_writer(store, epoch=epoch, settings=SETTINGS)
    newest = writer.log.latest()
    base = None
    if newest is not None:
        mirror = Mirror(folder / "publisher")
        mirror.advance(store, writer.log, target=newest.version)
        base = mirror.load()
    publisher = ModelPublisher(writer, base=base, inline_snapshots=False)
    compactor = Compactor(store, run_id=RUN, policy_id=POLICY, kept=publisher.kept, settings=SETTINGS)
    with compactor:
        while versions is None or len(writer.log.records) < versions:
            version = len(writer.log.records)
            publisher.publish(model_of(version), step=version)
            compactor.notify()


def pull(folder: Path, *, seed: int) -> None:
    """Go from version to version at random until killed."""
    store, draw = FileStore(folder / "store"), random.Random(seed)
    log, mirror = read_log(store), Mirror(folder / "mirror")
    while True:
        mirror.advance(store, log, target=draw.randrange(len(log.records)))


def load(folder: Path) -> None:
    """Load what the mirror holds as an engine does, again and again until killed; ends by itself when it is torn."""
    while True:
        held = try_hold(folder / "mirror")
        if held is None:
            time.sleep(0.001)
            continue
        root = model_root(tensor_digests(map_model(held.directory)))
        assert root == root_of(held.version), f"version {held.version} was loaded torn"
        held.release()


@contextmanager
def loading(folder: Path) -> Iterator[None]:
    """An engine that loads all the time beside the block. Raises AssertionError when it met a torn version."""
    with _process(folder, "load", "0") as process:
        yield
        assert process.poll() is None, f"it ended by itself with {process.returncode}: see its output"
        process.kill()


def kill_after(
    folder: Path, *arguments: str, delay_s: float, once: Callable[[], bool] = lambda: True
) -> None:
    """Start a process of this file and kill it so long after it began its work and `once` held."""
    with _process(folder, *arguments) as process:
        patience_s = time.monotonic() + 30
        while not once():
            assert time.monotonic() < patience_s, "what the kill waits for never happened"
        time.sleep(delay_s)
        assert process.poll() is None, f"it ended by itself with {process.returncode}"
        process.kill()
    assert process.returncode == -signal.SIGKILL


@contextmanager
def _process(folder: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A process of this file that has begun its work; it does not outlive the block."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, __file__, str(folder), *arguments]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


def check_mirror(mirror: Mirror) -> None:
    """Whatever version it holds, it holds it to the last bit."""
    if mirror.version is not None:
        assert same_model(mirror.load(), model_of(mirror.version)), f"version {mirror.version} is damaged"


def main() -> None:
    """Publish, pull or load."""
    folder, task, number = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    if task == "publish":
        publish(folder, epoch=number)
    elif task == "pull":
        pull(folder, seed=number)
    else:
        load(folder)


if __name__ == "__main__":
    main()
