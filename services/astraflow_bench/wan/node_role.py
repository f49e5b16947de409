"""A node of the experiment: follows versions in mirrors, and fetches whole files as peers do.

Invariant: what it says was verified is held by `Mirror`. Started by `experiment` as a process; see `messages`.
"""

import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from astraflow_bench.wan import messages
from astraflow_weights.mirror.mirror import Mirror
from astraflow_weights.settings import StoreSettings
from astraflow_weights.store import ObjectStore, open_store
from astraflow_weights.versions.log import VersionLog


class Node:
    """One mirror at a time; one of another name starts empty."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._folder = Path(settings["folder"])
        self._folder.mkdir(parents=True)
        self._settings = settings
        self._store = self._connected()
        self._run, self._policy = settings["run_id"], settings["policy_id"]
        self._log = self._new_log()
        self._mirror: Mirror | None = None
        self._name = ""

    def reconnect(self) -> None:
        """Begin anew with connections whose windows have not opened yet."""
        self._store = self._connected()
        self._log = self._new_log()
        messages.say("reconnected")

    def advance(self, *, mirror: str, version: int) -> None:
        """Hold the version, verified."""
        started = time.monotonic()
        if mirror != self._name:
            # A node that starts knows nothing of the log either.
            self._mirror = None
            if self._name:
                shutil.rmtree(self._folder / self._name)
            self._name, self._log = mirror, self._new_log()
        if self._mirror is None:
            self._mirror = Mirror(self._folder / mirror)
        held = self._mirror
        before = held.counts
        self._log.refresh()
        refreshed = time.monotonic()
        held.advance(self._store, self._log, target=version)
        ended = time.monotonic()
        counts = held.counts
        messages.say(
            "advanced",
            version=held.version,
            ended_s=ended,
            refresh_s=refreshed - started,
            advance_s=ended - refreshed,
            fetched_bytes=counts.fetched_bytes - before.fetched_bytes,
            snapshots=counts.snapshots_fetched - before.snapshots_fetched,
            deltas=counts.deltas_fetched - before.deltas_fetched,
        )

    def describe(self, *, since: int, version: int) -> None:
        """Sizes of the paths that the log offers, as the trainer made them."""
        self._log.refresh()
        records = self._log.records[since + 1 : version + 1]
        merged = [way.size_bytes for way in self._log.record(version).added if way.base_version == since]
        snapshots = [part for record in records for part in (record.offered_snapshot or ())]
        messages.say(
            "described",
            delta_bytes=[record.delta_bytes for record in records],
            merged_bytes=merged[0] if merged else None,
            snapshot_bytes=sum(part.size_bytes for part in snapshots),
            density=[record.density for record in records],
        )

    def fetch(self, *, key: str) -> None:
        """Fetch an object to a file and forget it, as a system without versions does."""
        path = self._folder / "model.safetensors"
        path.write_bytes(self._store.get(key))
        ended, size = time.monotonic(), path.stat().st_size
        path.unlink()
        messages.say("fetched", ended_s=ended, fetched_bytes=size)

    def _connected(self) -> ObjectStore:
        settings = StoreSettings(**self._settings["store_settings"])
        return open_store(self._settings["store"], settings=settings)

    def _new_log(self) -> VersionLog:
        return VersionLog(self._store, run_id=self._run, policy_id=self._policy)


def main() -> None:
    """Work until the orders end."""
    messages.take_stdout()
    orders = messages.orders()
    node = Node(next(orders))
    messages.say("ready")
    for order in orders:
        getattr(node, order.pop("do"))(**order)


if __name__ == "__main__":
    main()
