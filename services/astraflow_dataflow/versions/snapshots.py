"""Announcing the versions of policies that are snapshots of trained ones.

Invariant: what a pool may draw is pinned before it is announced, and what has left it is unpinned afterwards; pins that
an operator made stay. Every call is idempotent, so each server may make it. Called by the run loop.
"""

from dataclasses import dataclass

from astraflow.dataflow.v1 import version_pb2
from astraflow.recipe.model import SnapshotSettings
from astraflow_dataflow.rules.snapshots import drawn, kept, newest_draw
from astraflow_dataflow.runs.registry import RunContext
from astraflow_dataflow.store.store import Store
from astraflow_kit.log import get_logger

log = get_logger(__name__)

PIN_REASON = "a snapshot policy may play it"


@dataclass(frozen=True)
class Snapshots:
    """Keeps the snapshot policies of runs at their newest draw."""

    store: Store

    async def announce(self, context: RunContext) -> None:
        """Announce every draw that is due and keep its versions. `context.newest_versions` is fresh."""
        snapshots = context.recipe.snapshots
        for of in sorted({settings.of for settings in snapshots.values()}):
            newest = context.newest_versions.get(of, -1)
            if newest < 0:
                continue
            stale = await self._pin(context, of, kept(snapshots, of=of, newest=newest))
            for policy_id, settings in snapshots.items():
                if settings.of == of:
                    await self._draw(context, policy_id, settings, newest=newest)
            for version in stale:
                await self.store.versions.unpin(context.run_id, of, version=version)

    async def _pin(self, context: RunContext, of: str, wanted: frozenset[int]) -> list[int]:
        """Pin what is wanted; return those of our pins that are not."""
        pins = {pin.version: pin.reason for pin in await self.store.versions.pins(context.run_id, of)}
        for version in sorted(wanted - pins.keys()):
            await self.store.versions.pin(context.run_id, of, version=version, reason=PIN_REASON)
        return [version for version, reason in pins.items() if reason == PIN_REASON and version not in wanted]

    async def _draw(
        self, context: RunContext, policy_id: str, settings: SnapshotSettings, *, newest: int
    ) -> None:
        due, seed = newest_draw(settings, newest=newest), context.recipe.run.seed
        for number in range(context.newest_versions.get(policy_id, -1) + 1, due + 1):
            ratings = await self.store.versions.ratings(context.run_id, policy_id)
            version = drawn(settings, policy_id=policy_id, draw=number, seed=seed, ratings=ratings)
            (source,) = await self.store.versions.several(context.run_id, settings.of, [version])
            message = version_pb2.Version()
            message.CopyFrom(source)
            message.policy_id, message.version = policy_id, number
            message.snapshot_of, message.snapshot_version = settings.of, version
            message.ClearField("rollback_of")
            await self.store.versions.announce_snapshot(context.run_id, message)
            context.newest_versions[policy_id] = number
            log.info("snapshot.announced", policy_id=policy_id, draw=number, of=settings.of, version=version)
