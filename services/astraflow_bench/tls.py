"""What TLS and tokens cost: pushes, fetches and small calls through one kit server with them, beside one without.

Invariant: both servers run in one process with their clients and answer the same bodies without looking at them, so a
figure is of the way there and nothing else. Rounds alternate between both; medians are kept. Called by the command
`astraflow bench tls`.
"""

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import median
from typing import TypeAlias

from astraflow.client import AsyncClient
from astraflow.connecting.connection import Connection
from astraflow.dataflow.v1 import batch_service_pb2 as batches
from astraflow.dataflow.v1 import batch_service_pb2_grpc as batches_grpc
from astraflow.dataflow.v1 import trajectory_service_pb2 as pushes
from astraflow.dataflow.v1 import trajectory_service_pb2_grpc as pushes_grpc
from astraflow.rollout.v1 import trajectory_pb2
from astraflow_kit.metrics import Metrics
from astraflow_kit.rpc_contracts import Registration
from astraflow_kit.serve import GrpcServer
from astraflow_kit.settings import DaemonSettings
from astraflow_launcher.issuing.authority import create_authority, issue_certificate
from astraflow_launcher.issuing.keys import create_keys
from astraflow_launcher.issuing.tokens import Grant, issue_token

_MIB = 2**20
_BODY = bytes(_MIB)
_RUN = "bench"
_VALID = timedelta(hours=1)

Work: TypeAlias = Callable[[AsyncClient], Awaitable[None]]
_Turn: TypeAlias = tuple[float, float]
"""Seconds by the clock and of this process's CPU."""


@dataclass(frozen=True, kw_only=True)
class TlsCost:
    """One kind of work, with and without TLS and token."""

    what: str
    unit: str
    """Of the rates."""
    plain_per_s: float
    secure_per_s: float
    plain_cpu_ms: float
    """CPU of both ends for one."""
    secure_cpu_ms: float


async def measure(folder: Path, *, rounds: int, num_mib: int, num_calls: int) -> list[TlsCost]:
    """Return a row each for pushes and fetches of 1 MiB, and for small calls. `folder` holds keys meanwhile."""
    jobs: list[tuple[str, str, int, str, Work]] = [
        ("push", "MiB/s", num_mib, "rollout", partial(_push, times=num_mib, body=_BODY)),
        ("fetch", "MiB/s", num_mib, "trainer", partial(_fetch, num_mib=num_mib)),
        ("small call", "calls/s", num_calls, "rollout", partial(_push, times=num_calls, body=b"")),
    ]
    async with AsyncExitStack() as stack:
        plain = await stack.enter_async_context(_server(DaemonSettings(), num_mib=num_mib))
        authority, certificate = _certificate(folder)
        key = folder / "token.key"
        settings = DaemonSettings(
            tls_cert_file=certificate[0], tls_key_file=certificate[1], token_keys_file=create_keys(key)
        )
        secure = await stack.enter_async_context(_server(settings, num_mib=num_mib))
        rows = []
        for what, unit, count, role, work in jobs:
            token = issue_token(Grant(role=role, runs=[_RUN]), ttl=_VALID, key=key)
            reached = Connection(plain), Connection(secure, ca=authority, token=token)
            clients = [await stack.enter_async_context(AsyncClient(one)) for one in reached]
            turns = [[await _timed(work, client) for client in clients] for _ in range(rounds + 1)][1:]
            rows.append(
                _row(what, unit, count, plain=[turn[0] for turn in turns], secure=[turn[1] for turn in turns])
            )
    return rows


def _certificate(folder: Path) -> tuple[bytes, tuple[Path, Path]]:
    """An authority, and a certificate of it for this machine's loopback address."""
    authority = create_authority(folder / "authority", days=2)
    issued = issue_certificate(folder / "authority", "server", ips=["127.0.0.1"], days=1)
    return authority.certificate.read_bytes(), (issued.certificate, issued.key)


async def _timed(work: Work, client: AsyncClient) -> _Turn:
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    await work(client)
    return time.perf_counter() - began_s, time.process_time() - began_cpu_s


def _row(what: str, unit: str, count: int, *, plain: list[_Turn], secure: list[_Turn]) -> TlsCost:
    return TlsCost(
        what=what,
        unit=unit,
        plain_per_s=count / median(wall_s for wall_s, _ in plain),
        secure_per_s=count / median(wall_s for wall_s, _ in secure),
        plain_cpu_ms=1e3 / count * median(cpu_s for _, cpu_s in plain),
        secure_cpu_ms=1e3 / count * median(cpu_s for _, cpu_s in secure),
    )


async def _push(client: AsyncClient, *, times: int, body: bytes) -> None:
    episode = trajectory_pb2.Episode(
        run_id=_RUN, task_id="task", trajectories=[trajectory_pb2.TrajectoryItem(body=body)]
    )
    request = pushes.PushEpisodeRequest(episode=episode)
    for _ in range(times):
        await client.call(client.trajectories.PushEpisode, request)


async def _fetch(client: AsyncClient, *, num_mib: int) -> None:
    request = batches.FetchBatchRequest(run_id=_RUN, policy_id="policy", step=1)
    received = [len(item.body) async for item in client.stream(client.batches.FetchBatch, request)]
    if received != [_MIB] * num_mib:
        raise RuntimeError(f"asked for {num_mib} bodies of {_MIB} bytes, got {received}")


@asynccontextmanager
async def _server(settings: DaemonSettings, *, num_mib: int) -> AsyncIterator[str]:
    registrations: list[Registration] = [
        (pushes_grpc.add_TrajectoryServiceServicer_to_server, _served(pushes_grpc.TrajectoryServiceServicer)),
        (
            batches_grpc.add_BatchServiceServicer_to_server,
            _served(batches_grpc.BatchServiceServicer, num_mib),
        ),
    ]
    server = GrpcServer(registrations, settings=settings, metrics=Metrics())
    await server.start()
    try:
        yield server.address
    finally:
        await server.stop(deadline_s=1.0)


def _served(base: type, num_mib: int = 0) -> object:
    """A servicer that answers the two rpcs that are measured; a server insists that the others exist too."""

    async def push(_self: object, _request: object, _context: object) -> pushes.PushEpisodeResponse:
        return pushes.PushEpisodeResponse()

    async def fetch(
        _self: object, _request: object, _context: object
    ) -> AsyncIterator[batches.FetchBatchResponse]:
        for _ in range(num_mib):
            yield batches.FetchBatchResponse(body=_BODY)

    async def unused(_self: object, _request: object, _context: object) -> None:
        raise NotImplementedError

    rpcs = dict.fromkeys((name for name in vars(base) if name[0].isupper()), unused)
    measured = {"PushEpisode": push, "FetchBatch": fetch}
    return type(base.__name__, (base,), rpcs | {name: measured[name] for name in rpcs if name in measured})()
