"""What plug-ins are called with, and what they are given: a change here breaks recipes."""

import dataclasses
import inspect

import pytest
from typing_extensions import get_protocol_members

from astraflow import plugins

CALLS = {
    "Curator": {
        "observe": "(self, group: Group) -> None",
        "propose": "(self, tasks: Sequence[TaskSpec]) -> Sequence[TaskSpec]",
    },
    "Dataset": {
        "heldout": "(self, index: int) -> TaskSpec | None",
        "train": "(self, index: int) -> TaskSpec | None",
    },
    "Environment": {
        "close": "(self) -> None",
        "reset": "(self, task: TaskSpec) -> Observation",
        "step": "(self, action: Message) -> Observation",
    },
    "Filter": {"__call__": "(self, group: Group) -> bool"},
    "Measuring": {"measured": "(self, step: MeasuredStep) -> None"},
    "Policy": {
        "chat": (
            "(self, messages: Sequence[Message], *, max_new_tokens: int | None = None) -> GenerateResult"
        ),
        "decode": "(self, token_ids: Sequence[int]) -> str",
        "demonstrate": "(self, text: str) -> GenerateResult",
        "encode": "(self, messages: Sequence[Message] | str, *, tools: Sequence[Tool] = ()) -> list[int]",
        "extend": (
            "(self, token_ids: Sequence[int], messages: Sequence[Message], *, tools: Sequence[Tool] = ()) -> list[int]"
        ),
        "generate": (
            "(self, prompt_ids: Sequence[int], *, max_new_tokens: int | None = None) -> GenerateResult"
        ),
        "read": (
            "(self, token_ids: Sequence[int], *, tools: Sequence[Tool] = (), prompt_ids: Sequence[int] = ()) -> Message"
        ),
    },
    "Reward": {
        "__call__": "(self, task: TaskSpec, completion: str) -> float | Score | Awaitable[float | Score]"
    },
    "Scorer": {
        "__call__": (
            "(self, task: TaskSpec, completion: str, *, policies: Mapping[str, Policy] | None = None) -> Score"
        )
    },
    "Selector": {"select": "(self, candidates: Sequence[ReadyGroup], request: StepRequest) -> Sequence[str]"},
    "Workflow": {"run": "(self, task: TaskSpec, policies: Mapping[str, Policy]) -> Episode"},
}
BUILDER = {
    "__init__": "(self, policy: Policy, *, tools: Sequence[Tool] = ()) -> None",
    "add_generation": "(self, result: GenerateResult, *, prompt_ids: Sequence[int]) -> None",
    "add_messages": "(self, messages: Sequence[Message], *, max_tokens: int | None = None) -> bool",
    "add_prompt": "(self, messages: Sequence[Message]) -> None",
    "build": "(self, *, reward: float, metrics: Mapping[str, float] | None = None) -> Trajectory",
    "generate": "(self, *, max_new_tokens: int | None = None) -> GenerateResult",
    "reward_turn": "(self, reward: float) -> None",
}
VALUES = {
    "Episode": "trajectories metrics",
    "GenerateResult": "token_ids logprobs version_spans text finish_reason",
    "Group": "task trajectories policy role group_id verdict",
    "MeasuredStep": "policy step trajectories",
    "MeasuredTrajectory": "mismatch_kl node_id source version",
    "Message": "role content tool_calls tool_call_id name",
    "Observation": "messages reward done metrics tools",
    "ReadyGroup": "group_id trajectories arrival task_id role source",
    "RewardLimits": "processes timeout_s memory_mb max_calls timeout_reward",
    "Score": "reward metrics",
    "StepRequest": "policy step base_version num_groups max_staleness num_outstanding",
    "TaskSpec": "task_id messages data source priority",
    "ToolCall": "id name arguments",
    "Trajectory": (
        "policy token_ids loss_mask logprobs version_spans reward role finish_reason metrics turn_spans"
    ),
    "TrajectorySummary": (
        "reward trajectory_id num_tokens num_trainable_tokens min_version max_version finish_reason metrics "
        "response_digest node_id"
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_daemons_call_plugins_like_this(name: str) -> None:
    protocol = getattr(plugins, name)
    methods = [member for member in get_protocol_members(protocol) if hasattr(protocol, member)]
    assert {member: signature(protocol, member) for member in methods} == CALLS[name]


def test_workflows_build_trajectories_like_this() -> None:
    methods = inspect.getmembers(plugins.TrajectoryBuilder, inspect.isfunction)
    public = [name for name, _ in methods if not name.startswith("_") or name == "__init__"]
    assert {name: signature(plugins.TrajectoryBuilder, name) for name in public} == BUILDER


def signature(owner: type, member: str) -> str:
    """As it is written."""
    return str(inspect.signature(getattr(owner, member))).replace("'", "")


@pytest.mark.parametrize("name", VALUES)
def test_what_they_are_given_has_these_fields(name: str) -> None:
    fields = [field.name for field in dataclasses.fields(getattr(plugins, name))]
    assert fields == VALUES[name].split()
