"""`heterogeneous`: pools of three speeds, two of them in another region, that come and go, beside equal local ones.

Invariant: arms differ in which pools there are and when. Together their pools are as fast, and even without the one
that leaves fast enough, so what the trainer waits longer is what slow and remote pools cost it. docs/studies.md says
what is measured.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from statistics import fmean
from threading import Event
from typing import Any, cast

from astraflow.recipe.file import load_recipe
from astraflow_bench.figures import Figure
from astraflow_bench.studies.durations import Lognormal
from astraflow_bench.studies.pools.regions import Move, PoolPlace, run_in_regions
from astraflow_bench.studies.study import (
    Arm,
    Cell,
    Measured,
    Plot,
    Result,
    Run,
    Study,
    heldout_curve,
    mean_figure,
    paired,
)
from astraflow_bench.studies.timed_team import CALL, sleeping_steps
from astraflow_bench.wan.links import Place

LOCAL = PoolPlace(name="local", speed=1.0, place=Place.LOCAL)
NEAR = PoolPlace(name="far-60", speed=0.6, place=Place.REMOTE)
SLOW = PoolPlace(name="far-30", speed=0.3, place=Place.REMOTE)
POOLS = (LOCAL, NEAR, SLOW)
_EVEN = tuple(
    PoolPlace(name=f"even-{number}", speed=sum(pool.speed for pool in POOLS) / len(POOLS), place=Place.LOCAL)
    for number in (1, 2, 3)
)
_STEPS = 80
_ANSWER_S, _STEP_S = 2.2, 4.0
_GROUPS, _GROUP_SIZE, _TASKS = 8, 4, 4
"""Groups of a step, answers of a group, and groups that a node samples at once."""
_STALENESS, _TAIL = 4, 2.0
_ALL_THERE = 0.25
"""Share of the steps in which pools start, which are not timed."""
_MOST_WAIT = 0.02
_POOL_COLUMNS = {
    "answers": "answers a step",
    "transfer_s": "s a version's transfer",
    "join_s": "s to its first answer",
    "swap_share": "of its time, swapping weights",
}
HOMOGENEOUS, HETEROGENEOUS = "homogeneous", "heterogeneous"
MOVES = {
    HOMOGENEOUS: tuple((0.0, pool.name, True) for pool in _EVEN),
    HETEROGENEOUS: (
        (0.0, LOCAL.name, True),
        (0.05, NEAR.name, True),
        (0.1, SLOW.name, True),
        (0.5, NEAR.name, False),
        (0.65, NEAR.name, True),
        (0.8, SLOW.name, False),
    ),
}
"""Share of the steps, pool, and whether it joins or leaves: shares, so that a short run has all of them."""


def moves(planned: Iterable[Sequence[Any]], steps: int) -> list[Move]:
    """Which pools come and go, by the (share of the steps, pool, joins) that a recipe says."""
    pools = {pool.name: pool for pool in (*POOLS, *_EVEN)}
    return [
        Move(step=int(share * steps), pool=pools[name], joins=bool(joins)) for share, name, joins in planned
    ]


def heterogeneous_study() -> Study:
    """The study of three pools."""
    return Study(
        name="heterogeneous",
        title="Pools of several speeds and regions, beside equal local ones",
        intro=(
            f"The quickstart with answers of {_ANSWER_S:g} s and steps of {_STEP_S:g} s, for which a trainer needs "
            f"{needed():.0%} of what one pool of full speed samples. `{HETEROGENEOUS}` has such a pool, one at 60 % "
            "and one at 30 % of its speed, these behind 300 ms and 4 Gbit/s; they join after 5 % and 10 % of the "
            "steps, the first leaves at 50 % and is back at 65 %, the second leaves at 80 %. "
            f"`{HOMOGENEOUS}` has three local pools of the same speed together. [What is "
            "measured](../studies.md#heterogeneous)."
        ),
        recipe="quickstart",
        base=(
            f"run.steps={_STEPS}",
            f"raas.max_concurrent_tasks={_TASKS}",
            f"dataflow.group_size={_GROUP_SIZE}",
            f"dataflow.groups_per_step={_GROUPS}",
            f"dataflow.max_staleness={_STALENESS}",
            "dataflow.evaluation={every_versions: 0, num_samples: 8, final_samples: 512}",
            "trainer.algorithm.drop_zero_advantage=false",
            "trainer.checkpoint_every_steps=1000",
            sleeping_steps(_STEP_S),
        ),
        arms=[Arm(name=arm, changes=(f"raas.workflow={json.dumps(_workflow(arm))}",)) for arm in MOVES],
        perform=_perform,
        measure=measure,
        columns={
            "step_s": "s a step",
            "wait_s": "trainer waits s",
            "longest_wait_s": "longest",
            "trainer_restarts": "trainer restarts",
            "staleness": "staleness",
            "stale": "dropped as stale",
            **{
                f"{pool.name}_{figure}": f"{pool.name}: {heading}"
                for pool in POOLS
                for figure, heading in _POOL_COLUMNS.items()
            },
            "heldout": "held-out reward",
        },
        plot=Plot(title="what the trainer waits in a step", x="", y="s", figure="wait_s"),
        conclude=conclude,
    )


def needed() -> float:
    """What a step needs of a pool of full speed, over what that samples in the time of a step."""
    slots = _TASKS * _GROUP_SIZE
    return _GROUPS * _GROUP_SIZE * _ANSWER_S * Lognormal.mean(_TAIL) / (slots * _STEP_S)


def _workflow(arm: str) -> dict[str, Any]:
    timed = {"seconds": _ANSWER_S, "slots": _TASKS * _GROUP_SIZE, "tail": _TAIL, "moves": MOVES[arm]}
    return {"use": "astraflow_bench.studies.pools.timed_turn:TimedTurn", "with": timed}


def _perform(cell: Cell, folder: Path, stopped: Event) -> tuple[dict[str, Any], Path]:
    recipe = load_recipe(cell.path, overrides=cell.overrides).recipe
    planned = cast("list[list[Any]]", recipe.raas.workflow.settings["moves"])
    return run_in_regions(cell, folder, moves(planned, recipe.policy("solver").steps), stopped)


def measure(run: Run) -> Measured:
    """Waits of the trainer once all pools have joined, and of each pool what it did while it was there."""
    steps = run.of_kind("step")
    timed = steps[int(_ALL_THERE * len(steps)) :]
    began_s = next(_at_s(event) for event in run.events if event.get("event") == "run.started")
    ended_s = [began_s + step["seconds"] for step in steps]
    account = run.summary["trajectories"]
    figures: dict[str, float | None] = {
        "step_s": fmean(step["wait_s"] + step["train_s"] for step in timed),
        "wait_s": fmean(step["wait_s"] for step in timed),
        "longest_wait_s": max(step["wait_s"] for step in timed),
        "trainer_restarts": run.summary["restarts"].get("trainer-solver", 0),
        "staleness": fmean(step["staleness_mean"] for step in timed),
        "stale": account["dropped"].get("stale", 0) / max(1, account["ingested"] - account["evaluated"]),
        "heldout": run.summary["heldout_last"],
    }
    for pool in POOLS:
        figures |= {
            f"{pool.name}_{name}": value
            for name, value in _pool_figures(pool.name, run.events, ended_s).items()
        }
    return Measured(figures=figures, curves={"heldout": heldout_curve(run)})


def _pool_figures(
    pool: str, events: Sequence[Mapping[str, Any]], ended_s: Sequence[float]
) -> dict[str, float | None]:
    """Throughput and idle times of one pool in the stays that it had; nothing of one that never joined."""
    stays = list(_stays(pool, events, until_s=ended_s[-1]))
    own = [event for event in events if event["log"] == f"node-{pool}"]
    answers = [_at_s(event) for event in own if event.get("event") == CALL]
    fetched = [event["seconds"] for event in own if event.get("event") == "weights.fetched"]
    swapped = [event["seconds"] for event in own if event.get("event") == "weights.activated"]
    there_s = sum(end_s - start_s for start_s, end_s in stays)
    if not stays or not answers:
        return dict.fromkeys(_POOL_COLUMNS)
    # Who is there before the first step waits for a model to be made, too.
    joined_s = [start_s for start_s, _ in stays if start_s >= ended_s[0]]
    firsts = [next((at - start_s for at in answers if at >= start_s), None) for start_s in joined_s]
    known = [first for first in firsts if first is not None]
    num_steps = sum(start_s <= at < end_s for at in ended_s for start_s, end_s in stays)
    return {
        "answers": len(answers) / max(1, num_steps),
        # The first one of a stay is a snapshot, or all that was missed.
        "transfer_s": fmean(fetched[len(stays) :] or fetched) if fetched else None,
        "join_s": fmean(known) if known else None,
        "swap_share": sum(swapped) / there_s,
    }


def _stays(
    pool: str, events: Sequence[Mapping[str, Any]], *, until_s: float
) -> Iterator[tuple[float, float]]:
    """When a pool joined and left."""
    joined_s: float | None = None
    for event in events:
        if event.get("pool") != pool:
            continue
        if event.get("event") == "pool.joined":
            joined_s = _at_s(event)
        elif event.get("event") == "pool.left" and joined_s is not None:
            yield joined_s, _at_s(event)
            joined_s = None
    if joined_s is not None:
        yield joined_s, until_s


def _at_s(event: Mapping[str, Any]) -> float:
    return datetime.fromisoformat(event["timestamp"]).timestamp()


def conclude(results: Sequence[Result]) -> list[Figure]:
    """What the other pools cost the trainer and the policy, by paired seeds."""
    pairs = paired(results, HOMOGENEOUS, HETEROGENEOUS)
    if not pairs:
        return []
    waits = [
        (mixed.number("wait_s") - alone.number("wait_s")) / alone.number("step_s") for alone, mixed in pairs
    ]
    gaps = [mixed.number("heldout") - alone.number("heldout") for alone, mixed in pairs]
    return [
        mean_figure("longer wait of the trainer, of a step", HETEROGENEOUS, waits, most=_MOST_WAIT),
        mean_figure("held-out reward, less that of equal local pools", HETEROGENEOUS, gaps),
    ]
