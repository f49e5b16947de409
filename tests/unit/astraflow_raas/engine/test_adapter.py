"""A policy that is an adapter in another policy's engine: versions side by side, each call under one of them."""

import asyncio
from pathlib import Path

import pytest

from astraflow.plugins import VersionSpan
from astraflow_raas.engine.adapter import AdapterEngine
from astraflow_raas.engine.base import EngineRefused, EngineUnavailable, Generation, PauseMode
from support.fake_engine import FakeAdapterServer
from support.raas_parts import generate_call
from support.scripted_dataflow import eventually

FOLDER = Path("/mirror/solver")


@pytest.fixture
def server() -> FakeAdapterServer:
    return FakeAdapterServer(version=0)


@pytest.fixture
async def engine(server: FakeAdapterServer) -> AdapterEngine:
    engine = AdapterEngine(server, policy_id="solver")
    await engine.swap(model_dir=FOLDER, version=3)
    return engine


async def _held(
    engine: AdapterEngine, server: FakeAdapterServer, rid: str
) -> "asyncio.Task[list[Generation]]":
    """A call that the engine has begun and does not answer yet."""
    server.may_answer.clear()
    before = len(server.requests)
    task = asyncio.create_task(engine.generate([generate_call(rid)]))
    await eventually(lambda: len(server.requests) > before, what=f"call {rid} is sent")
    return task


async def test_its_calls_are_sampled_under_its_adapter_and_named_after_its_version(
    engine: AdapterEngine, server: FakeAdapterServer
) -> None:
    (name,) = server.adapters
    assert name.startswith("solver@3-")
    assert server.adapters[name] == FOLDER
    (answer,) = await engine.generate([generate_call("a;")])
    assert answer.spans == (VersionSpan(0, len(answer.token_ids), 3),)
    assert server.adapter_requests == [(name, ("a;",))]
    assert await engine.served_version() == 3
    assert engine.slots is server.slots


async def test_a_call_ends_under_the_version_that_it_began_under(
    engine: AdapterEngine, server: FakeAdapterServer
) -> None:
    older = next(iter(server.adapters))
    call = await _held(engine, server, "a;")
    await engine.swap(model_dir=FOLDER, version=4)
    assert server.paused == [], "nothing is paused"
    assert len(server.adapters) == 2, "it is still needed"
    server.may_answer.set()
    (answer,) = await call
    (later,) = await engine.generate([generate_call("b;")])
    assert [span.version for span in (*answer.spans, *later.spans)] == [3, 4]
    await eventually(lambda: server.unloaded == [older], what="the older version is unloaded")


async def test_a_repair_aborts_what_was_sampled_wrongly(
    engine: AdapterEngine, server: FakeAdapterServer
) -> None:
    call = await _held(engine, server, "a;")
    await engine.swap(model_dir=FOLDER, version=3, running=PauseMode.ABORT)
    assert server.aborted == ["a;"]
    server.may_answer.set()
    await call
    await eventually(lambda: len(server.adapters) == 1, what="the wrong one is unloaded")


async def test_a_version_that_the_engine_refuses_leaves_the_older_one_serving(
    engine: AdapterEngine, server: FakeAdapterServer
) -> None:
    server.swap_fault = EngineRefused("another rank")
    with pytest.raises(EngineRefused, match="another rank"):
        await engine.swap(model_dir=FOLDER, version=4)
    assert await engine.served_version() == 3
    assert (await engine.generate([generate_call("a;")]))[0].spans[0].version == 3


async def test_once_closed_it_samples_nothing_and_the_engine_goes_on(
    engine: AdapterEngine, server: FakeAdapterServer
) -> None:
    await engine.close()
    assert server.adapters == {}
    assert not server.closed
    with pytest.raises(EngineUnavailable, match="no version of policy 'solver' is loaded"):
        await engine.generate([generate_call("a;")])
    assert await server.generate([generate_call("b;")])


async def test_an_engine_that_has_died_is_no_fault_of_closing(
    engine: AdapterEngine, server: FakeAdapterServer
) -> None:
    server.up = False
    await engine.close()
    with pytest.raises(EngineUnavailable):
        await engine.served_version()
