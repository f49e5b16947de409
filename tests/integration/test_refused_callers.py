"""Callers that a server refuses, as its operators see them: in `why`, in `status`, and before it comes to that."""

import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from astraflow.client import AsyncClient, Connection, RetryPolicy
from astraflow.dataflow.v1 import admin_service_pb2 as admin
from astraflow.dataflow.v1 import run_service_pb2 as runs
from astraflow.errors import AstraflowError
from astraflow_kit.identity.tokens import LEEWAY_S
from support.dataflow_world import World, served, until
from support.tokens import OTHER_KEY, keys_file, token

pytestmark = pytest.mark.integration

CALLS = 3
NOW_S = int(time.time())
REFUSED: Mapping[str, tuple[str, str]] = {
    "expired": (token("spot-1", "rollout", exp=NOW_S - 3600), "spot-1"),
    "not_yet_valid": (token("spot-1", "rollout", nbf=NOW_S + 3600), "spot-1"),
    "wrong_audience": (token("spot-1", "rollout", aud="elsewhere"), "spot-1"),
    "revoked": (token("spot-1", "rollout", jti="gone"), "spot-1"),
    "run": (token("spot-1", "rollout", runs=["run-2"]), "spot-1"),
    "role": (token("spot-1", "viewer"), "spot-1"),
    "unknown_key": (token("spot-1", "rollout", key=OTHER_KEY, key_id="old"), "a caller without proof"),
    "signature": (token("spot-1", "rollout", key=OTHER_KEY), "a caller without proof"),
}


async def join(world: World, credential: str, *, node_id: str = "spot-1") -> None:
    async with AsyncClient(Connection(world.address, token=credential), retry=RetryPolicy(total_s=0)) as node:
        asked = runs.JoinRunRequest(run_id="run", node_id=node_id, max_concurrent_tasks=1)
        await node.call(node.runs.JoinRun, asked)


async def waits_at_access(world: World, run_id: str, operator: AsyncClient) -> dict[str, admin.Wait]:
    """What both views say, which is the same."""
    status = await operator.call(operator.admin.Status, admin.StatusRequest(run_id=run_id))
    why = await operator.call(operator.admin.Why, admin.WhyRequest(run_id=run_id))
    reasons = [{wait.reason for wait in seen.waits if wait.stage == "access"} for seen in (status, why)]
    assert reasons[0] == reasons[1]
    return {wait.reason: wait for wait in why.waits if wait.stage == "access"}


@pytest.mark.parametrize("reason", REFUSED)
async def test_an_operator_reads_who_is_refused_why_since_when_and_how_often(
    reason: str, redis_url: str, tmp_path: Path
) -> None:
    credential, subject = REFUSED[reason]
    async with (
        served(redis_url, tmp_path, token_keys_file=keys_file(tmp_path)) as world,
        AsyncClient(Connection(world.address, token=token("ops", "operator"))) as operator,
    ):
        world.client = operator
        await world.create_run(name="run")
        await world.dataflow.revoked_tokens.revoke("gone")
        for _ in range(CALLS):
            with pytest.raises(AstraflowError) as refused:
                await join(world, credential)
        wait = (await waits_at_access(world, "run", operator)).get("callers_refused")
        if reason == "run":  # its token is for another run, whose operators read it
            assert wait is None
            await world.create_run(name="run-2")
            wait = (await waits_at_access(world, "run-2", operator))["callers_refused"]
    assert wait is not None
    assert f"{subject}: {reason}, {CALLS} times since " in wait.detail
    assert wait.released_by == refused.value.message


async def test_a_token_that_ends_soon_is_named_while_it_is_good(redis_url: str, tmp_path: Path) -> None:
    ending = token("spot-1", "rollout", nbf=NOW_S - 90_000, exp=NOW_S + 3600)
    async with (
        served(redis_url, tmp_path, token_keys_file=keys_file(tmp_path)) as world,
        AsyncClient(Connection(world.address, token=token("ops", "operator"))) as operator,
    ):
        world.client = operator
        await world.create_run(name="run")
        await join(world, ending)
        over = token("spot-2", "rollout", nbf=NOW_S - 90_000, exp=int(time.time() - LEEWAY_S + 10))
        await join(world, over, node_id="n2")
        assert "spot-1: at " in (await waits_at_access(world, "run", operator))["token_ends"].detail

        async def has_ended() -> bool:
            wait = (await waits_at_access(world, "run", operator)).get("token_ended")
            return wait is not None and "spot-2: at " in wait.detail

        await until(has_ended)
