"""The pages for people, over a real socket."""

import asyncio
import signal
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import httpx
import pytest

from astraflow_kit.http import HttpServer, ReadinessCheck, TimedProtocol, create_app
from astraflow_kit.metrics import Metrics
from astraflow_kit.ports import PortError


async def _status() -> Mapping[str, object]:
    return {"step": 3}


async def _ready() -> None:
    return None


async def _unready() -> str:
    return "redis does not answer; start it"


async def _broken() -> str:
    raise OSError("no route")


async def _stuck() -> None:
    await asyncio.Event().wait()


@asynccontextmanager
async def serving(readiness: dict[str, ReadinessCheck] | None = None) -> AsyncIterator[httpx.AsyncClient]:
    metrics = Metrics()
    metrics.increment("astraflow_rpcs_total", rpc="/a.B/C", code="OK")
    server = HttpServer(create_app(metrics=metrics, status=_status, readiness=readiness))
    await server.start()
    running = asyncio.create_task(server.run())
    try:
        async with httpx.AsyncClient(base_url=f"http://{server.address}", timeout=10) as client:
            yield client
    finally:
        await server.stop(deadline_s=2)
        await asyncio.wait_for(running, 60)


async def test_the_pages_answer() -> None:
    async with serving() as client:
        assert (await client.get("/healthz")).text == "ok\n"
        assert (await client.get("/status")).json() == {"step": 3}
        page = await client.get("/metrics")
    assert page.headers["content-type"].startswith("text/plain; version=")
    assert 'astraflow_rpcs_total{code="OK",rpc="/a.B/C"} 1.0' in page.text


async def test_readiness_names_each_check_and_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("astraflow_kit.http.CHECK_DEADLINE_S", 0.05)
    checks: dict[str, ReadinessCheck] = {"a": _ready, "b": _unready, "c": _broken, "d": _stuck}
    async with serving(checks) as client:
        answer = await client.get("/readyz")
    assert answer.status_code == 503
    assert answer.json()["ready"] is False
    assert [(row["name"], row["ready"], row["reason"]) for row in answer.json()["checks"]] == [
        ("a", True, ""),
        ("b", False, "redis does not answer; start it"),
        ("c", False, "OSError: no route"),
        ("d", False, "no answer within 0.05 s"),
    ]


async def test_all_checks_passing_is_ready() -> None:
    async with serving({"a": _ready}) as client:
        answer = await client.get("/readyz")
    assert (answer.status_code, answer.json()["ready"]) == (200, True)


async def test_the_servers_signal_handlers_are_not_touched() -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    async with serving() as client:
        await client.get("/healthz")
        assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


async def test_a_taken_port_is_refused_with_the_remedy() -> None:
    async with serving() as client:
        port = client.base_url.port or 0
        second = HttpServer(create_app(metrics=Metrics(), status=_status), port=port)
        with pytest.raises(PortError, match=rf"127\.0\.0\.1:{port}.*another http_port"):
            await second.start()


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"GET /status HTTP/1.1\r\nHost: a",
        b"POST /status HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\nhalf",
        b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\nGET /healthz HTTP/1.1\r\n",
    ],
    ids=["nothing", "half a header", "half a body", "half of a second request"],
)
async def test_a_connection_whose_request_does_not_arrive_is_closed(
    sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TimedProtocol, "timeout_s", 0.2)
    async with serving() as client:
        reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
        writer.write(sent)
        await asyncio.wait_for(reader.read(), 60)  # to its end, which the server makes
        writer.close()


async def test_a_request_that_has_arrived_may_take_longer_to_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TimedProtocol, "timeout_s", 0.2)

    async def slow() -> None:
        await asyncio.sleep(0.6)

    async with serving({"slow": slow}) as client:
        assert (await client.get("/readyz")).json()["ready"]
