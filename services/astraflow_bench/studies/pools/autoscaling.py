"""`autoscaling`: a pool that follows its target beside fixed pools, while answers become longer and shorter.

Invariant: arms differ in how many nodes there are and in nothing else; answers and steps take the time of a fixed
trace. docs/studies.md says what the trace is, and which fixed pool is compared with.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from statistics import fmean
from typing import Any

from astraflow_bench.figures import Figure
from astraflow_bench.studies.study import (
    Arm,
    Curve,
    Measured,
    Plot,
    Result,
    Run,
    Study,
    heldout_curve,
    mean_figure,
    paired,
)
from astraflow_bench.studies.timed_team import sleeping_steps

_LENGTHS = ((0, 1.0), (20, 2.0), (40, 0.5), (60, 1.0))
"""Of answers, from a version on."""
_STEPS = 80
_ANSWER_S, _STEP_S = 1.7, 4.0
_GROUPS, _GROUP_SIZE, _TASKS = 8, 4, 2
"""Groups of a step, answers of a group, and groups that a node samples at once."""
_MOST = 5
_FIXED = (1, 2, 3, 4, 5)
_LEAST_RATIO, _SLOWER = 0.87, 1.05
_FIRST = 3
"""Node-hours are counted from the end of this step: before it runs differ in what they warm up."""
AUTO = "auto"
_SCALING = {
    "pools": {"local": {"min_nodes": 1, "max_nodes": _MOST}},
    "start_nodes": 2,
    "window_s": 12,
    "start_s": 90,
    "shrink_after_s": 24,
}


def autoscaling_study() -> Study:
    """The study of one trace."""
    return Study(
        name="autoscaling",
        title="A pool that follows its target, beside fixed pools",
        intro=(
            f"The quickstart, whose answers take {_ANSWER_S:g} s at version 0 and twice, half and once that from "
            f"versions 20, 40 and 60 on, with steps of {_STEP_S:g} s: {nodes_needed(1.0):g}, {nodes_needed(2.0):g}, "
            f"{nodes_needed(0.5):g} and {nodes_needed(1.0):g} nodes keep the trainer busy. `{AUTO}` has "
            "`raas.autoscaling`, `fixed-N` N nodes. [What is compared](../studies.md#autoscaling)."
        ),
        recipe="quickstart",
        base=(
            f"run.steps={_STEPS}",
            f"raas.workflow={json.dumps(_workflow())}",
            f"raas.max_concurrent_tasks={_TASKS}",
            f"dataflow.group_size={_GROUP_SIZE}",
            f"dataflow.groups_per_step={_GROUPS}",
            "dataflow.evaluation={every_versions: 0, num_samples: 8, final_samples: 512}",
            "trainer.algorithm.drop_zero_advantage=false",
            "trainer.checkpoint_every_steps=1000",
            sleeping_steps(_STEP_S),
        ),
        arms=[
            Arm(name=AUTO, changes=(f"raas.autoscaling={json.dumps(_SCALING)}",)),
            *(
                Arm(name=f"fixed-{nodes}", changes=(_fixed(nodes),), seeds=1 if nodes == 1 else None)
                for nodes in _FIXED
            ),
        ],
        measure=measure,
        columns={
            "node_hours": "node-hours",
            "hours": "hours",
            "nodes": "nodes, mean",
            "wait": "trainer waits, of its time",
            "staleness": "staleness",
            "turns": "changes of direction",
            "changes": "changes",
            "heldout": "held-out reward",
        },
        plot=Plot(title="nodes by step", x="step", y="nodes", curve="nodes"),
        conclude=conclude,
    )


def nodes_needed(length: float) -> float:
    """Nodes that sample a step's answers in the time of a step."""
    return _GROUPS * _ANSWER_S * length / (_TASKS * _STEP_S)


def _workflow() -> dict[str, Any]:
    timed = {"seconds": _ANSWER_S, "slots": _TASKS * _GROUP_SIZE, "lengths": _LENGTHS}
    return {"use": "astraflow_bench.studies.pools.timed_turn:TimedTurn", "with": timed}


def _fixed(nodes: int) -> str:
    """A pool that is scaled between N and N nodes: started and measured like the other."""
    pools = {"local": {"min_nodes": nodes, "max_nodes": nodes}}
    return f"raas.autoscaling={json.dumps({**_SCALING, 'pools': pools, 'start_nodes': nodes})}"


def measure(run: Run) -> Measured:
    """Node-hours from the third step to the last, and what they brought."""
    steps = run.of_kind("step")
    first = steps[min(_FIRST, len(steps)) - 1]
    timed = [step for step in steps if step["step"] > first["step"]] or steps
    began_s = next(_at_s(event) for event in run.events if event.get("event") == "run.started")
    from_s, to_s = began_s + first["seconds"], began_s + steps[-1]["seconds"]
    lives = list(_lives(run.events, until_s=to_s))
    node_s = sum(max(0.0, min(end_s, to_s) - max(start_s, from_s)) for start_s, end_s in lives)
    waited, worked = (sum(step[name] for step in timed) for name in ("wait_s", "train_s"))
    target = run.summary.get("autoscaling") or {}
    return Measured(
        figures={
            "node_hours": node_s / 3600,
            "hours": (to_s - from_s) / 3600,
            "nodes": node_s / max(1e-9, to_s - from_s),
            "wait": waited / max(1e-9, waited + worked),
            "staleness": fmean(step["staleness_mean"] for step in timed),
            "turns": target.get("turns"),
            "changes": target["grown"] + target["shrunk"] if target else None,
            "heldout": run.summary["heldout_last"],
        },
        curves={
            "heldout": heldout_curve(run),
            "nodes": _nodes_by_step(steps, lives, began_s=began_s),
        },
    )


def _lives(events: Sequence[Mapping[str, Any]], *, until_s: float) -> Iterator[tuple[float, float]]:
    """When each process of a node began and ended; one that is still there ends with the run."""
    begun: dict[str, float] = {}
    for event in events:
        child = str(event.get("child", ""))
        if not child.startswith("node-"):
            continue
        if event.get("event") == "child.started":
            begun[child] = _at_s(event)
        elif event.get("event") == "child.ended" and child in begun:
            yield begun.pop(child), _at_s(event)
    yield from ((start_s, until_s) for start_s in begun.values())


def _at_s(event: Mapping[str, Any]) -> float:
    return datetime.fromisoformat(event["timestamp"]).timestamp()


def _nodes_by_step(
    steps: Sequence[Mapping[str, Any]], lives: Sequence[tuple[float, float]], *, began_s: float
) -> Curve:
    return [
        (step["step"], float(sum(start <= began_s + step["seconds"] < end for start, end in lives)))
        for step in steps[:-1]
    ]


def conclude(results: Sequence[Result]) -> list[Figure]:
    """Node-hours over those of the best fixed pool, by paired seeds."""
    equal = [(arm, pairs) for arm, pairs in _pairs(results) if _is_as_fast(pairs)]
    if not equal:
        return []
    arm, pairs = min(equal, key=lambda item: fmean(fixed.number("node_hours") for _, fixed in item[1]))
    ratios = [auto.number("node_hours") / fixed.number("node_hours") for auto, fixed in pairs]
    gaps = [auto.number("heldout") - fixed.number("heldout") for auto, fixed in pairs]
    turns = max(auto.number("turns") for auto, _ in pairs)
    return [
        mean_figure("node-hours over the best fixed pool", arm, ratios, most=_LEAST_RATIO),
        mean_figure("held-out reward, less its", arm, gaps),
        Figure(what="changes of direction", subject="most of a seed", value=turns, unit="", most=3),
    ]


def _pairs(results: Sequence[Result]) -> list[tuple[str, list[tuple[Result, Result]]]]:
    found = [(f"fixed-{nodes}", paired(results, AUTO, f"fixed-{nodes}")) for nodes in _FIXED]
    return [(arm, pairs) for arm, pairs in found if pairs]


def _is_as_fast(pairs: Sequence[tuple[Result, Result]]) -> bool:
    """Whether a fixed pool takes its steps, and so earns its reward, in the same time."""
    return fmean(fixed.number("hours") / auto.number("hours") for auto, fixed in pairs) <= _SLOWER
