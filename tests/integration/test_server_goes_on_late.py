"""A server that stood still in the middle of a push, while another one over its Redis gave the task to somebody else,
stores nothing twice when it goes on.
"""

import asyncio
import dataclasses
from pathlib import Path

import pytest

from astraflow.dataflow.v1 import trajectory_service_pb2 as pushes
from support.dataflow_process import DataflowProcess
from support.valkey import ValkeyServer

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(180)]


@pytest.mark.parametrize("moment", ["storing", "committed"])
async def test_a_late_push_fills_nothing_that_another_node_has_filled(
    own_valkey: ValkeyServer, tmp_path: Path, moment: str
) -> None:
    late, other = (DataflowProcess(own_valkey.url, tmp_path / name) for name in ("late", "other"))
    for server in (late, other):
        server.folder.mkdir()
    late.start(failpoints=f"dataflow.{moment}=stop@1")
    other.start()
    try:
        async with late.world() as before, other.world() as world:
            trainer, node = await world.started("task", lease_ttl_s=1, groups_per_step=1)
            before.run_id = world.run_id
            (lease,) = await node.lease(wait_s=20)
            stale = dataclasses.replace(node, world=before)
            pushing = asyncio.create_task(stale.push(node.episode(lease, lease.members[0])))
            await late.frozen()
            second = await world.node("n2")
            (again,) = await second.lease(wait_s=30)
            expected = {"storing": lease.members, "committed": lease.members[1:]}[moment]
            assert list(again.members) == list(expected), "what was committed before it stood still is kept"
            assert await second.complete(again) == ["ACCEPTED"] * len(again.members)
            late.go_on()
            result = await pushing
            accepted = result.outcome == pushes.OUTCOME_ACCEPTED
            assert accepted is (moment == "committed"), result
            batch = (await trainer.acquire(1)).batch
            assert len(batch.items) == len(lease.members)
            await world.has_account()
    finally:
        late.kill()
        other.kill()
