"""`async`: what is read from a run, and what follows from pairs of runs; figures by hand."""

from typing import Any

import pytest

from astraflow_bench.studies.disciplines import conclude, episode_s, measure
from astraflow_bench.studies.study import Result, Run
from support.study_results import result


def call(agent: str, number: int, planned_s: float, engine_s: float = 0.1) -> dict[str, Any]:
    return {
        "event": "timed.call", "agent": agent, "number": number, "planned_s": planned_s, "engine_s": engine_s
    }  # fmt: skip


# Two episodes; one has a second answer, one call took the engine longer than planned.
CALLS = [
    call("solver", 0, 2.0),
    call("verifier", 0, 1.0),
    call("solver", 1, 3.0),
    call("solver", 0, 4.0),
    call("verifier", 0, 2.0, engine_s=2.5),
    {"event": "episode.sample"},
]


def steps(policy: str, *, every_s: float, wait_s: float) -> list[dict[str, Any]]:
    return [
        {
            "kind": "step", "policy": policy, "step": number, "seconds": 100 + every_s * number, "wait_s": wait_s,
            "train_s": every_s - wait_s, "staleness_mean": 1.5, "staleness_max": 3.0, "reward_mean": 0.5,
        }
        for number in range(1, 9)
    ]  # fmt: skip


def test_an_episode_takes_answer_verdict_and_its_share_of_second_answers() -> None:
    assert episode_s(CALLS) == (2 + 4) / 2 + (1 + 2) / 2 + 3 / 2


def test_the_slower_policy_is_measured_after_the_pipeline_has_filled() -> None:
    metrics = [*steps("solver", every_s=9, wait_s=7), *steps("verifier", every_s=8, wait_s=7)]
    metrics[0]["seconds"] = -500.0
    account = {"ingested": 260, "evaluated": 60, "dropped": {"stale": 4}}
    summary = {"trajectories": account, "heldout_metrics": {"team": 0.7}}
    figures = measure(Run(summary=summary, metrics=metrics, events=CALLS)).figures
    assert figures["step_s"] == 9
    # 16 episodes of 6 s in 16 slots.
    assert figures["bound_s"] == 6
    assert figures["of_bound"] == pytest.approx(6 / 9)
    assert (figures["wait_s"], figures["train_s"]) == (7, 2)
    assert figures["stale"] == 4 / 200
    assert figures["late"] == 1 / 5
    assert figures["staleness_max"] == 3


def timed(arm: str, seed: int, step_s: float, *, reward: float = 0.5) -> Result:
    return result(arm, seed, step_s=step_s, bound_s=4.5, of_bound=4.5 / step_s, solver=reward, verifier=0.8)


def test_arms_are_compared_by_seed_and_only_where_both_are_there() -> None:
    results = [
        timed("phase-4", 0, 15),
        timed("phase-4", 1, 20),
        timed("phase-4", 2, 99),
        timed("phase-6", 0, 30),
    ]
    results += [timed("async-4", 0, 5, reward=0.52), timed("async-4", 1, 5, reward=0.5)]
    found = {(one.what, one.subject): one for one in conclude(results, ["4", "6"])}
    assert {subject for _, subject in found} == {"tail 4"}
    speed_up = found["async over phase barrier", "tail 4"]
    assert (speed_up.value, speed_up.least, speed_up.met) == (pytest.approx(3.5), 2.7, True)
    assert found["async, of the bound", "tail 4"].value == pytest.approx(0.9)
    assert found["reward of the solver, async less phase", "tail 4"].value == pytest.approx(0.01)
    assert found["reward of the solver, async less phase", "tail 4"].unit == "± 0.01 (n 2)"
    # Of 4.5 + 1.8 s of work, training has 2/7 of the devices; with all of them it takes 2/7 of 1.8 s.
    on_all = found["phase barrier on all devices, over async", "tail 4"].value
    assert on_all == pytest.approx((17.5 - 1.8 * 5 / 7) / 5)


def test_missed_targets_are_told() -> None:
    missed = conclude([timed("phase-4", 0, 13), timed("async-4", 0, 6)], ["4"])
    assert [one.what for one in missed if one.met is False] == [
        "async over phase barrier",
        "async, of the bound",
    ]
