"""Publishers, compactors, collectors, pullers and engines of one policy as processes, to run together and be killed.

Every version's model follows from its number, so any process and any test can tell what it must hold. Used by the
tests of kills; the processes run this file.
"""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

from astraflow_kit import failpoints
from astraflow_kit.settings import load as load_settings
from astraflow_weights.codec.digest import model_root
from astraflow_weights.codec.tensor_hash import tensor_digests
from astraflow_weights.codec.tensors import Array
from astraflow_weights.collection.collector import Collector, Stage
from astraflow_weights.collection.retention import Roots
from astraflow_weights.daemon_settings import StoreAccess
from astraflow_weights.mirror.checkpoint import map_model
from astraflow_weights.mirror.lock import try_hold
from astraflow_weights.mirror.mirror import Mirror
from astraflow_weights.settings import PublishSettings
from astraflow_weights.store import ObjectStore, open_store
from astraflow_weights.versions.inspection import build_version
from support.development import wait_for
from support.published_models import ModelPublisher, new_collector, new_compactor, open_writer, read_log
from support.weight_models import make_model, same_model, trained

SETTINGS = PublishSettings(snapshot_every_versions=4, snapshot_chain_ratio=100, checkpoint_every_entries=6)
PINNED = 2
PATIENCE_S = 300.0
MANY = 100_000
_ROWS = 12_000
"""About 2.5 MB of weights."""


@lru_cache(maxsize=8)
def model_of(version: int) -> dict[str, Array]:
    """The model of a version; do not change it."""
    return trained(model_of(0), version, density=0.02) if version else make_model(rows=_ROWS)


@lru_cache(maxsize=1000)
def root_of(version: int) -> bytes:
    """The model root that the version's manifest must have."""
    return model_root(tensor_digests(model_of(version)))


def publish(store: ObjectStore, *, epoch: int, versions: int = MANY, collecting: bool = False) -> None:
    """Fence, take up the newest version, and publish until there are so many versions; merged deltas and snapshots are
    made beside it, as in a trainer, and what nobody needs is collected if told so.
    """
    writer = open_writer(store, epoch=epoch, settings=SETTINGS)
    newest = writer.log.latest()
    base = None if newest is None else build_version(store, writer.log, target=newest.version, threads=2)
    publisher = ModelPublisher(writer, base=base, inline_snapshots=False)
    collector = collector_of(store) if collecting else None
    with new_compactor(store, kept=publisher.kept, settings=SETTINGS, collector=collector) as compactor:
        while (version := len(writer.log.records)) < versions:
            publisher.publish(model_of(version), step=version)
            compactor.notify()


def collector_of(store: ObjectStore) -> Collector:
    """A collector without a grace."""
    return new_collector(store, None, lambda: Roots(pinned=frozenset([PINNED])), grace_s=0)


def collect(store: ObjectStore, *, versions: int) -> None:
    """Collect until there are so many versions and nothing is left to collect."""
    collector = collector_of(store)
    while collector.step().stage is not Stage.NOTHING or len(read_log(store).records) < versions:
        pass


def pull(store: ObjectStore, folder: Path, *, seed: int) -> None:
    """Go from version to version at random until killed."""
    draw, log, mirror = random.Random(seed), read_log(store), Mirror(folder / "mirror")
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
    with running(folder, "load") as process:
        yield
        assert process.poll() is None, f"it ended by itself with {process.returncode}: see its output"


def start(
    task: str,
    uri: str,
    folder: Path,
    *,
    number: int = 0,
    versions: int = MANY,
    spec: str = "",
    environment: Mapping[str, str] | None = None,
) -> subprocess.Popen[str]:
    """Start a process of this file, with failpoints, and wait until it has begun its work."""
    inherited = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **(environment or {})}
    command = [sys.executable, __file__, task, uri, str(folder), str(number), str(versions), spec]
    process = subprocess.Popen(command, env=inherited, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout as said:
        assert said.readline() == "ready\n"
    return process


def require_killed(process: subprocess.Popen[str], folder: Path) -> None:
    """It died at its failpoint, not of something else."""
    assert process.wait(PATIENCE_S) == -signal.SIGKILL
    assert any(hit.acted for hit in failpoints.read_hits(folder / "hits")), "the failpoint was not hit"


def kill_after(
    folder: Path, task: str, number: int, *, delay_s: float, once: Callable[[], bool] = lambda: True
) -> None:
    """Start a process over the store in a folder and kill it so long after it began its work and `once` held."""
    with running(folder, task, number) as process:
        wait_for(once, what="what the kill waits for", timeout_s=PATIENCE_S, period_s=0)
        time.sleep(delay_s)
        assert process.poll() is None, f"it ended by itself with {process.returncode}"
        process.kill()
    assert process.returncode == -signal.SIGKILL


@contextmanager
def running(folder: Path, task: str, number: int = 0) -> Iterator[subprocess.Popen[str]]:
    """A process over the store in a folder; it does not outlive the block."""
    process = start(task, (folder / "store").as_uri(), folder, number=number)
    try:
        yield process
    finally:
        process.kill()
        process.wait(PATIENCE_S)


def check_mirror(mirror: Mirror) -> None:
    """Whatever version it holds, it holds it to the last bit."""
    if mirror.version is not None:
        assert same_model(mirror.load(), model_of(mirror.version)), f"version {mirror.version} is damaged"


def main() -> None:
    """Publish, collect, compact, pull, go to one version, or load."""
    task, uri, folder, number, versions, spec = sys.argv[1:]
    failpoints.arm(spec, log_path=Path(folder) / "hits")
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    os.dup2(2, 1)  # whoever started this reads no more
    store = open_store(uri, settings=load_settings(StoreAccess).store)
    if task in ("publish", "publish-only"):
        publish(store, epoch=int(number), versions=int(versions), collecting=task == "publish")
    elif task == "collect":
        collect(store, versions=int(versions))
    elif task == "compact":
        new_compactor(store, kept=None).compact()
    elif task == "advance":
        Mirror(Path(folder) / "mirror").advance(store, read_log(store), target=int(number))
    elif task == "pull":
        pull(store, Path(folder), seed=int(number))
    else:
        load(Path(folder))


if __name__ == "__main__":
    main()
