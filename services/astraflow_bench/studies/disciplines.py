"""`async`: the same work in lock step, with one barrier a batch, one batch ahead, and asynchronously.

Invariant: arms of one tail differ in `dataflow.barrier`, `max_staleness` and, for the phase barrier, in when a node
makes the calls of a batch; tasks, trace, slots, model and optimizer steps are equal. docs/studies.md says what each
discipline is and derives the bound.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from astraflow_bench.figures import Figure
from astraflow_bench.studies.durations import ideal_step_s
from astraflow_bench.studies.study import Arm, Measured, Plot, Result, Run, Study, mean_figure, paired
from astraflow_bench.studies.timed_team import CALL, sleeping_steps

TAILS = (4, 6, 8, 10)
"""99th percentile of a call over its median."""
SLOTS = 16
_GROUPS, _GROUP_SIZE = 4, 4
_EPISODES = _GROUPS * _GROUP_SIZE
_MEDIANS_S = {"solver": 1.8, "verifier": 0.9}
_TRAIN_S = 1.8
_STALENESS = 4
_FIRST = 5
"""Steps before this one fill the pipeline, and are not timed."""
_LEAST_SPEED_UP, _LEAST_OF_BOUND = 2.7, 0.85
_DISCIPLINES: Mapping[str, tuple[str, int]] = {
    "phase": ("phase", 0),
    "batch": ("phase", 0),
    "ahead": ("batch", 1),
    "async": ("none", _STALENESS),
}
"""Barrier and `max_staleness` of each."""
_TEAM = {
    "retry": "fresh",
    "verifier_prompt": "{problem} Answer: {answer}",
    "answer_shown": r"\\boxed\{([^{}]*)\}",
}
_BASE = (
    "run.steps=20",
    f"raas.max_concurrent_tasks={_EPISODES * 3 // 2}",
    f"dataflow.group_size={_GROUP_SIZE}",
    f"dataflow.groups_per_step={_GROUPS}",
    "dataflow.admit=all",
    "dataflow.evaluation={every_versions: 0, num_samples: 8, final_samples: 256}",
    "trainer.algorithm.drop_zero_advantage=false",
    "trainer.checkpoint_every_steps=1000",
    sleeping_steps(_TRAIN_S),
)


def async_study(lengths: Sequence[float] = ()) -> Study:
    """The study of lognormal tails, or with `lengths` that of a recording, which is scaled to the same medians."""
    traces: dict[str, dict[str, Any]] = (
        {"replay": {"lengths": [float(length) for length in lengths]}}
        if lengths
        else {str(tail): {"tail": float(tail)} for tail in TAILS}
    )
    return Study(
        name="async",
        title="Asynchronous against synchronous, on the same trace",
        intro=(
            "Solver and verifier of `recipes/solver-verifier-tiny`, in four disciplines over the same imposed call and "
            f"step times: {SLOTS} slots, {_EPISODES} episodes a step, a median of {_MEDIANS_S['solver']} s for a "
            f"solver's call and {_MEDIANS_S['verifier']} s for a verifier's, steps of {_TRAIN_S} s. Arms are named by "
            "discipline and by the 99th percentile of a call over its median. [What is compared, and the "
            "bound](../studies.md#async)."
        ),
        recipe="solver-verifier-tiny",
        base=_BASE,
        arms=[
            Arm(name=f"{discipline}-{trace}", changes=_changes(discipline, settings))
            for trace, settings in traces.items()
            for discipline in _DISCIPLINES
        ],
        measure=measure,
        columns={
            "step_s": "s a step",
            "bound_s": "bound s",
            "of_bound": "bound / step",
            "wait_s": "trainer waits s",
            "train_s": "trainer works s",
            "staleness": "staleness",
            "staleness_max": "largest",
            "stale": "dropped as stale",
            "solver": "solver reward",
            "verifier": "verifier reward",
            "team": "team, held out",
            "late": "calls longer than planned",
        },
        plot=Plot(title="seconds a step, by discipline and tail", x="", y="s", figure="step_s"),
        conclude=lambda results: conclude(results, list(traces)),
    )


def _changes(discipline: str, trace: Mapping[str, Any]) -> tuple[str, ...]:
    barrier, staleness = _DISCIPLINES[discipline]
    phase = _EPISODES if discipline == "phase" else 0
    settings = {"team": _TEAM, "medians": _MEDIANS_S, "slots": SLOTS, "phase": phase, **trace}
    workflow = {"use": "astraflow_bench.studies.timed_team:TimedTeam", "with": settings}
    # JSON is YAML; the seed is no string.
    text = json.dumps(workflow).replace('"phase":', '"seed": {seed}, "phase":')
    return (
        f"raas.workflow={text}",
        f"dataflow.barrier={barrier}",
        f"dataflow.max_staleness={staleness}",
    )


def measure(run: Run) -> Measured:
    """Figures of the slower policy, after the pipeline has filled."""
    policies = {policy: run.of_kind("step", policy) for policy in ("solver", "verifier")}
    timed = {policy: steps[_FIRST - 1 :] or steps for policy, steps in policies.items()}
    slower = max(timed, key=lambda policy: _mean(timed[policy], "wait_s", "train_s"))
    step_s = _step_s(policies[slower])
    bound_s = ideal_step_s(call_s=_EPISODES * episode_s(run.events), slots=SLOTS, train_s=_TRAIN_S)
    calls = [event for event in run.events if event.get("event") == CALL]
    account = run.summary["trajectories"]
    training = account["ingested"] - account["evaluated"]
    return Measured(
        figures={
            "step_s": step_s,
            "bound_s": bound_s,
            "of_bound": bound_s / step_s,
            "wait_s": _mean(timed[slower], "wait_s"),
            "train_s": _mean(timed[slower], "train_s"),
            "staleness": _mean(timed[slower], "staleness_mean"),
            "staleness_max": max(step["staleness_max"] for steps in timed.values() for step in steps),
            "stale": account["dropped"].get("stale", 0) / max(training, 1),
            **{policy: _mean(steps, "reward_mean") for policy, steps in policies.items()},
            "team": run.summary["heldout_metrics"].get("team"),
            "late": fmean(call["engine_s"] > call["planned_s"] for call in calls),
        },
        curves={
            policy: [(step["step"], step["reward_mean"]) for step in steps]
            for policy, steps in policies.items()
        },
    )


def episode_s(events: Sequence[Mapping[str, Any]]) -> float:
    """Mean planned seconds of an episode's calls: an answer, a verdict, and a second answer where there was one."""
    planned: dict[tuple[str, int], list[float]] = {("solver", 1): []}
    for event in events:
        if event.get("event") == CALL:
            planned.setdefault((event["agent"], event["number"]), []).append(event["planned_s"])
    answers, verdicts, again = (planned[key] for key in (("solver", 0), ("verifier", 0), ("solver", 1)))
    return fmean(answers) + fmean(verdicts) + sum(again) / len(verdicts)


def conclude(results: Sequence[Result], traces: Sequence[str]) -> list[Figure]:
    """Speed-ups and equal rewards by paired seeds, for each trace that both arms have."""
    figures: list[Figure] = []
    for trace in traces:
        for baseline in ("phase", "batch", "ahead"):
            pairs = paired(results, f"{baseline}-{trace}", f"async-{trace}")
            if not pairs:
                continue
            ratios = [one.number("step_s") / other.number("step_s") for one, other in pairs]
            least = _LEAST_SPEED_UP if baseline == "phase" and trace != "replay" else None
            name = f"async over {baseline} barrier" if baseline != "ahead" else "async over one batch ahead"
            figures.append(mean_figure(name, f"tail {trace}", ratios, least=least))
            if baseline == "phase":
                figures += _of_phase(pairs, trace)
    return figures


def _of_phase(pairs: Sequence[tuple[Result, Result]], trace: str) -> list[Figure]:
    tail = f"tail {trace}"
    shares = [one.number("of_bound") for _, one in pairs]
    figures = [
        mean_figure("async, of the bound", tail, shares, least=_LEAST_OF_BOUND),
        Figure(
            what="phase barrier on all devices, over async",
            subject=tail,
            value=fmean(_colocated(*pair) for pair in pairs),
            unit="x, by arithmetic",
        ),
    ]
    for reward in ("solver", "verifier"):
        gaps = [other.number(reward) - one.number(reward) for one, other in pairs]
        figures.append(mean_figure(f"reward of the {reward}, async less phase", tail, gaps))
    return figures


def _colocated(phase: Result, asynchronous: Result) -> float:
    """Phase barrier whose trainer has the engines' devices too, over async: they are split in proportion to the work.

    More slots than episodes help nobody, so only training gets shorter.
    """
    bound_s = asynchronous.number("bound_s")
    share = _TRAIN_S / (_TRAIN_S + bound_s)
    step_s = phase.number("step_s") - _TRAIN_S * (1 - share)
    return step_s / asynchronous.number("step_s")


def _step_s(steps: Sequence[Mapping[str, Any]]) -> float:
    """From the end of the last step that fills the pipeline to the end of the last one."""
    timed = steps[min(_FIRST, len(steps) - 1) - 1 :]
    return float(timed[-1]["seconds"] - timed[0]["seconds"]) / (len(timed) - 1)


def _mean(steps: Sequence[Mapping[str, Any]], *names: str) -> float:
    return fmean(sum(step[name] for name in names) for step in steps)
