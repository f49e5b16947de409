"""A taskset of the real package `verifiers` is trained on: its harness asks this node's endpoint, its graders say the
reward. In an environment of its own (`make verifiers-env`), which pins another `openai`.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from astraflow.columns import decode_columns
from astraflow.plugins import TaskSpec
from astraflow.rollout.v1 import trajectory_pb2
from astraflow_raas.agents.program import AgentFailed
from astraflow_raas.workflows.agent_process import AgentProcess, AgentProcessSettings
from support.agents import ScriptedPolicy, serving_agents, trained_text, whole_text
from support.dataflow_world import World
from support.raas_node import local_node
from support.source_tree import REPOSITORY

PYTHON = REPOSITORY / ".venv-verifiers" / "bin" / "python"
TASKSETS = REPOSITORY / "tests" / "support" / "verifiers_tasks"
CONFIG = {"taskset": {"id": "reverse-words"}, "agent": {"runtime": {"type": "subprocess"}}}

pytestmark = [
    pytest.mark.ci,
    pytest.mark.integration,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not PYTHON.exists(), reason="run `make verifiers-env`"),
]


def settings(config: Mapping[str, Any] = CONFIG) -> dict[str, Any]:
    """What a recipe says of the workflow."""
    command = [str(PYTHON), "-m", "astraflow_environment.adapters.verifiers_agent", json.dumps(config)]
    env = {"PYTHONPATH": f"{REPOSITORY / 'services'}:{TASKSETS}"}
    return {"command": command, "env": env, "reported_reward": True}


async def played(folder: Path, idx: int, *models: str, config: Mapping[str, Any] = CONFIG) -> Any:
    """The episode of one task, whose policies say the answer at the second asking."""

    async def no_reward(*_: object, **__: object) -> Any:
        raise AssertionError("the taskset grades")

    def answer(prompt: str) -> str:
        return "pots" if prompt.count("<assistant>") == 1 else "yes, it is pots"

    async with serving_agents() as endpoint:
        given = AgentProcessSettings.model_validate(settings(config))
        workflow = AgentProcess(
            settings=given, reward=no_reward, endpoint=endpoint, recipe_dir=folder, scratch_dir=folder
        )
        policies = {name: ScriptedPolicy(answer, name=name, role=name) for name in models or ("solver",)}
        return await workflow.run(TaskSpec("t", (), {"idx": idx}), policies)


async def test_what_the_harness_asks_is_one_trajectory_with_the_reward_of_the_taskset(tmp_path: Path) -> None:
    episode = await played(tmp_path, 1)
    (trajectory,) = episode.trajectories
    assert (
        whole_text(trajectory)
        == "<user>Reverse stop.¶<assistant>pots¶<user>Sure?¶<assistant>yes, it is pots¶"
    )
    assert trained_text(trajectory) == ["pots¶", "yes, it is pots¶"]
    # Right counts 1, short half; the last answer is right and not short.
    assert trajectory.reward == 1.0
    metrics = {"right": 1.0, "short": 0.0, "length": 15.0}
    assert {name: episode.metrics[name] for name in metrics} == metrics


async def test_a_seat_is_played_by_the_model_of_its_name(tmp_path: Path) -> None:
    episode = await played(tmp_path, 0, "other", "agent")
    assert [trajectory.role for trajectory in episode.trajectories] == ["agent"]
    assert episode.trajectories[0].reward == 0.0


@pytest.mark.parametrize(
    ("idx", "config", "why"),
    [
        (4, CONFIG, "the episode failed: TaskError: .* this grader is broken"),
        (9, CONFIG, "taskset 'reverse-words' has no task 9"),
        (0, {"taskset": {"id": "nowhere"}}, "nowhere"),
    ],
    ids=["grader", "number", "taskset"],
)
async def test_what_cannot_be_played_or_graded_fails_the_episode_with_its_reason(
    tmp_path: Path, idx: int, config: Mapping[str, Any], why: str
) -> None:
    with pytest.raises(AgentFailed, match=why):
        await played(tmp_path, idx, config=config)


async def test_a_step_is_trained_on_the_tokens_that_were_sampled(world: World, tmp_path: Path) -> None:
    use = "astraflow_raas.workflows.agent_process:AgentProcess"
    numbers = "astraflow_environment.adapters.task_numbers:TaskNumbers"
    overrides = [
        f"run.dataset={json.dumps({'use': numbers, 'with': {'num_train': 4}})}",
        f"raas.workflow={json.dumps({'use': use, 'with': settings()})}",
    ]
    raas = {"max_concurrent_tasks": 1, "episode_timeout_s": 300}
    await world.create_run(overrides=overrides, groups_per_step=1, raas=raas)
    trainer = await world.trainer()
    async with local_node(world.address, tmp_path, allow_recipe_code=True) as local:
        batch = None
        while not (batch and batch.items):
            batch = (await trainer.acquire(1, base_version=0, wait_s=30)).batch
        calls = {call.prompt_ids for request in local.engines["solver"].requests for call in request}
    for fetched in await trainer.fetch(1):
        columns = decode_columns(trajectory_pb2.Trajectory.FromString(fetched.body))
        assert tuple(columns.token_ids[: int(columns.loss_mask.argmax())].tolist()) in calls
    # No answer of this engine is right, and the last one may be short.
    assert {item.reward for item in batch.items} <= {0.0, 0.5}
