"""One engine after the other: brought up with the right weights, watched, replaced, ended with the node."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from astraflow.dataflow.v1 import version_pb2
from astraflow_kit.metrics import Metrics
from astraflow_raas.engine.base import EngineDoubtful, EngineUnavailable
from astraflow_raas.engine.server_info import EngineUnsuitable
from astraflow_raas.loops import LoopService
from astraflow_raas.node.engine_host import AdapterHost, ChildHost, HostSettings, RemoteHost
from astraflow_raas.policies.served_policy import ServedPolicy
from astraflow_raas.policies.weight_sync import WeightSync
from support.fake_engine import FakeAdapterServer, FakeEngine
from support.raas_node import BytelessWeights
from support.raas_parts import generate_call, write_tokenizer
from support.scripted_dataflow import eventually

FAST = HostSettings(start_timeout_s=5.0, stall_s=0.1, first_backoff_s=0.01, watch_s=0.02)
CALL = generate_call()


def fake_process(version: int, *, fault: Exception | None) -> Mock:
    """Stands where a child process is; it has ended once `exited` is set."""
    process = Mock(engine=FakeEngine(version=version), exited=asyncio.Event(), end=AsyncMock())
    process.wait_healthy = AsyncMock(side_effect=fault)
    process.ended = process.exited.wait
    return process


class Setup:
    """A host whose engines are up when they are started, but for those that are sick."""

    def __init__(self, folder: Path) -> None:
        self.policy = ServedPolicy("solver")
        source = BytelessWeights(write_tokenizer(folder))
        self.sync = WeightSync(self.policy, source=source, metrics=Metrics(), evaluation_hold_s=1.0)
        self.started: list[tuple[int, Mock]] = []
        self.num_sick = 0
        self.fault: Exception = EngineUnavailable("it never became healthy")
        parts: Any = (self.policy, self.sync, self.launch)
        self.host = ChildHost(*parts, replica=self.policy.engines[0], settings=FAST, metrics=Metrics())

    async def launch(self, *, model_dir: Path, version: int) -> Mock:
        process = fake_process(version, fault=self.fault if self.num_sick > 0 else None)
        self.num_sick = max(0, self.num_sick - 1)
        self.started.append((version, process))
        return process

    def announce(self, version: int) -> None:
        self.sync.announce(version_pb2.Version(policy_id="solver", version=version))

    async def engines(self, number: int) -> Mock:
        await eventually(lambda: len(self.started) >= number, what=f"engine {number} is started")
        await eventually(lambda: self.policy.is_served, what=f"engine {number} is up")
        return self.started[number - 1][1]


@asynccontextmanager
async def running(*services: LoopService) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(service.run()) for service in services]
    yield
    for service in reversed(services):
        await service.stop(deadline_s=2.0)
    await asyncio.gather(*tasks)


@pytest.fixture
async def setup(tmp_path: Path) -> AsyncIterator[Setup]:
    setup = Setup(tmp_path)
    async with running(setup.host, setup.sync):
        yield setup
    await setup.policy.close()


@pytest.fixture
async def first(setup: Setup) -> Mock:
    """The first engine, which serves version 0."""
    setup.announce(0)
    return await setup.engines(1)


async def test_no_engine_is_started_before_there_are_weights(setup: Setup) -> None:
    await asyncio.sleep(0.05)
    assert setup.started == []
    setup.announce(3)
    await setup.engines(1)
    assert setup.policy.version == 3


async def test_a_dead_engine_is_replaced_with_the_served_weights(setup: Setup, first: Mock) -> None:
    setup.announce(1)
    await eventually(lambda: setup.policy.version == 1, what="version 1 serves")
    first.exited.set()
    await setup.engines(2)
    assert [version for version, _ in setup.started] == [0, 1]
    assert first.end.called
    assert setup.host.num_restarts == 1


async def test_calls_wait_for_the_next_engine(setup: Setup, first: Mock) -> None:
    setup.num_sick = 1
    first.exited.set()
    await eventually(lambda: not setup.policy.is_served, what="the engine is lost")
    generation = await setup.policy.generate(CALL, key="task")
    assert generation.token_ids
    # The second one never became healthy; the third answered.
    assert len(setup.started) == 3
    assert setup.host.num_restarts == 2


async def test_the_death_of_one_engine_costs_only_the_calls_in_it(tmp_path: Path) -> None:
    setup = Setup(tmp_path)
    policy = setup.policy = ServedPolicy("solver", num_engines=2)
    sync = WeightSync(policy, source=setup.sync.source, metrics=Metrics(), evaluation_hold_s=1.0)
    parts: Any = (policy, sync, setup.launch)
    hosts = [ChildHost(*parts, replica=each, settings=FAST, metrics=Metrics()) for each in policy.engines]
    async with running(*hosts, sync):
        sync.announce(version_pb2.Version(policy_id="solver", version=0))
        await eventually(lambda: all(each.engine for each in policy.engines), what="both engines are up")
        for _, process in setup.started:
            process.engine.may_answer.clear()
        calls = [asyncio.create_task(policy.generate(generate_call(f"{n};"), key=n)) for n in range(4)]
        await eventually(lambda: [each.num_calls for each in policy.engines] == [2, 2], what="all are sent")
        dead, other = policy.engines
        victim = next(process for _, process in setup.started if process.engine is dead.engine)
        setup.num_sick, victim.engine.up = 3, False
        victim.engine.may_answer.set()
        victim.exited.set()
        await eventually(lambda: dead.engine is None, what="the loss is noticed")
        other.engine.may_answer.set()  # type: ignore[union-attr]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert sorted(isinstance(answer, EngineUnavailable) for answer in answers) == [
            False,
            False,
            True,
            True,
        ]
        assert (await policy.generate(CALL, key="next")).token_ids, "the other one goes on"
        await eventually(lambda: dead.engine, what="the next one is up")
        assert [host.num_restarts for host in hosts] == [4, 0]
    await policy.close()


async def test_an_engine_that_never_comes_up_ends_the_node(tmp_path: Path) -> None:
    setup = Setup(tmp_path)
    setup.num_sick = 100
    async with running(setup.sync):
        setup.announce(0)
        with pytest.raises(EngineUnavailable, match="never became healthy"):
            await asyncio.wait_for(setup.host.run(), 60.0)
    assert setup.host.num_restarts == 5


async def test_an_engine_that_refuses_the_model_ends_the_node_at_once(tmp_path: Path) -> None:
    setup = Setup(tmp_path)
    setup.num_sick, setup.fault = 1, EngineUnsuitable("model_type is 'gemma'")
    async with running(setup.sync):
        setup.announce(0)
        with pytest.raises(EngineUnsuitable, match="gemma"):
            await asyncio.wait_for(setup.host.run(), 60.0)
    ((_, process),) = setup.started
    assert process.end.called


async def test_a_model_that_was_served_before_is_tried_again(setup: Setup, first: Mock) -> None:
    setup.num_sick, setup.fault = 2, EngineUnsuitable("a tensor holds NaN")
    first.exited.set()
    await setup.engines(4)
    assert setup.host.num_restarts == 3


async def test_a_silent_engine_that_cannot_prove_health_is_replaced(setup: Setup, first: Mock) -> None:
    first.engine.may_answer.clear()
    waiting = asyncio.create_task(setup.policy.generate(CALL, key="task"))
    await asyncio.sleep(0.3)
    # Silent, but able to sample: long answers are no fault.
    assert len(setup.started) == 1
    first.engine.up = False
    await eventually(lambda: len(setup.started) == 2, what="the stuck engine is replaced")
    assert first.end.called
    first.engine.may_answer.set()
    with pytest.raises(EngineUnavailable):
        await waiting


async def test_an_engine_that_falls_silent_while_it_takes_up_weights_is_replaced(
    setup: Setup, first: Mock
) -> None:
    first.engine.may_swap.clear()
    setup.announce(1)
    await eventually(lambda: first.engine.paused, what="the swap has begun")
    await asyncio.sleep(0.3)
    # Slow, but it answers: large weights are no fault.
    assert not first.end.called
    first.engine.up = False
    await eventually(lambda: first.end.called, what="the stuck engine is ended")
    first.engine.may_swap.set()  # as when its process is gone
    await setup.engines(2)
    assert setup.policy.version == 1


async def test_an_engine_that_is_not_trusted_is_replaced(setup: Setup, first: Mock) -> None:
    setup.policy.engines[0].distrust(EngineDoubtful("it may still be paused"))
    assert not setup.policy.is_served, "no call is sent to it any more"
    await setup.engines(2)
    assert first.end.called


async def test_an_engine_that_no_node_can_use_ends_the_node_at_once(tmp_path: Path) -> None:
    setup, engine = Setup(tmp_path), FakeEngine(version=0)
    engine.introduction_fault = EngineUnsuitable("it is SGLang 0.4.0")
    host = RemoteHost(
        setup.policy,
        setup.sync,
        lambda: engine,
        replica=setup.policy.engines[0],
        settings=FAST,
        metrics=Metrics(),
    )
    async with running(setup.sync):
        setup.announce(0)
        with pytest.raises(EngineUnsuitable, match=r"0\.4\.0"):
            await asyncio.wait_for(host.run(), 60.0)
    assert host.num_restarts == 0


async def test_an_idle_engine_that_hangs_is_replaced_and_named_until_the_next_one_serves(
    setup: Setup, first: Mock
) -> None:
    setup.num_sick = 1
    first.engine.check_health = asyncio.Event().wait
    await eventually(lambda: setup.host.fault, what="the hang is noticed")
    assert setup.host.fault is not None
    assert (setup.host.fault.reason, setup.host.fault.engine) == ("engine_hung", 1)
    await setup.engines(3)
    assert setup.host.fault is None
    assert first.end.called


async def test_an_idle_engine_that_proves_itself_stays(setup: Setup, first: Mock) -> None:
    first.engine.check_health = AsyncMock()
    await eventually(lambda: first.engine.check_health.await_count > 3, what="it is asked again and again")
    assert len(setup.started) == 1


async def test_stopping_ends_the_engine(setup: Setup, first: Mock) -> None:
    await setup.host.stop(deadline_s=2.0)
    assert first.end.called
    assert not setup.policy.is_served


async def test_a_remote_engine_is_given_the_nodes_version_and_checked(tmp_path: Path) -> None:
    setup, engine = Setup(tmp_path), FakeEngine(version=None)
    policy = setup.policy
    host = RemoteHost(
        policy, setup.sync, lambda: engine, replica=policy.engines[0], settings=FAST, metrics=Metrics()
    )
    async with running(host, setup.sync):
        setup.announce(6)
        await eventually(lambda: policy.is_served, what="the engine is ready")
        assert engine.swaps == [(tmp_path, 6)]
        assert engine.num_resumed == 1, "whoever had it before may have left it paused"
        # Its owner restarts it with other weights: the node notices and gives it the right ones again.
        engine.version = None
        await eventually(lambda: len(engine.swaps) == 2 and policy.is_served, what="the engine is corrected")
        assert policy.version == 6
    assert engine.closed


class Shared:
    """A base policy with an engine, and a policy that is an adapter in it."""

    def __init__(self, folder: Path) -> None:
        self.base, self.policy = ServedPolicy("base"), ServedPolicy("solver")
        source = BytelessWeights(write_tokenizer(folder))
        self.sync = WeightSync(self.policy, source=source, metrics=Metrics(), evaluation_hold_s=1.0)
        parts: Any = (self.policy, self.sync, self.base.engines[0])
        self.host = AdapterHost(*parts, replica=self.policy.engines[0], settings=FAST, metrics=Metrics())

    def engine_is_ready(self) -> FakeAdapterServer:
        server = FakeAdapterServer(version=0)
        self.base.engines[0].ready(server, version=0)
        return server


@pytest.fixture
async def shared(tmp_path: Path) -> AsyncIterator[Shared]:
    shared = Shared(tmp_path)
    async with running(shared.host, shared.sync):
        shared.sync.announce(version_pb2.Version(policy_id="solver", version=2))
        yield shared
    await shared.policy.close()
    await shared.base.close()


async def test_an_adapter_waits_for_the_engine_of_its_base_and_follows_it(shared: Shared) -> None:
    await asyncio.sleep(0.05)
    assert not shared.policy.is_served
    first = shared.engine_is_ready()
    await eventually(lambda: shared.policy.is_served, what="the adapter serves")
    assert shared.policy.version == 2
    shared.base.engines[0].lost()
    first.up = False
    await eventually(lambda: not shared.policy.is_served, what="the loss is noticed")
    second = shared.engine_is_ready()
    await eventually(lambda: shared.policy.is_served, what="the next engine has the adapter")
    assert len(second.adapters) == 1
    assert (await shared.policy.generate(CALL, key="task")).spans[0].version == 2
