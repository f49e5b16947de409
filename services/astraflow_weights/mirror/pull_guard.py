"""Protects the parts that a puller is about to fetch from being collected under its hands.

Invariant: a lease that names every part of the plan is in the store before the tombstones are read, so a round
of collection either finds the lease, or its tombstone is seen here and planned around. Without the right to
write there is no lease, only a message: a part that is then missing is one more path that proves bad. The
mirror owns one and calls `over` around each pull.
"""

import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from astraflow_kit.clock import Clock, SystemClock
from astraflow_kit.log import get_logger
from astraflow_weights.errors import Edge, NoPath, StoreRefused, Unavailable
from astraflow_weights.store import ObjectStore
from astraflow_weights.store.layout import PolicyKeys
from astraflow_weights.versions.collection_records import PullLease, encode_lease
from astraflow_weights.versions.log import VersionLog
from astraflow_weights.versions.manifest import NONCE_BYTES
from astraflow_weights.versions.planner import PullPlan
from astraflow_weights.versions.tombstones import Tombstones

log = get_logger(__name__)

LEASE_S = 1800.0
_RENEWALS = 3


class PullGuard:
    """One owner per object, one pull at a time.

    with guard.over(store, log):
        plan = guard.plan(lambda avoid: plan_pull(log, held=held, target=target, avoid=avoid))
        ...fetch what the plan names
    """

    def __init__(self, *, lease_s: float = LEASE_S, clock: Clock | None = None) -> None:
        self._lease_s = lease_s
        self._clock = clock or SystemClock()
        self._holder = secrets.token_bytes(NONCE_BYTES)
        self._count = 0
        self._open: _OpenGuard | None = None
        self._refused = False

    @contextmanager
    def over(self, store: ObjectStore, version_log: VersionLog) -> Iterator[None]:
        """While the block runs, what `plan` returned last is protected; renewed by a thread if it takes long."""
        guard = _OpenGuard(store, version_log)
        self._open = guard
        ended = threading.Event()
        renewing = threading.Thread(
            target=self._renew, args=(guard, ended), name="weights-lease", daemon=True
        )
        renewing.start()
        try:
            yield
        finally:
            ended.set()
            renewing.join()
            self._open = None
            self._end(guard)

    def plan(
        self, make: Callable[[frozenset[Edge]], PullPlan], *, avoid: frozenset[Edge] = frozenset()
    ) -> PullPlan:
        """The plan of `make`, leased, around paths with a part that is about to be collected.

        `make` takes the paths to avoid. Where every path has such a part, the best of them is returned: it may
        still be there. Raises as `make` does for `avoid` itself.
        """
        assert self._open is not None
        plan = make(avoid)
        while doomed := self._doomed(self._open, plan):
            avoid |= doomed
            try:
                plan = make(avoid)
            except NoPath:
                return plan
        return plan

    def _doomed(self, guard: "_OpenGuard", plan: PullPlan) -> frozenset[Edge]:
        """Announce the plan; the steps of it that a tombstone seen afterwards names."""
        parts = frozenset(part.sha256 for step in plan.steps for part in step.parts)
        if not parts:
            return frozenset()
        with guard.lock:
            guard.parts = parts
            self._write(guard)
        guard.tombstones.refresh()
        names = guard.tombstones.names
        return frozenset(step.edge for step in plan.steps if any(part.sha256 in names for part in step.parts))

    def _write(self, guard: "_OpenGuard") -> None:
        """Write the next lease, then delete the one before. What fails is logged once, and the pull goes without."""
        if self._refused:
            return
        lease = PullLease(
            holder=self._holder,
            parts=guard.parts,
            expires_time_s=self._clock.wall_time_s() + self._lease_s,
        )
        key = guard.keys.lease(self._holder, self._count)
        self._count += 1
        try:
            guard.store.put_if_absent(key, encode_lease(guard.keys, lease))
        except StoreRefused as error:
            self._refused = True
            log.warning("pull_lease.refused", message=str(error))
            return
        except Unavailable as error:
            log.warning("pull_lease.not_written", message=str(error))
            return
        _delete(guard)
        guard.key = key

    def _renew(self, guard: "_OpenGuard", ended: threading.Event) -> None:
        while not ended.wait(self._lease_s / _RENEWALS):
            with guard.lock:
                if guard.key:
                    self._write(guard)

    def _end(self, guard: "_OpenGuard") -> None:
        with guard.lock:
            _delete(guard)


class _OpenGuard:
    """One pull: its store and log, and the lease that is in the store, if there is one."""

    def __init__(self, store: ObjectStore, version_log: VersionLog) -> None:
        self.store = store
        self.keys = PolicyKeys(version_log.run_id, version_log.policy_id)
        self.tombstones = Tombstones(store, keys=self.keys)
        self.lock = threading.Lock()
        self.parts: frozenset[bytes] = frozenset()
        self.key = ""


def _delete(guard: _OpenGuard) -> None:
    """Delete the lease in the store; one that stays ends by itself."""
    if not guard.key:
        return
    try:
        guard.store.delete(guard.key)
    except (StoreRefused, Unavailable) as error:
        log.warning("pull_lease.not_deleted", key=guard.key, message=str(error))
    guard.key = ""
