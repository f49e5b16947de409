"""The observer keeps what daemons answer over real gRPC, through silence, restarts and their end."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from astraflow.client import AsyncClient
from astraflow.dataflow.v1 import run_pb2
from astraflow_launcher.run.observer import Observer
from astraflow_launcher.run.processes import Supervisor
from support import scripted_daemons
from support.scripted_daemons import POLICY, IdleProcess, ScriptedNode, ScriptedTrainer, serving
from support.scripted_dataflow import eventually

NOBODY = "127.0.0.1:1"
"""A privileged port on which nothing listens: refused at once."""


@dataclass
class Scene:
    """An observer of a scripted server; trainers and nodes are added by the test."""

    server: scripted_daemons.ScriptedServer
    observer: Observer
    supervisor: Supervisor
    folder: Path

    async def child(self, name: str) -> IdleProcess:
        process = await IdleProcess.start(self.supervisor, self.folder, name=name)
        self.observer.watch_restarts(process.child)
        return process

    async def trainer(self) -> IdleProcess:
        process = await self.child("trainer")
        self.observer.watch_trainer(POLICY, process.child)
        return process

    async def node(self) -> IdleProcess:
        process = await self.child("node-1")
        self.observer.watch_node("node-1", process.child)
        return process

    @asynccontextmanager
    async def observing(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.observer.run())
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    def version_numbers(self) -> list[int]:
        return [version.version for version in self.observer.observation.versions.get(POLICY, [])]

    def step_numbers(self) -> list[int]:
        return [point.step for point in self.observer.observation.steps]

    async def steps_are(self, *steps: int) -> None:
        await eventually(lambda: self.step_numbers() == list(steps), what=f"steps {steps}")


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    server = scripted_daemons.ScriptedServer()
    async with (
        serving(server) as address,
        AsyncClient(address) as client,
        Supervisor(stop_grace_s=1) as top,
    ):
        yield Scene(server, Observer(client, "run-1", period_s=0.02), top, tmp_path)


async def test_the_answers_of_every_daemon_are_kept(scene: Scene) -> None:
    scene.server.status.state = run_pb2.RUN_STATE_FINISHED
    trainer, node = await scene.trainer(), await scene.node()
    async with serving(ScriptedTrainer(steps=[1, 2])) as first, serving(ScriptedNode(tokens=77)) as second:
        trainer.publish(first)
        node.publish(second)
        await scene.observer.round()
    seen = scene.observer.observation
    assert seen.run_finished
    assert seen.policies() == [POLICY]
    assert (seen.trainers[POLICY].step, seen.nodes["node-1"].tokens) == (2, 77)
    assert (seen.unreachable, seen.restarts) == ({}, {"trainer": 0, "node-1": 0})
    assert scene.observer.updated.is_set()
    assert seen.seconds > 0


async def test_versions_are_collected_once_and_in_order(scene: Scene) -> None:
    await scene.observer.round()
    assert scene.version_numbers() == []
    for announced in ([0, 1, 2], [], [3], [4, 5]):
        scene.server.announce(*announced)
        await scene.observer.round()
    assert scene.version_numbers() == [0, 1, 2, 3, 4, 5]
    assert scene.server.num_listings == 3


async def test_a_version_announced_between_status_and_list_displaces_none(scene: Scene) -> None:
    scene.server.announce(0)
    await scene.observer.round()
    scene.server.announce(1)
    scene.server.before_listing = lambda: scene.server.announce(scene.server.versions[-1].version + 1)
    await scene.observer.round()
    scene.server.before_listing = lambda: None
    await scene.observer.round()
    assert scene.version_numbers() == list(range(len(scene.server.versions)))


async def test_two_rounds_at_once_take_a_version_in_once(scene: Scene) -> None:
    scene.server.announce(0, 1)
    await asyncio.gather(scene.observer.round(), scene.observer.round())
    assert scene.server.num_listings <= 2
    assert scene.version_numbers() == [0, 1]


async def test_a_resumed_run_of_more_versions_than_a_page_is_collected_whole(scene: Scene) -> None:
    scene.server.announce(*range(2500))
    await scene.observer.round()
    assert scene.version_numbers() == list(range(2500))


async def test_a_server_that_does_not_answer_is_recorded_until_it_does(scene: Scene) -> None:
    scene.server.failure = grpc.StatusCode.UNAVAILABLE
    await scene.observer.round()
    assert "scripted" in scene.observer.observation.unreachable["dataflow"]
    scene.server.failure = None
    await scene.observer.round()
    assert scene.observer.observation.unreachable == {}


async def test_a_node_that_does_not_answer_is_recorded_until_it_does_and_hides_no_other(scene: Scene) -> None:
    scene.server.announce(0)
    node = await scene.node()
    node.publish(NOBODY)
    await scene.observer.round()
    assert list(scene.observer.observation.unreachable) == ["node-1"]
    assert scene.version_numbers() == [0]
    async with serving(ScriptedNode(tokens=5)) as address:
        node.publish(address)
        await scene.observer.round()
    assert scene.observer.observation.unreachable == {}
    assert scene.observer.observation.nodes["node-1"].tokens == 5


async def test_a_daemon_that_ended_is_no_longer_expected_to_answer(scene: Scene) -> None:
    trainer = await scene.trainer()
    trainer.publish(NOBODY)
    async with scene.observing():
        await eventually(lambda: POLICY in scene.observer.observation.unreachable, what="it is recorded")
        await trainer.end()
        await eventually(lambda: not scene.observer.observation.unreachable, what="it is removed")


async def test_a_step_carries_its_metrics_and_times(scene: Scene) -> None:
    trainer = await scene.trainer()
    async with serving(ScriptedTrainer(steps=[1])) as address:
        trainer.publish(address)
        async with scene.observing():
            await scene.steps_are(1)
    point = scene.observer.observation.steps[0]
    assert (point.policy, point.metrics) == (POLICY, {"reward_mean": 0.1, "wait_s": 0.25, "train_s": 1.5})
    first_reward_s = scene.observer.observation.first_reward_s
    assert first_reward_s is not None
    assert point.seconds <= first_reward_s <= scene.observer.elapsed_s


async def test_a_restarted_trainer_is_followed_on_from_the_last_step(scene: Scene) -> None:
    trainer = await scene.trainer()
    async with scene.observing():
        async with serving(ScriptedTrainer(steps=[1, 2])) as address:
            trainer.publish(address)
            await scene.steps_are(1, 2)
        await trainer.restart()
        second_life = ScriptedTrainer(steps=[1, 2, 3])
        async with serving(second_life) as address:
            trainer.publish(address)
            await scene.steps_are(1, 2, 3)
            await eventually(lambda: not scene.observer.observation.unreachable, what="it answers again")
    assert second_life.asked_after == [2]
    assert scene.observer.observation.restarts == {"trainer": 1}


async def test_a_broken_stream_is_taken_up_where_it_broke(scene: Scene) -> None:
    trainer, script = await scene.trainer(), ScriptedTrainer(steps=[1])
    async with scene.observing():
        async with serving(script) as address:
            trainer.publish(address)
            await scene.steps_are(1)
        script.steps += [2, 3]
        async with serving(script) as address:
            trainer.publish(address)
            await scene.steps_are(1, 2, 3)
    assert script.asked_after == [0, 1]


async def test_steps_that_arrive_just_before_a_trainer_ends_are_not_lost(scene: Scene) -> None:
    trainer, script = await scene.trainer(), ScriptedTrainer(steps=[1])
    async with scene.observing(), serving(script) as address:
        trainer.publish(address)
        await scene.steps_are(1)
        script.steps += range(2, 50)
        script.ending = True
        await trainer.end()  # the process is gone before anybody asks again
        await scene.steps_are(*range(1, 50))
