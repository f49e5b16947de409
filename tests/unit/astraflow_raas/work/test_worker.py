"""The working session against a real server: credits, leases, renewals, cancels, lost streams, drains."""

import asyncio
import math
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from unittest.mock import Mock, call

import grpc
import pytest

from astraflow.client import AsyncClient, RetryPolicy
from astraflow.dataflow.v1 import durability_pb2, run_service_pb2, task_service_pb2, version_pb2
from astraflow.errors import AstraflowError
from astraflow.rollout.v1 import task_pb2
from astraflow_kit.metrics import Metrics
from astraflow_raas.work.session import Failure
from astraflow_raas.work.worker import Worker
from support.scripted_dataflow import RunningServer, ScriptedDataflow, eventually, lease, running

ME = run_service_pb2.JoinRunRequest(
    run_id="run-1", node_id="node-1", incarnation=5, engines=["cpu"], max_concurrent_tasks=12
)


class ScriptedRunner:
    """Runs a lease until the test ends it, with a failure, an error or nothing."""

    def __init__(self) -> None:
        self.ends: defaultdict[str, asyncio.Future[Failure | None]] = defaultdict(asyncio.Future)
        self.started: list[str] = []
        self.member_ended: dict[str, Callable[[], None]] = {}
        self.cancelled: list[str] = []

    async def run(self, leased: task_pb2.Lease, *, member_ended: Callable[[], None]) -> Failure | None:
        self.member_ended[leased.lease_id] = member_ended
        self.started.append(leased.lease_id)
        try:
            return await self.ends[leased.lease_id]
        except asyncio.CancelledError:
            self.cancelled.append(leased.lease_id)
            raise

    def finish(self, lease_id: str) -> None:
        self.ends[lease_id].set_result(None)


@dataclass
class Setup:
    server: RunningServer
    script: ScriptedDataflow
    runner: ScriptedRunner
    state: task_service_pb2.Credits
    hooks: Mock
    worker: Worker
    task: "asyncio.Task[None]"

    @property
    def last_credits(self) -> task_service_pb2.Credits:
        return self.script.credits[-1]

    async def lease(self, *names: str) -> None:
        for name in names:
            self.script.send(lease=lease(name))
        wanted = {f"{name}#1" for name in names}
        await eventually(lambda: wanted <= set(self.runner.started), what=f"{names} are run")

    async def reported(self) -> task_service_pb2.LeaseFailure:
        """The only failure that the server is told."""
        await eventually(lambda: self.script.failures, what="the report")
        (failure,) = self.script.failures
        return failure

    async def holds(self, count: int) -> None:
        """Wait until so many leases are held."""
        await eventually(lambda: self.worker.num_held == count, what=f"{count} leases are held")

    async def offers(self, tasks: int) -> None:
        """Wait until the worker offers so many places."""
        await eventually(lambda: self.last_credits.tasks == tasks, what=f"{tasks} places are offered")

    async def opens_session(self, number: int) -> None:
        """Wait for the hello of a session."""
        await eventually(lambda: len(self.script.hellos) == number, what=f"session {number}")


@asynccontextmanager
async def working(script: ScriptedDataflow, **settings: float) -> AsyncIterator[Setup]:
    runner, hooks = ScriptedRunner(), Mock(reached=lambda _stage: None)
    state = task_service_pb2.Credits(serving_versions={"solver": 0})
    retry, metrics = RetryPolicy(total_s=5.0), Metrics()
    async with running(script) as server, AsyncClient(server.address, retry=retry) as client:
        joined = await client.call(client.runs.JoinRun, ME)
        parts = {"runner": runner, "state": lambda: state, "hooks": hooks, "metrics": metrics}
        worker = Worker(client, ME, joined=joined, group_size=4, **parts, **settings)
        task = asyncio.create_task(worker.run())
        await eventually(lambda: script.credits, what="the first credits")
        try:
            yield Setup(server, script, runner, state, hooks, worker, task)
        finally:
            await worker.stop(deadline_s=0.0)
            await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
async def setup() -> AsyncIterator[Setup]:
    async with working(ScriptedDataflow()) as ready:
        yield ready


async def test_a_session_opens_with_hello_and_credits_for_all_free_places(setup: Setup) -> None:
    assert (setup.script.hellos[0].node_id, setup.script.hellos[0].incarnation) == ("node-1", 5)
    assert setup.last_credits.tasks == 3
    assert dict(setup.last_credits.serving_versions) == {"solver": 0}


async def test_a_server_that_says_nothing_in_an_open_session_is_left_for_another_session() -> None:
    script = ScriptedDataflow(beat_s=math.inf)
    async with working(script, server_silence_s=0.5) as setup:
        await setup.lease("a")
        await setup.opens_session(2)
        await setup.opens_session(3)
        assert script.hellos[-1].held.lease_ids == ["a#1"], "what it holds goes on"
        script.beat_s = 0.1
        await eventually(lambda: len(script.hellos) > 3, what="the session that was open ends")
        await eventually(lambda: setup.worker.connected, what="another one")
        opened = len(script.hellos)
        await asyncio.sleep(1.5)
        assert len(script.hellos) == opened, "a server that beats keeps its nodes"


async def test_credits_follow_what_is_held(setup: Setup) -> None:
    await setup.lease("a", "b")
    setup.worker.state_changed()
    await setup.offers(1)
    assert setup.last_credits.leases_received == 2
    setup.runner.finish("a#1")
    await setup.offers(2)
    assert setup.last_credits.leases_received == 2
    setup.script.break_streams()
    await setup.opens_session(2)
    await eventually(lambda: not setup.last_credits.leases_received, what="a new stream counts from 0")
    assert setup.script.failures == []


async def test_a_place_is_free_when_its_episode_ends_and_not_only_with_its_group(setup: Setup) -> None:
    await setup.lease("a", "b")
    await setup.offers(1)
    for name in ("a#1", "a#1", "b#1", "b#1"):
        assert setup.last_credits.tasks == 1
        setup.runner.member_ended[name]()
    await setup.offers(2)
    setup.runner.finish("a#1")
    await setup.holds(1)
    await setup.lease("c")
    await setup.offers(1)


async def test_leases_are_confirmed_and_listed_again_by_the_next_session(setup: Setup) -> None:
    await setup.lease("a", "b")
    await eventually(lambda: setup.script.receipts == ["a#1", "b#1"], what="both are confirmed")
    assert not setup.script.hellos[0].held.lease_ids
    assert setup.script.hellos[0].HasField("held")
    setup.runner.finish("a#1")
    await setup.holds(1)
    setup.script.break_streams()
    await setup.opens_session(2)
    assert list(setup.script.hellos[1].held.lease_ids) == ["b#1"]


def watermark(position: int, incarnation: str) -> durability_pb2.Watermark:
    return durability_pb2.Watermark(durable_position=position, data_incarnation=incarnation)


async def test_announcements_marks_and_orders_to_drain_are_handed_on(setup: Setup) -> None:
    announced = version_pb2.Version(policy_id="solver", version=3)
    setup.script.send(version=announced)
    setup.script.send(watermark=watermark(17, "data-1"))
    setup.script.send(drain=task_service_pb2.Drain(reason="run_finished"))
    calls = [call.announce(announced), call.durable(17), call.drain_requested("run_finished")]
    await eventually(lambda: setup.hooks.mock_calls == calls, what="all three")


async def test_a_watermark_of_another_data_set_tells_that_data_was_lost(setup: Setup) -> None:
    setup.script.data_incarnation = "data-2"
    setup.script.send(watermark=watermark(3, "data-2"))
    setup.script.send(watermark=watermark(4, "data-2"))
    calls = [call.data_lost(), call.durable(3), call.durable(4)]
    await eventually(lambda: setup.hooks.mock_calls == calls, what="the watermarks")


async def test_evaluation_tasks_take_the_room_of_one_episode(setup: Setup) -> None:
    for index in range(4):
        setup.script.send(lease=lease(f"eval-{index}", members=(0,), required_versions={"solver": 0}))
    await setup.holds(4)
    setup.worker.state_changed()
    await setup.offers(2)


async def test_a_node_that_waits_offers_nothing_and_says_why(setup: Setup) -> None:
    setup.state.waiting_for = "engine_start"
    setup.worker.state_changed()
    await eventually(lambda: setup.last_credits.waiting_for == "engine_start", what="the reason is reported")
    assert setup.last_credits.tasks == 0


async def test_a_new_version_is_reported_at_once(setup: Setup) -> None:
    setup.state.serving_versions["solver"] = 4
    setup.worker.state_changed()
    await eventually(lambda: dict(setup.last_credits.serving_versions) == {"solver": 4}, what="version 4")


async def test_a_failure_is_reported_once_with_its_reason(setup: Setup) -> None:
    await setup.lease("a")
    setup.runner.ends["a#1"].set_result(Failure(reason="workflow_error", detail="x" * 5000, retryable=False))
    failure = await setup.reported()
    assert (failure.lease_id, failure.reason, failure.retryable) == ("a#1", "workflow_error", False)
    assert len(failure.detail.encode()) <= 2048


async def test_a_defect_while_running_gives_the_lease_back(setup: Setup) -> None:
    await setup.lease("a")
    setup.runner.ends["a#1"].set_exception(RuntimeError("a bug"))
    failure = await setup.reported()
    assert failure.retryable
    assert "RuntimeError: a bug" in failure.detail


async def test_a_cancelled_lease_is_stopped_and_not_reported(setup: Setup) -> None:
    await setup.lease("a", "b")
    setup.script.send(cancel=task_service_pb2.Cancel(lease_id="a#1", reason="lease_lost"))
    await setup.holds(1)
    assert setup.runner.cancelled == ["a#1"]
    assert setup.script.failures == []


async def test_held_leases_are_renewed_within_a_third_of_their_life() -> None:
    async with working(ScriptedDataflow(lease_ttl_s=0.3)) as setup:
        await setup.lease("a")
        await eventually(lambda: len(setup.script.renewals) >= 2, what="two renewals")
        assert setup.script.renewals[-1] == ["a#1"]


async def test_a_lost_stream_kills_nothing_and_the_new_one_renews_what_is_held(setup: Setup) -> None:
    await setup.lease("a", "b")
    renewals = len(setup.script.renewals)
    setup.script.break_streams()
    await setup.opens_session(2)
    await eventually(lambda: len(setup.script.renewals) > renewals, what="a renewal")
    assert sorted(setup.script.renewals[-1]) == ["a#1", "b#1"]
    assert setup.script.hellos[1].incarnation == setup.script.hellos[0].incarnation
    assert setup.runner.cancelled == []
    # The server decides what is still ours.
    setup.script.send(cancel=task_service_pb2.Cancel(lease_id="b#1", reason="lease_lost"))
    await eventually(lambda: setup.runner.cancelled == ["b#1"], what="the lost lease is dropped")


async def test_a_server_restart_is_survived(setup: Setup) -> None:
    await setup.lease("a")
    await setup.server.stop()
    await asyncio.sleep(0.2)
    await setup.server.restart()
    await setup.opens_session(2)
    assert setup.runner.cancelled == []
    await setup.lease("b")


async def test_a_new_data_set_on_the_server_is_noticed_when_joining_again(setup: Setup) -> None:
    setup.script.break_streams()
    await setup.opens_session(2)
    assert not setup.hooks.data_lost.called
    setup.script.data_incarnation = "data-2"
    setup.script.versions = [version_pb2.Version(policy_id="solver", version=9)]
    setup.script.break_streams()
    await eventually(lambda: setup.hooks.data_lost.call_count == 1, what="the loss is noticed")
    setup.hooks.announce.assert_called_with(setup.script.versions[0])


async def test_a_node_whose_name_was_taken_over_stops(setup: Setup) -> None:
    setup.script.join_fault = grpc.StatusCode.PERMISSION_DENIED
    setup.script.break_streams()
    with pytest.raises(AstraflowError, match="PERMISSION_DENIED"):
        await asyncio.wait_for(asyncio.shield(setup.task), 10.0)


async def test_the_same_lease_is_never_run_twice_at_a_time(setup: Setup) -> None:
    await setup.lease("a")
    setup.script.send(lease=lease("a"))
    await setup.lease("b")
    assert setup.runner.started == ["a#1", "b#1"]


async def test_a_drain_finishes_what_is_held_and_takes_nothing_new(setup: Setup) -> None:
    await setup.lease("a")
    draining = asyncio.create_task(setup.worker.drain(deadline_s=10.0))
    await eventually(lambda: setup.last_credits.waiting_for == "drain", what="the drain is announced")
    assert setup.last_credits.tasks == 0
    assert not setup.last_credits.serving_versions
    setup.script.send(lease=lease("late"))
    await eventually(lambda: setup.script.failure_of("late#1"), what="the late lease is given back")
    setup.runner.finish("a#1")
    await draining
    assert setup.worker.num_held == 0
    assert [failure.lease_id for failure in setup.script.failures] == ["late#1"]


async def test_what_a_drain_cannot_finish_is_given_back_at_no_cost(setup: Setup) -> None:
    await setup.lease("a", "b")
    setup.runner.finish("a#1")
    await setup.holds(1)
    await setup.worker.drain(deadline_s=0.05)
    failure = setup.script.failure_of("b#1")
    assert failure is not None
    assert (failure.reason, failure.retryable) == ("drain", True)
    assert setup.runner.cancelled == ["b#1"]
    assert setup.script.failure_of("a#1") is None
