"""Environments of the package `verifiers` (release 0.4): one task of a taskset is played and graded.

Invariant: every model call goes to the endpoint of this episode, and what the environment could not finish or grade
ends the program with a reason and no reward. A program for `AgentProcess`, run by an interpreter that has `verifiers`:
`PYTHON -m astraflow_environment.adapters.verifiers_agent CONFIG`.
"""

import asyncio
import json
import math
import os
import sys
import urllib.request
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

_LIST_TIMEOUT_S = 10.0


def main() -> None:
    """Play the task of `ASTRAFLOW_TASK` in the environment that the argument configures, as JSON or the path of it."""
    (given,) = sys.argv[1:]
    config = json.loads(given if given.lstrip().startswith("{") else Path(given).read_text())
    task = json.loads(Path(os.environ["ASTRAFLOW_TASK"]).read_text())
    result = asyncio.run(play(config, index=int(task["data"]["idx"]), models=_models()))
    Path(os.environ["ASTRAFLOW_RESULT"]).write_text(json.dumps(result))


async def play(config: Mapping[str, Any], *, index: int, models: Sequence[str]) -> Mapping[str, Any]:
    """Return reward and metrics of the taskset's task `index`; each seat is played by the model of its name, others by
    the first. Ends the program when the episode has none.
    """
    import verifiers.v1 as vf

    env = vf.load_environment(vf.resolve_env_config({**config}))
    for seat, spec in env.config:
        if isinstance(spec, vf.AgentConfig) and spec.model is None and seat in models:
            spec.model = seat
    task = next(islice(iter(env.taskset), index, None), None)
    if task is None:
        sys.exit(
            f"taskset {env.config.taskset.id!r} has no task {index}; lower the data set's number of tasks"
        )
    client = vf.EvalClientConfig(base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY")
    async with env.serving():
        episode = await env.run_episode(task, vf.ModelContext(model=models[0], client=client))
    if not episode.ok:
        errors = [error for trace in episode.traces for error in trace.errors] + list(episode.errors)
        last = f"{errors[-1].type}: {errors[-1].message}" if errors else "it gives no reason"
        sys.exit(f"the episode failed: {last}")
    return _earned(episode.traces)


def _earned(traces: Sequence[Any]) -> Mapping[str, Any]:
    """The mean reward of the runs, and the mean of each metric and of each reward of several."""
    named: dict[str, list[float]] = {}
    for trace in traces:
        rewards = {name: found.value for name, found in trace.rewards.items() if found is not None}
        for name, value in {**trace.metrics, **(rewards if len(rewards) > 1 else {})}.items():
            if isinstance(value, int | float) and math.isfinite(value):
                named.setdefault(name, []).append(float(value))
    metrics = {name: sum(values) / len(values) for name, values in named.items()}
    return {"reward": sum(trace.reward for trace in traces) / len(traces), "metrics": metrics}


def _models() -> list[str]:
    """The models that the endpoint has."""
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/models",
        headers={"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
    )
    with urllib.request.urlopen(request, timeout=_LIST_TIMEOUT_S) as answer:
        return [model["id"] for model in json.load(answer)["data"]]


if __name__ == "__main__":
    main()
