"""Every finished episode reaches the server, and once acknowledged never again, whatever streams do."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from astraflow.client import AsyncClient
from astraflow.dataflow.v1 import trajectory_service_pb2 as outcomes
from astraflow.errors import PermissionError_
from astraflow.rollout.v1 import trajectory_pb2
from astraflow_kit.metrics import Metrics
from astraflow_raas.push.pushing import Pusher
from astraflow_raas.push.spool import SpoolLimits
from astraflow_raas.push.spool_files import SpoolFiles
from support.manual_clock import ManualClock
from support.scripted_dataflow import RunningServer, accepted, eventually, result

LIMITS = SpoolLimits(window_episodes=4)


def on_disk(folder: Path) -> list[str]:
    return [found.episode_id for _, found in SpoolFiles(folder).recover()]


def push(pusher: Pusher, name: str) -> "asyncio.Task[outcomes.PushResult]":
    """Push an episode and do not wait for its answer."""
    episode = trajectory_pb2.Episode(run_id="run-1", task_id="task-1", episode_id=name)
    return asyncio.create_task(pusher.push(episode))


def push_all(pusher: Pusher, *names: str) -> "list[asyncio.Task[outcomes.PushResult]]":
    return [push(pusher, name) for name in names]


def numbered(count: int) -> list[str]:
    return [f"e{number}" for number in range(count)]


async def arrive(server: RunningServer, count: int) -> None:
    """Wait until the server has had so many pushes."""
    await eventually(lambda: len(server.script.pushes) == count, what=f"{count} episodes arrive")


def arrived(server: RunningServer) -> list[str]:
    return [pushed.episode_id for pushed in server.script.pushes]


@asynccontextmanager
async def pushing(server: RunningServer, **options: Any) -> AsyncIterator[Pusher]:
    async with AsyncClient(server.address) as client, asyncio.TaskGroup() as running:
        pusher = Pusher(client, **({"metrics": Metrics(), "limits": LIMITS} | options))
        running.create_task(pusher.run())
        try:
            yield pusher
        finally:
            await pusher.stop(deadline_s=1.0)


async def test_each_push_gets_its_own_answer(server: RunningServer) -> None:
    poison = result(outcomes.OUTCOME_POISON, reason="nan_logprob")
    server.script.judge = lambda pushed: poison if pushed.episode_id == "bad" else accepted(pushed)
    async with pushing(server) as pusher:
        good, bad = await asyncio.gather(push(pusher, "good"), push(pusher, "bad"))
    assert (good.outcome, bad) == (outcomes.OUTCOME_ACCEPTED, poison)


async def test_the_window_is_never_exceeded_and_all_get_through(server: RunningServer) -> None:
    server.script.ack = asyncio.Event()
    async with pushing(server) as pusher:
        waiting = push_all(pusher, *numbered(20))
        await arrive(server, 4)
        await asyncio.sleep(0.05)
        assert len(server.script.pushes) == 4
        server.script.ack.set()
        await asyncio.gather(*waiting)
    assert arrived(server) == numbered(20)
    assert server.script.max_unacked <= 4


async def test_what_is_finished_together_is_pushed_together(server: RunningServer) -> None:
    async with pushing(server) as pusher:
        await asyncio.gather(*push_all(pusher, *numbered(4)))
        await push(pusher, "alone")
    assert server.script.packs == [4, 1]


async def test_a_push_has_no_more_episodes_than_the_contract_allows(server: RunningServer) -> None:
    async with pushing(server, limits=SpoolLimits()) as pusher:
        await asyncio.gather(*push_all(pusher, *numbered(100)))
    assert server.script.packs == [64, 36]


async def test_one_response_may_acknowledge_several_pushes(server: RunningServer) -> None:
    server.script.ack = asyncio.Event()
    async with pushing(server) as pusher:
        waiting = []
        for number in range(3):
            waiting += push_all(pusher, f"e{number}")
            await arrive(server, number + 1)
        server.script.ack.set()
        await asyncio.gather(*waiting)
    assert (server.script.packs, server.script.acknowledged) == ([1, 1, 1], [3])


@pytest.mark.parametrize("wrong", ["results_left_out", "pushes_ahead"])
async def test_a_response_that_is_not_to_what_was_sent_acknowledges_none(
    server: RunningServer, wrong: str
) -> None:
    setattr(server.script, wrong, 1)
    async with pushing(server) as pusher:
        await asyncio.gather(*push_all(pusher, *numbered(3)))
    assert arrived(server) == numbered(3) * 2


async def test_what_the_server_cannot_take_in_yet_is_pushed_again_with_all_after_it(
    server: RunningServer,
) -> None:
    answers = iter([outcomes.OUTCOME_ACCEPTED, outcomes.OUTCOME_RETRY])
    server.script.judge = lambda _: result(next(answers, outcomes.OUTCOME_ACCEPTED), reason="UNKNOWN_VERSION")
    async with pushing(server) as pusher:
        pushed = await asyncio.gather(*push_all(pusher, *numbered(3)))
    assert {found.outcome for found in pushed} == {outcomes.OUTCOME_ACCEPTED}
    assert arrived(server) == [*numbered(3), "e1", "e2"]


async def test_unacknowledged_episodes_are_pushed_again_on_a_new_stream(server: RunningServer) -> None:
    server.script.ack = asyncio.Event()
    async with pushing(server) as pusher:
        waiting = push_all(pusher, *numbered(3))
        await arrive(server, 3)
        server.script.break_streams()
        await eventually(lambda: server.script.push_streams == 2, what="a new stream is opened")
        server.script.ack.set()
        await asyncio.gather(*waiting)
    assert arrived(server) == numbered(3) * 2


async def test_a_server_restart_loses_nothing(server: RunningServer) -> None:
    async with pushing(server) as pusher:
        await push(pusher, "before")
        await server.stop()
        waiting = push_all(pusher, *numbered(6))
        await asyncio.sleep(0.1)
        await server.restart()
        await asyncio.gather(*waiting)
    assert arrived(server) == ["before", *numbered(6)]


async def test_a_caller_that_leaves_does_not_take_its_episode_along(server: RunningServer) -> None:
    server.script.ack = asyncio.Event()
    async with pushing(server) as pusher:
        leaving = push(pusher, "finished")
        await eventually(lambda: server.script.pushes, what="the episode arrives")
        leaving.cancel()
        await asyncio.sleep(0)
        assert pusher.num_unacked == 1
        server.script.ack.set()
        assert await pusher.flush(deadline_s=5.0)


async def test_recent_episodes_are_pushed_again_after_data_was_replaced(server: RunningServer) -> None:
    async with pushing(server) as pusher:
        await push(pusher, "recent")
        pusher.push_recent_again()
        await arrive(server, 2)
        assert await pusher.flush(deadline_s=5.0)
    assert arrived(server) == ["recent", "recent"]


async def test_a_full_spool_makes_callers_wait_instead_of_growing(server: RunningServer) -> None:
    server.script.ack = asyncio.Event()
    limits = SpoolLimits(max_episodes=2, window_episodes=1, retain_acked_s=0.0)
    async with pushing(server, limits=limits) as pusher:
        changes: list[str] = []
        pusher.on_change = lambda: changes.append(pusher.waiting_for)
        waiting = push_all(pusher, *numbered(5))
        await eventually(lambda: pusher.num_unacked == 2, what="the spool is full")
        await asyncio.sleep(0.02)
        assert pusher.num_unacked == 2
        assert changes == ["spool_full"]
        server.script.ack.set()
        await asyncio.gather(*waiting)
        assert (changes[-1], pusher.waiting_for) == ("", "")
    assert len(server.script.pushes) == 5


async def test_what_is_acknowledged_and_not_yet_safe_counts_against_the_bound(server: RunningServer) -> None:
    clock = ManualClock()
    limits = SpoolLimits(max_episodes=2, retain_acked_s=3.0)
    async with pushing(server, limits=limits, clock=clock) as pusher:
        await asyncio.gather(*push_all(pusher, "e0", "e1"))
        waiting = push(pusher, "e2")
        await eventually(lambda: pusher.waiting_for == "spool_full", what="the spool is full")
        assert pusher.num_unacked == 0
        assert len(server.script.pushes) == 2
        clock.now_s += 3.5
        await waiting
        assert pusher.num_kept == 1


async def test_the_next_process_first_pushes_what_was_left(server: RunningServer, tmp_path: Path) -> None:
    server.script.ack = asyncio.Event()
    async with pushing(server, files=SpoolFiles(tmp_path)) as pusher:
        waiting = push_all(pusher, *numbered(3))
        await arrive(server, 3)
        for task in waiting:
            task.cancel()
    async with pushing(server, files=SpoolFiles(tmp_path)) as pusher:
        assert (pusher.num_unacked, pusher.waiting_for) == (3, "spool_recovery")
        await arrive(server, 6)
        server.script.ack.set()
        await eventually(lambda: pusher.waiting_for == "", what="all are answered")
    assert arrived(server) == numbered(3) * 2


async def test_files_go_when_the_server_has_their_episodes(server: RunningServer, tmp_path: Path) -> None:
    clock = ManualClock()
    async with pushing(server, files=SpoolFiles(tmp_path), clock=clock) as pusher:
        await push(pusher, "e0")
        assert on_disk(tmp_path) == ["e0"]
        clock.now_s += 3.5
        await push(pusher, "e1")
        assert pusher.num_kept == 1
    assert on_disk(tmp_path) == ["e1"]


async def test_a_disk_in_the_way_costs_no_episode(server: RunningServer, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file where the folder should be")
    async with pushing(server, files=SpoolFiles(tmp_path / "taken" / "spool")) as pusher:
        answer = await push(pusher, "e0")
    assert answer.outcome == outcomes.OUTCOME_ACCEPTED


async def test_flushing_gives_up_at_its_deadline(server: RunningServer) -> None:
    server.script.ack = asyncio.Event()
    async with pushing(server) as pusher:
        waiting = push(pusher, "stuck")
        await eventually(lambda: server.script.pushes, what="the episode arrives")
        assert not await pusher.flush(deadline_s=0.05)
        waiting.cancel()


@pytest.mark.parametrize("fault", ["UNAVAILABLE", "UNKNOWN", "ABORTED"])
async def test_a_server_in_trouble_is_tried_again(server: RunningServer, fault: str) -> None:
    server.script.push_fault = grpc.StatusCode[fault]
    async with pushing(server) as pusher:
        waiting = push(pusher, "e0")
        await eventually(lambda: server.script.push_streams >= 2, what="the stream is opened again")
        server.script.push_fault = None
        assert (await waiting).outcome == outcomes.OUTCOME_ACCEPTED


async def test_a_server_that_refuses_the_node_ends_the_service(server: RunningServer) -> None:
    server.script.push_fault = grpc.StatusCode.PERMISSION_DENIED
    async with AsyncClient(server.address) as client:
        pusher = Pusher(client, metrics=Metrics(), limits=LIMITS)
        waiting = push(pusher, "e0")
        with pytest.raises(PermissionError_, match="as the test asked"):
            await asyncio.wait_for(pusher.run(), 10.0)
        waiting.cancel()
