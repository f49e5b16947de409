"""What a node and a reward's worker process say to each other: one JSON object a line, nothing that carries code.

Invariant: a line of the worker stays far below `LINE_BYTES`, whatever the reward returns or raises. Used by `process`
and `worker`.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, SupportsFloat

from astraflow.plugins import Message, RewardFailed, Score, TaskSpec, ToolCall
from astraflow.trajectories import MAX_METRICS

LINE_BYTES = 2**20
MAX_TEXT_CHARS = 2000


def call_line(task: TaskSpec, completion: str) -> bytes:
    """Encode one call. Raises RewardFailed for task data that is not JSON."""
    try:
        return line({"task": asdict(task), "completion": completion})
    except (TypeError, ValueError) as error:
        raise RewardFailed(
            f"task {task.task_id}: its data cannot be sent to a worker as JSON: {error}"
        ) from error


def task_of(sent: Mapping[str, Any]) -> TaskSpec:
    """Decode the task of a call."""
    messages = tuple(
        Message(**{**message, "tool_calls": tuple(ToolCall(**call) for call in message["tool_calls"])})
        for message in sent["messages"]
    )
    return TaskSpec(sent["task_id"], messages, sent["data"], source=sent["source"])


def score_of(value: object) -> Score:
    """Return what a reward returned as a Score. Raises RewardFailed for anything else."""
    if isinstance(value, Score):
        return value
    if not isinstance(value, SupportsFloat):
        raise RewardFailed(
            f"the reward returned {str(value)[:100]!r} of type {type(value).__name__}; return a number or a Score"
        )
    try:
        return Score(float(value))
    except OverflowError:  # the caller refuses it as it refuses a nan, with the place of the reward
        return Score(math.inf)


def score_fields(score: Score) -> dict[str, object]:
    """The part of a worker's answer that holds a score."""
    metrics = list(score.metrics.items())[:MAX_METRICS]
    return {
        "reward": float(score.reward),
        "metrics": {str(name)[:200]: float(value) for name, value in metrics},
    }


def line(message: Mapping[str, object]) -> bytes:
    """One message with its end."""
    return json.dumps(message).encode() + b"\n"
