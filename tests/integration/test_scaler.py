"""KEDA's questions: over mutual TLS alone, answered from the figures of PoolReport, of no consequence to the run."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from astraflow.keda.v1 import external_scaler_pb2 as pb
from astraflow.keda.v1.external_scaler_pb2_grpc import ExternalScalerStub
from astraflow_dataflow.servicers.scaler_servicer import METRIC, ScalerServicer
from astraflow_dataflow.settings import DataflowServerSettings
from astraflow_kit.ports import PortError
from astraflow_kit.serve import GrpcServer
from astraflow_kit.settings import SettingsError, load
from support.certificates import self_signed
from support.dataflow_world import World

pytestmark = pytest.mark.integration


@dataclass
class Scaler:
    """A scaler's listener and what a caller needs for it."""

    listener: GrpcServer
    ending: asyncio.Event
    authority: bytes
    client_key: bytes
    client_cert: bytes

    def channel(self, *, with_certificate: bool = True) -> grpc.aio.Channel:
        """A channel as KEDA opens it, or one that shows no certificate."""
        shown = (
            {"private_key": self.client_key, "certificate_chain": self.client_cert}
            if with_certificate
            else {}
        )
        return grpc.aio.secure_channel(
            self.listener.address, grpc.ssl_channel_credentials(self.authority, **shown)
        )


@pytest.fixture
async def scaler(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Scaler]:
    """The scaler of a world, asked by a client of its authority; it looks often."""
    for name in ("server", "client"):
        (tmp_path / name).mkdir()
    server, client = self_signed(tmp_path / "server"), self_signed(tmp_path / "client", name="keda")
    settings = load(
        DataflowServerSettings,
        {"redis": "redis://x", "scaler_port": 0, "scaler_client_ca_file": client["tls_cert_file"], **server},
    )
    world.dataflow.settings = settings
    monkeypatch.setattr(ScalerServicer, "interval_s", 0.05)
    ending = asyncio.Event()
    listener = world.dataflow.scaler(ending=ending)
    assert listener is not None
    await listener.start()
    files = (server["tls_cert_file"], client["tls_key_file"], client["tls_cert_file"])
    yield Scaler(listener, ending, *(path.read_bytes() for path in files))
    await listener.stop(deadline_s=1)


def reference(**metadata: str) -> pb.ScaledObjectRef:
    """What KEDA says of the pool `eu`; all of a trigger's metadata is passed on."""
    known = {"pool": "eu", "scalerAddress": "dataflow:7073"}
    return pb.ScaledObjectRef(name="eu", namespace="pools", scalerMetadata=known | metadata)


async def wanted(stub: ExternalScalerStub, **metadata: str) -> tuple[int, float]:
    """The metric as older and as newer releases of KEDA read it."""
    asked = pb.GetMetricsRequest(scaledObjectRef=reference(**metadata), metricName=METRIC)
    (value,) = (await stub.GetMetrics(asked)).metricValues
    assert value.metricName == METRIC
    return value.metricValue, value.metricValueFloat


async def test_a_pool_is_as_large_as_its_work(world: World, scaler: Scaler) -> None:
    async with scaler.channel() as channel:
        stub = ExternalScalerStub(channel)
        assert not (await stub.IsActive(reference())).result  # no run yet
        await world.started(*(f"t{number}" for number in range(4)), raas={"max_concurrent_tasks": 4})
        assert await wanted(stub) == (1, 1.0)  # of nodes that the recipe has: there is none in the pool
        assert await wanted(stub, tasksPerNode="2", share="0.5") == (1, 1.0)
        await world.join("n2", max_concurrent_tasks=2, pool="eu")
        await world.nodes["n2"].report(connected_ms=60_000)
        assert await wanted(stub) == (2, 2.0)
        assert await wanted(stub, tasksPerNode="3") == (2, pytest.approx(4 / 3))
        assert (await stub.IsActive(reference())).result
        (spec,) = (await stub.GetMetricSpec(reference())).metricSpecs
        assert (spec.metricName, spec.targetSize, spec.targetSizeFloat) == (METRIC, 1, 1.0)
        await world.finish()
        assert await wanted(stub, runId="run") == (0, 0.0)


async def test_the_stream_tells_changes_and_ends_well(world: World, scaler: Scaler) -> None:
    await world.started(dataset="Empty")
    async with scaler.channel() as channel:
        stream = ExternalScalerStub(channel).StreamIsActive(reference())
        assert not (await stream.read()).result
        await world.submit("t1")
        assert (await stream.read()).result
        scaler.ending.set()
        assert await stream.read() is grpc.aio.EOF
        assert await stream.code() is grpc.StatusCode.OK


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        ({"tasksPerNode": "many"}, "tasksPerNode = 'many'"),
        ({"share": "1.5"}, "share = '1.5'"),
        ({"share": "nan"}, "nan"),
    ],
)
async def test_wrong_metadata_is_named(scaler: Scaler, metadata: dict[str, str], named: str) -> None:
    async with scaler.channel() as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await ExternalScalerStub(channel).GetMetricSpec(reference(**metadata))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert named in str(refused.value.details())


async def test_nobody_asks_without_a_certificate(scaler: Scaler) -> None:
    async with scaler.channel(with_certificate=False) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await ExternalScalerStub(channel).IsActive(reference(), timeout=10)
    assert refused.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


async def test_who_asks_cannot_do_anything_else(scaler: Scaler) -> None:
    async with scaler.channel() as channel:
        call = channel.unary_unary("/astraflow.dataflow.v1.RunService/ListRuns")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call(b"")
    assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_run_goes_on_without_its_scaler(world: World, scaler: Scaler) -> None:
    _, node = await world.started("t1", "t2")
    async with scaler.channel() as channel:
        stream = ExternalScalerStub(channel).StreamIsActive(reference())
        assert (await stream.read()).result
        await node.work()
        await scaler.listener.stop(deadline_s=0)
        assert await stream.code() is not None
    assert await node.work() == ["t2"]
    assert (await world.status()).trajectories.conservation_error == 0


def test_a_scaler_without_mutual_tls_is_refused(tmp_path: Path) -> None:
    pair = self_signed(tmp_path)
    for given, named in (
        ({"scaler_port": 0, **pair}, "scaler_port and scaler_client_ca_file go together"),
        ({"scaler_port": 0, "scaler_client_ca_file": pair["tls_cert_file"]}, "needs tls_cert_file"),
    ):
        with pytest.raises(SettingsError, match=named):
            load(DataflowServerSettings, {"redis": "redis://x", **given})


async def test_a_taken_port_is_named_as_the_scalers(world: World, scaler: Scaler) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        changed = {"scaler_port": taken.getsockname()[1]}
        world.dataflow.settings = world.dataflow.settings.model_copy(update=changed)
        listener = world.dataflow.scaler(ending=scaler.ending)
        assert listener is not None
        with pytest.raises(PortError, match="choose another scaler_port"):
            await listener.start()
