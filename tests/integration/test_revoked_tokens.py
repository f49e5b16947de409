"""A revoked token: refused by every server of one Redis within 2 s, on streams that are open too."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from astraflow.client import AsyncClient, Connection, RetryPolicy
from astraflow.dataflow.v1 import admin_service_pb2 as admin
from astraflow.dataflow.v1 import run_service_pb2 as runs
from astraflow.errors import AstraflowError, PermissionError_, UnauthenticatedError, UnavailableError
from support.dataflow_world import World, served, until
from support.tokens import keys_file, token

pytestmark = [pytest.mark.integration, pytest.mark.slow]

OPERATOR, VIEWER = token("ops", "operator"), token("lost", "viewer")


@asynccontextmanager
async def calling(world: World, sent: str) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(Connection(world.address, token=sent), retry=RetryPolicy(total_s=0)) as client:
        yield client


def revoking(token_id: str, *, valid: timedelta | None = None) -> admin.RevokeTokenRequest:
    request = admin.RevokeTokenRequest(token=admin.RevokedToken(token_id=token_id))
    if valid is not None:
        request.token.expire_time.FromDatetime(datetime.now(UTC) + valid)
    return request


async def test_every_server_of_that_redis_refuses_it_on_open_streams_too(
    redis_url: str, tmp_path: Path
) -> None:
    settings = {"token_keys_file": keys_file(tmp_path)}
    async with (
        served(redis_url, tmp_path, **settings) as first,
        served(redis_url, tmp_path, **settings) as second,
        calling(first, OPERATOR) as operator,
        calling(second, VIEWER) as viewer,
    ):
        operator_world = World(dataflow=first.dataflow, client=operator, address=first.address)
        await operator_world.create_run()
        watching = viewer.stream(viewer.admin.Watch, admin.AdminServiceWatchRequest())
        await anext(watching)
        answer = await operator.call(
            operator.admin.RevokeToken, revoking("jti-lost", valid=timedelta(hours=1))
        )
        revoked_s = time.monotonic()
        again = await operator.call(operator.admin.RevokeToken, revoking("jti-lost"))

        async def is_refused() -> bool:
            try:
                await viewer.call(viewer.runs.ListRuns, runs.ListRunsRequest())
            except UnauthenticatedError as error:
                return error.metadata["reason"] == "revoked"
            return False

        await until(is_refused, within_s=10)
        took_s = time.monotonic() - revoked_s
        with pytest.raises(UnavailableError, match="was revoked"):
            async for _ in watching:
                pass
        listed = await operator.call(operator.admin.ListRevokedTokens, admin.ListRevokedTokensRequest())
    assert (answer.was_revoked, again.was_revoked) == (False, True)
    assert [item.token_id for item in listed.tokens] == ["jti-lost"]
    assert took_s < 10


async def test_a_revocation_is_kept_until_the_token_expires_and_survives_a_restart(
    redis_url: str, tmp_path: Path
) -> None:
    settings = {"token_keys_file": keys_file(tmp_path)}
    async with served(redis_url, tmp_path, **settings) as world, calling(world, OPERATOR) as operator:
        for token_id, valid in (
            ("gone", timedelta(hours=-1)),
            ("jti-lost", timedelta(hours=1)),
            ("ever", None),
        ):
            await operator.call(operator.admin.RevokeToken, revoking(token_id, valid=valid))
    async with served(redis_url, tmp_path, **settings) as world:
        assert world.dataflow.revoked_tokens.seen() == {"jti-lost", "ever"}
        async with calling(world, VIEWER) as viewer:
            with pytest.raises(UnauthenticatedError, match="was revoked"):
                await viewer.call(viewer.runs.ListRuns, runs.ListRunsRequest())


@pytest.mark.parametrize(
    ("sent", "request_", "kind"),
    [
        (token("tenant", "operator", runs=["run"]), revoking("x"), PermissionError_),
        (VIEWER, revoking("x"), PermissionError_),
        (OPERATOR, revoking(""), AstraflowError),
        (OPERATOR, revoking("x" * 129), AstraflowError),
        (OPERATOR, revoking("new\nline"), AstraflowError),
    ],
)
async def test_only_an_operator_of_all_runs_revokes_and_only_ids(
    redis_url: str, tmp_path: Path, sent: str, request_: admin.RevokeTokenRequest, kind: type[AstraflowError]
) -> None:
    async with (
        served(redis_url, tmp_path, token_keys_file=keys_file(tmp_path)) as world,
        calling(world, sent) as client,
    ):
        with pytest.raises(kind):
            await client.call(client.admin.RevokeToken, request_)
        assert world.dataflow.revoked_tokens.seen() == frozenset()
