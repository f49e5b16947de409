"""`two-policies`: solver and verifier trained together, against each alone, in games that do not meet each other.

The arrangements and targets are those of `astraflow_bench.policies`; here every run is a cell of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

from astraflow_bench.figures import Figure
from astraflow_bench.policies import APART, MAX_NO_CREDIT, trial_of
from astraflow_bench.studies.study import (
    Arm,
    Measured,
    Plot,
    Result,
    Run,
    Study,
    error_of,
    mean_figure,
    paired,
)

_POLICIES = ("solver", "verifier")
_NOISE = 2.0
"""Standard errors by which training together may be lower."""


def two_policies_study() -> Study:
    """Both policies trained, then each with the other as it starts."""
    alone = [
        Arm(name=f"{policy}-alone", changes=(f"policies.{other}.train=false",))
        for policy, other in zip(_POLICIES, reversed(_POLICIES), strict=True)
    ]
    return Study(
        name="two-policies",
        page="two-policies-study",
        title="Two policies together and alone, as a study",
        intro=(
            "`recipes/solver-verifier-tiny` with a game of its own for each policy, so that together and alone are the "
            "same task. What was measured before, and wall time: [two-policies.md](two-policies.md)."
        ),
        recipe="solver-verifier-tiny",
        base=APART,
        arms=[Arm(name="together"), *alone],
        measure=measure,
        columns={
            "solver": "solver, mean reward",
            "verifier": "verifier, mean reward",
            "solver_heldout": "solver, held out",
            "verifier_heldout": "verifier, held out",
            "no_credit": "dropped as no_credit",
        },
        plot=Plot(title="training reward of the solver", x="step", y="mean reward", curve="solver"),
        conclude=conclude,
    )


def measure(run: Run) -> Measured:
    """Training and held-out reward of every policy that was trained."""
    found = trial_of(run.metrics, run.summary, seed=0)
    figures: dict[str, float | None] = {"no_credit": found.no_credit}
    for policy, training in found.trainings.items():
        figures |= {policy: training.mean_reward, f"{policy}_heldout": training.heldout}
    curves = {
        policy: [
            (step["step"], step["reward_mean"])
            for step in run.of_kind("step", policy)
            if "reward_mean" in step
        ]
        for policy in found.trainings
    }
    return Measured(figures=figures, curves=curves)


def conclude(results: Sequence[Result]) -> list[Figure]:
    """By how many standard errors a policy earns more together than alone, in training."""
    figures = []
    for policy in _POLICIES:
        gaps = [
            one.number(policy) - other.number(policy)
            for one, other in paired(results, "together", f"{policy}-alone")
        ]
        if not gaps:
            continue
        error = error_of(gaps)
        figures.append(mean_figure("reward, together less alone", policy, gaps))
        if error > 0:
            value = fmean(gaps) / error
            figures.append(
                Figure(what="the same", subject=policy, value=value, unit="standard errors", least=-_NOISE)
            )
    dropped = [one.number("no_credit") for one in results if one.arm == "together"]
    if dropped:
        most = max(dropped)
        figures.append(
            Figure(what="dropped as no_credit", subject="together", value=most, unit="", most=MAX_NO_CREDIT)
        )
    return [figure for figure in figures if figure.value is not None and not math.isnan(figure.value)]
