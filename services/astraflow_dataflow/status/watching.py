"""Watching: the status of a run as a stream of changes.

Woken by the run's events and by a clock, so that also what has no event (a node that falls silent) is seen; times
that merely pass are no change. Called by the admin service.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

from astraflow.dataflow.v1 import admin_service_pb2
from astraflow_dataflow.runs.registry import RunContext

_LOOK_AGAIN_S = 2.0


async def watch(
    context: RunContext,
    status_now: Callable[[], Awaitable[admin_service_pb2.StatusResponse]],
    *,
    interval_s: float,
) -> AsyncIterator[tuple[admin_service_pb2.StatusResponse, list[str]]]:
    """Yield (status, names of the fields that changed) at once and after each change, at most one per interval."""
    topics = ["work", "run", *(f"ready {policy_id}" for policy_id in context.policy_ids)]
    topics += [f"version {policy_id}" for policy_id in context.policy_ids]
    before = admin_service_pb2.StatusResponse()
    with context.wakeups.subscribe(*topics) as news:
        while True:
            status = await status_now()
            now = timeless(status)
            changed = changed_fields(before, now)
            if changed:
                before = now
                yield status, changed
            await asyncio.sleep(interval_s)
            await news.wait(_LOOK_AGAIN_S)


def timeless(status: admin_service_pb2.StatusResponse) -> admin_service_pb2.StatusResponse:
    """Return a status without the times that pass by themselves."""
    copy = admin_service_pb2.StatusResponse()
    copy.CopyFrom(status)
    copy.ClearField("read_time")
    for node in copy.nodes:
        node.ClearField("last_seen_time")
    for wait in copy.waits:
        wait.ClearField("waited_duration")
    return copy


def changed_fields(
    before: admin_service_pb2.StatusResponse, now: admin_service_pb2.StatusResponse
) -> list[str]:
    """Return the names of the fields that differ, in the contract's order."""
    return [
        field.name
        for field in admin_service_pb2.StatusResponse.DESCRIPTOR.fields
        if _only(before, field.name) != _only(now, field.name)
    ]


def _only(status: admin_service_pb2.StatusResponse, name: str) -> bytes:
    # As bytes: a NaN, such as a mean of nothing, must equal itself.
    only = admin_service_pb2.StatusResponse()
    for field, value in status.ListFields():
        if field.name == name and field.is_repeated:
            getattr(only, name).extend(value)
        elif field.name == name and field.message_type is not None:
            getattr(only, name).CopyFrom(value)
        elif field.name == name:
            setattr(only, name, value)
    return only.SerializeToString(deterministic=True)
