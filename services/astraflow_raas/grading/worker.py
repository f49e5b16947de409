"""`python -m astraflow_raas.grading.worker`: makes the recipe's reward and grades what comes on its standard input.

Invariant: the reward runs on the main thread, so it may use alarms; what it prints goes to the node's standard error,
and answers go over a descriptor of their own. It asks to be replaced when its memory has grown, after a MemoryError and
after `max_calls`. `process` starts it and kills it when a call overruns.
"""

import json
import os
import resource
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from astraflow.errors import PluginError
from astraflow.plugins import MissingCapability, Reward, RewardFailed
from astraflow.recipe.plugin_settings import PluginSettings
from astraflow_kit.plugins import RecipeSource, describe, make
from astraflow_kit.sandbox.confinement import limit_resources
from astraflow_raas.grading.wire import MAX_TEXT_CHARS, line, score_fields, score_of, task_of


def main() -> None:
    """Make the reward that the first line names, then answer each line that follows."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    order = json.loads(sys.stdin.buffer.readline())
    if sys.platform == "linux":  # data instead of address space: libraries map far more than they use
        limit_resources({"RLIMIT_DATA": order["memory_mb"] * 2**20, "RLIMIT_CORE": 0})
    try:
        reward = _make(order)
    except PluginError as error:
        answers.write(line({"refused": error.message[:MAX_TEXT_CHARS]}))
        return
    answers.write(line({"ready": True}))
    for num_calls, call in enumerate(sys.stdin.buffer, start=1):
        answer = _grade(reward, json.loads(call))
        leave = answer.pop("out_of_memory", False) or num_calls >= order["max_calls"]
        answers.write(line(answer | {"leave": bool(leave or _has_grown(order["memory_mb"]))}))


def _make(order: Mapping[str, Any]) -> Reward:
    recipe = order["recipe"]
    folder = Path(recipe["folder"]) if recipe["folder"] else None
    source = RecipeSource(name=recipe["name"], text=recipe["text"], folder=folder)
    return make(PluginSettings.model_validate(order["plugin"]), protocol=Reward, source=source)


def _grade(reward: Reward, call: Mapping[str, Any]) -> dict[str, object]:
    try:
        return score_fields(score_of(reward(task_of(call["task"]), call["completion"])))
    except MissingCapability as error:
        return {"missing": str(error)[:MAX_TEXT_CHARS]}
    except RewardFailed as error:
        return {"failed": str(error)[:MAX_TEXT_CHARS], "reason": error.reason}
    except Exception as error:  # noqa: BLE001 - the reward may raise anything; the node names it
        text = describe(error)[:MAX_TEXT_CHARS]
        return {"failed": text, "reason": "reward_error", "out_of_memory": isinstance(error, MemoryError)}


def _has_grown(memory_mb: int) -> bool:
    """Whether the process holds half of what it may. Not `ru_maxrss`: an exec keeps that of the process before."""
    if sys.platform != "linux":
        return False
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() > memory_mb * 2**20 // 2


if __name__ == "__main__":
    main()
