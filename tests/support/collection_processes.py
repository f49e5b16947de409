"""Publishers and collectors over one store as processes of their own, to run at the same time and to be killed.

Every version's model follows from its number. Used by the tests of collection; the processes run this file.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from astraflow_kit import failpoints
from astraflow_kit.failpoints import read_hits
from astraflow_kit.settings import load
from astraflow_weights.codec.digest import model_root
from astraflow_weights.codec.tensor_hash import tensor_digests
from astraflow_weights.codec.tensors import Array
from astraflow_weights.collection.collector import Collector, Stage
from astraflow_weights.collection.retention import Roots
from astraflow_weights.daemon_settings import StoreAccess
from astraflow_weights.publish.compactor import Compactor
from astraflow_weights.settings import CollectionSettings, PublishSettings
from astraflow_weights.store import ObjectStore, open_store
from astraflow_weights.versions.inspection import build_version
from support.published_models import ModelPublisher, open_writer, read_log
from support.weight_models import POLICY, RUN, make_model, trained

SETTINGS = PublishSettings(snapshot_every_versions=4, snapshot_chain_ratio=100)
PINNED = 2
PATIENCE_S = 300.0


@lru_cache(maxsize=200)
def model_of(version: int) -> dict[str, Array]:
    """The model of a version; do not change it."""
    return trained(model_of(0), version, density=0.02) if version else make_model()


def root_of(version: int) -> bytes:
    """The model root that the version's manifest must have."""
    return model_root(tensor_digests(model_of(version)))


def publish(store: ObjectStore, *, epoch: int, versions: int, collecting: bool = True) -> None:
    """Fence, take up the newest version, and publish until there are so many versions, with a compactor beside, which
    collects unless told not to.
    """
    writer = open_writer(store, epoch=epoch, settings=SETTINGS)
    newest = writer.log.latest()
    base = None if newest is None else build_version(store, writer.log, target=newest.version, threads=2)
    publisher = ModelPublisher(writer, base=base, inline_snapshots=False)
    with Compactor(
        store,
        run_id=RUN,
        policy_id=POLICY,
        kept=publisher.kept,
        settings=SETTINGS,
        collector=collector_of(store) if collecting else None,
    ) as compactor:
        while (version := len(writer.log.records)) < versions:
            publisher.publish(model_of(version), step=version)
            compactor.notify()


def collector_of(store: ObjectStore) -> Collector:
    """A collector without a grace."""
    return Collector(
        store,
        run_id=RUN,
        policy_id=POLICY,
        roots=lambda: Roots(pinned=frozenset([PINNED])),
        settings=CollectionSettings(keep_snapshots=2, grace_s=0),
    )


def collect(store: ObjectStore, *, versions: int) -> None:
    """Collect until there are so many versions and nothing is left to collect."""
    collector = collector_of(store)
    while collector.step().stage is not Stage.NOTHING or len(read_log(store).records) < versions:
        pass


def start(
    uri: str,
    task: str,
    *,
    epoch: int,
    versions: int,
    environment: Mapping[str, str],
    spec: str = "",
    hits: Path,
) -> subprocess.Popen[bytes]:
    """Start a process of this file, with failpoints."""
    inherited = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment}
    command = [sys.executable, __file__, uri, task, str(epoch), str(versions), spec, str(hits)]
    return subprocess.Popen(command, env=inherited)


def require_killed(process: subprocess.Popen[bytes], hits: Path) -> None:
    """It died at its failpoint, not of something else."""
    assert process.wait(PATIENCE_S) == -signal.SIGKILL
    assert any(hit.acted for hit in read_hits(hits)), "the failpoint was not hit"


def main() -> None:
    """Publish or collect."""
    uri, task, epoch, versions, spec, hits = sys.argv[1:]
    failpoints.arm(spec, log_path=Path(hits))
    store = open_store(uri, settings=load(StoreAccess).store)
    if task == "publish":
        publish(store, epoch=int(epoch), versions=int(versions))
    else:
        collect(store, versions=int(versions))


if __name__ == "__main__":
    main()
