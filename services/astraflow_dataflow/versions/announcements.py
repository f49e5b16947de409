"""Versions: announcing them, and telling everybody who listens.

An announcement is one atomic call; readers get whole ranges in order, so no announcement is skipped however
late they ask. Called by the version service, working sessions and joins.
"""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from astraflow.dataflow.v1 import version_pb2
from astraflow.errors import InvalidArgumentError
from astraflow_dataflow.runs.registry import RunContext
from astraflow_dataflow.store.store import Store
from astraflow_kit import failpoints
from astraflow_kit.log import get_logger

log = get_logger(__name__)

_LOOK_AGAIN_S = 15.0


@dataclass(frozen=True)
class Versions:
    """Announces and reads versions."""

    store: Store

    async def publish(
        self,
        context: RunContext,
        version: version_pb2.Version,
        *,
        epoch: int,
        num_unreadable_before: int = 0,
    ) -> version_pb2.Version:
        """Announce a version for the trainer of `epoch`. Raises FencedError, ConflictError, VersionGapError,
        InvalidArgumentError.
        """
        _require_sane(version, num_unreadable_before=num_unreadable_before)
        context.require_policy(version.policy_id)
        if version.policy_id in context.recipe.snapshots:
            raise InvalidArgumentError(
                f"policy {version.policy_id!r} is a snapshot of another one, whose versions it has; publish those"
            )
        announced = await self.store.versions.publish(
            context.run_id, version=version, epoch=epoch, num_unreadable_before=num_unreadable_before
        )
        failpoints.hit("dataflow.published")
        context.newest_versions[version.policy_id] = max(
            context.newest_versions.get(version.policy_id, -1), version.version
        )
        log.info("version.announced", policy_id=version.policy_id, version=version.version, step=version.step)
        return announced

    async def for_nodes(
        self, context: RunContext, policy_id: str, known: int | None
    ) -> list[version_pb2.Version]:
        """Return what `after` does, without versions that an open evaluation holds back from nodes."""
        found = await self.after(context, policy_id, known)
        if not found:
            return []
        # Read after the versions: one that a pass was not planned at was announced after it.
        held = (await self.store.evaluations.held_versions(context.run_id)).get(policy_id)
        if held is None or found[-1].version <= held:
            return found
        if known is None:
            return await self.store.versions.several(context.run_id, policy_id, range(held, held + 1))
        return [version for version in found if version.version <= held]

    async def pins(self, run_id: str, policy_id: str) -> list[version_pb2.Pin]:
        """Return what was pinned, and what evaluations that are open or wait need, newest version first."""
        pins = {pin.version: pin for pin in await self.store.versions.pins(run_id, policy_id)}
        for version, name in (await self.store.evaluations.pinned_for(run_id, policy_id)).items():
            pins.setdefault(version, version_pb2.Pin(version=version, reason=f"evaluation {name}"))
        return [pins[version] for version in sorted(pins, reverse=True)]

    async def newest(self, context: RunContext) -> list[version_pb2.Version]:
        """Return the newest announced version of each policy that has one."""
        found = []
        for policy_id in context.policy_ids:
            found += await self.after(context, policy_id, None)
        return found

    async def after(
        self, context: RunContext, policy_id: str, known: int | None
    ) -> list[version_pb2.Version]:
        """Return versions announced after `known`, in order; only the newest one when nothing is known yet."""
        newest = await self.store.versions.newest(context.run_id, policy_id)
        if newest is None or newest == known:
            return []
        first = newest if known is None else known + 1
        numbers = range(first, newest + 1)
        return await self.store.versions.several(context.run_id, policy_id, numbers)

    async def watch(
        self, context: RunContext, policy_ids: Sequence[str]
    ) -> AsyncIterator[version_pb2.Version]:
        """Yield the newest version of each policy, then every later one, without end."""
        known: dict[str, int] = {}
        with context.wakeups.subscribe(*(f"version {policy_id}" for policy_id in policy_ids)) as news:
            while True:
                for policy_id in policy_ids:
                    for version in await self.after(context, policy_id, known.get(policy_id)):
                        known[policy_id] = version.version
                        yield version
                await news.wait(_LOOK_AGAIN_S)


def _require_sane(version: version_pb2.Version, *, num_unreadable_before: int) -> None:
    if version.HasField("rollback_of") and version.rollback_of >= version.version:
        raise InvalidArgumentError(
            f"version {version.version} goes back to version {version.rollback_of}, which is not older"
        )
    is_first = version.version <= num_unreadable_before
    if (version.step and version.version == 0) or (not version.step and not is_first):
        raise InvalidArgumentError(
            f"version {version.version} names step {version.step}: version 0 belongs to step 0, later ones "
            "to a trained step"
        )
