"""`data-algorithms`: uniform sampling, dynamic sampling, GRESO and replay, by optimizer steps and by rollouts.

Invariant: arms differ in what the server does with groups and tasks; three keys of a recipe. Both comparisons are read
from the same runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from astraflow_bench.figures import Figure
from astraflow_bench.studies.study import (
    Arm,
    Measured,
    Plot,
    Result,
    Run,
    Study,
    curve_at,
    heldout_curve,
    mean_figure,
    mean_until,
    paired,
)

_ROOM = "astraflow_bench.studies.graded_sums"
_ROLLOUTS = 6000
"""Where accuracies are compared at equal rollouts."""
_STEPS = 30
_BASE = (
    "run.steps=50",
    f"run.dataset={_ROOM}:GradedSums",
    "policies.solver.model.warm_start="
    f'{{demonstrations: "{_ROOM}:demonstrations", steps: 400, batch_size: 64, learning_rate: 2.0e-3}}',
    "dataflow.groups_per_step=12",
    "dataflow.max_staleness=1",
    "dataflow.evaluation={every_versions: 5, num_samples: 256, final_samples: 384}",
    "trainer.optimizer.learning_rate=1e-4",
    "trainer.optimizer.eps=1e-8",
)
_DYNAMIC = 'dataflow.filters=["astraflow_dataflow.plugins.filters.drop_zero_advantage:DropZeroAdvantage"]'
_GRESO = (
    'dataflow.curators=[{use: "astraflow_dataflow.plugins.curators.greso:Greso", '
    "with: {easy_floor: 0.05, hard_floor: 0.3}}]"
)
_REPLAY = "dataflow.replay={ratio: 0.5, max_groups: 96, max_staleness: 64, max_uses: 16, order: uniform}"


def data_study() -> Study:
    """The four algorithms on a set of which 70 % teach nothing."""
    return Study(
        name="data-algorithms",
        title="Data algorithms, by steps and by rollouts",
        intro=(
            "A set of 320 problems: 35 % trivial, 30 % sums, 35 % without a solution; held out are other sums. "
            f"What is compared is the mean accuracy of all steps up to {_STEPS}, and of all generated rollouts up to "
            f"{_ROLLOUTS:,}; between evaluations it is interpolated. [More](../studies.md#data-algorithms)."
        ),
        recipe="quickstart",
        base=_BASE,
        arms=[
            Arm(name="uniform"),
            Arm(name="dynamic", changes=(_DYNAMIC,)),
            Arm(name="greso", changes=(_DYNAMIC, _GRESO)),
            Arm(name="replay", changes=(_DYNAMIC, _REPLAY)),
        ],
        measure=measure,
        columns={
            "at_steps": f"held out at step {_STEPS}",
            "at_rollouts": f"at {_ROLLOUTS} rollouts",
            "last": "final",
            "per_step": "rollouts a step",
        },
        plot=Plot(
            title="accuracy by generated rollouts", x="rollouts", y="held-out reward", curve="rollouts"
        ),
        conclude=conclude,
    )


def measure(run: Run) -> Measured:
    """Held-out reward by steps and by rollouts: all that were generated, in proportion to the steps."""
    curve = heldout_curve(run)
    account: Mapping[str, float] = run.summary["trajectories"]
    per_step = (account["ingested"] - account["evaluated"]) / run.summary["steps"]
    by_rollouts = [(version * per_step, reward) for version, reward in curve]
    return Measured(
        figures={
            "at_steps": curve_at(curve, _STEPS),
            "at_rollouts": curve_at(by_rollouts, _ROLLOUTS),
            "last": curve[-1][1],
            "per_step": per_step,
        },
        curves={"steps": curve, "rollouts": by_rollouts},
    )


def conclude(results: Sequence[Result]) -> list[Figure]:
    """What the algorithms are worth over the one before them, by paired seeds."""
    figures = []
    for one, other, curve, end in (
        ("dynamic", "uniform", "steps", _STEPS),
        ("greso", "dynamic", "rollouts", _ROLLOUTS),
        ("replay", "dynamic", "rollouts", _ROLLOUTS),
    ):
        means = [
            [mean_until(result.measured.curves[curve], end) for result in pair]
            for pair in paired(results, one, other)
        ]
        gaps = [first - second for first, second in means if first is not None and second is not None]
        if gaps:
            what, subject = f"mean held out: {one} less {other}", f"equal {curve}"
            figures.append(mean_figure(what, subject, gaps, least=0.0))
    return figures
