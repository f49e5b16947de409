"""Finding the run: a node waits for what may still come, with a name for it, and says at once what cannot come."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path

import pytest
import structlog.testing

from astraflow import errors
from astraflow.client import AsyncClient
from astraflow.dataflow.v1 import run_service_pb2
from astraflow_raas.node.folder import NodeFolder, claim_folder
from astraflow_raas.node.joining import find_run, join_request, join_run
from astraflow_raas.settings import NodeSettings
from support.scripted_dataflow import RUN_ID, RunningServer, eventually

Fault = type[errors.AstraflowError]


@pytest.fixture
async def client(server: RunningServer) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(server.address) as client:
        yield client


async def test_the_run_is_found_with_its_recipe(client: AsyncClient) -> None:
    found = await find_run(client, "", patience_s=5.0)
    assert (found.run.run_id, found.sampling["solver"].max_new_tokens) == (RUN_ID, 8)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[NodeFolder]:
    claimed = claim_folder(tmp_path, node_id="node-1")
    yield claimed
    claimed.release()


async def test_a_node_joins_with_places_for_episodes(
    server: RunningServer, client: AsyncClient, folder: NodeFolder
) -> None:
    settings = NodeSettings(join=server.address, engine="http://10.0.0.7:30000", max_concurrent_tasks=3)
    found = await find_run(client, "", patience_s=5.0)
    request = join_request(found, settings, node_id="node-1", hardware="2 × Any CPU")
    await join_run(client, request, folder=folder, patience_s=5.0, name_patience_s=20.0)
    (joined,) = server.script.joins
    # Three tasks of four episodes: an evaluation task has one.
    assert (joined.node_id, joined.max_concurrent_tasks, list(joined.engines)) == ("node-1", 12, ["remote"])


async def test_a_server_of_other_contracts_is_refused(server: RunningServer, client: AsyncClient) -> None:
    server.script.info.oldest_contract_version = server.script.info.contract_version = 99
    with pytest.raises(errors.IncompatibleError, match=r"speaks contract version 99, .* update the client"):
        await find_run(client, "", patience_s=60.0)


async def test_a_server_and_a_run_that_come_late_are_awaited(
    server: RunningServer, client: AsyncClient
) -> None:
    server.script.run_fault = errors.NotFoundError("this server has no run yet")
    await server.stop()
    with structlog.testing.capture_logs() as lines:
        finding = asyncio.create_task(find_run(client, "", patience_s=30.0))
        await eventually(lambda: waits(lines) == ["server"], what="the first wait is named")
        await server.restart()
        await eventually(lambda: waits(lines) == ["server", "run"], what="the second wait is named")
        server.script.run_fault = None
        assert (await finding).run.run_id == RUN_ID


@pytest.mark.parametrize("fault", [errors.UnavailableError, errors.DeadlineError, errors.NotFoundError])
async def test_waiting_ends_at_its_deadline_with_the_remedy(
    server: RunningServer, client: AsyncClient, fault: Fault
) -> None:
    server.script.run_fault = fault("as the test asked")
    remedy = r"within .* s: as the test asked.*--join-timeout-s"
    with pytest.raises(errors.UnavailableError, match=remedy) as gave_up:
        await find_run(client, "", patience_s=0.3)
    assert server.address in gave_up.value.message


@pytest.mark.parametrize(
    ("fault", "error", "remedy"),
    [
        (errors.PreconditionError, errors.InvalidArgumentError, "give --run-id"),
        (errors.UnauthenticatedError, errors.UnauthenticatedError, "give --token-file"),
        (errors.PermissionError_, errors.PermissionError_, "give --token-file"),
        (errors.UnimplementedError, errors.UnimplementedError, "check --join"),
    ],
)
async def test_what_waiting_cannot_mend_is_said_at_once(
    server: RunningServer, client: AsyncClient, fault: Fault, error: Fault, remedy: str
) -> None:
    server.script.run_fault = fault("as the test asked")
    with pytest.raises(error, match=f"as the test asked.*{remedy}"):
        await find_run(client, "named", patience_s=60.0)


async def test_a_run_that_is_named_is_awaited_and_one_of_the_token_only_where_there_is_no_other(
    server: RunningServer, client: AsyncClient
) -> None:
    server.script.run_fault = errors.NotFoundError(
        "no run 'named' on this server", metadata={"reason": "run"}
    )
    with pytest.raises(errors.UnavailableError, match=r"has no run to join .*'named'.*check --run-id"):
        await find_run(client, "named", patience_s=0.1)
    with pytest.raises(errors.PermissionError_, match=r"'named'.*--run-id to wait.*give --token-file"):
        await find_run(client, "", patience_s=60.0)


async def test_a_node_shows_what_it_kept_and_keeps_what_it_is_given(
    server: RunningServer, client: AsyncClient, folder: NodeFolder
) -> None:
    request = run_service_pb2.JoinRunRequest(run_id=RUN_ID, node_id="node-1", max_concurrent_tasks=1)
    await join_run(client, request, folder=folder, patience_s=5.0, name_patience_s=20.0)
    assert (request.incarnation, client.session) == (1, "session-1")
    again = run_service_pb2.JoinRunRequest(run_id=RUN_ID, node_id="node-1", max_concurrent_tasks=1)
    await join_run(client, again, folder=folder, patience_s=5.0, name_patience_s=20.0)
    assert (again.incarnation, folder.kept_session(RUN_ID)) == (2, "session-2")
    assert server.script.shown == ["", "session-1"]


IN_USE = errors.PreconditionError(
    "node node-1 is at work; choose another --node-id", metadata={"reason": "name_in_use"}
)


async def test_a_name_in_use_is_awaited_and_then_refused_with_the_remedy(
    server: RunningServer, client: AsyncClient, folder: NodeFolder
) -> None:
    server.script.join_error = IN_USE
    request = run_service_pb2.JoinRunRequest(run_id=RUN_ID, node_id="node-1", max_concurrent_tasks=1)
    joining = partial(join_run, client, request, folder=folder, patience_s=5.0, name_patience_s=0.1)
    with structlog.testing.capture_logs() as lines, pytest.raises(errors.InvalidArgumentError) as refused:
        await joining()
    assert "choose another --node-id" in refused.value.message
    assert waits(lines)[0] == "node_id"


async def test_a_name_that_becomes_free_is_taken(
    server: RunningServer, client: AsyncClient, folder: NodeFolder
) -> None:
    server.script.join_error = IN_USE
    request = run_service_pb2.JoinRunRequest(run_id=RUN_ID, node_id="node-1", max_concurrent_tasks=1)
    joining = asyncio.create_task(
        join_run(client, request, folder=folder, patience_s=5.0, name_patience_s=20.0)
    )
    await asyncio.sleep(0.05)
    server.script.join_error = None
    assert (await joining).session == "session-1"


def waits(lines: list[dict[str, object]]) -> list[object]:
    """What the log says the node waits for."""
    return [line["waiting_for"] for line in lines if line["event"] == "node.waits"]
