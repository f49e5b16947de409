"""`weights-in-training`: how many weights a step changes, and what a version costs, by learning rate, on real runs."""

from __future__ import annotations

from statistics import fmean

from astraflow_bench.studies.study import Arm, Measured, Plot, Run, Study

_RATES = ("1e-6", "1e-5", "1e-4", "5e-4")
_PLAIN_EPS = "1e-8"


def weights_study() -> Study:
    """The quickstart at several rates of AdamW with its usual eps, and as the recipe has it."""
    plain = [
        Arm(
            name=f"lr-{rate}",
            changes=(f"trainer.optimizer.learning_rate={rate}", f"trainer.optimizer.eps={_PLAIN_EPS}"),
        )
        for rate in _RATES
    ]
    return Study(
        name="weights-in-training",
        title="Weight versions of real runs",
        intro=(
            "The quickstart by the learning rate of AdamW, whose eps is 1e-8; `recipe` is the recipe's own rate 5e-4 "
            "with eps 1e-2. Density is the share of bf16 weights that a version changes. [More](../studies.md)."
        ),
        recipe="quickstart",
        arms=[*plain, Arm(name="recipe")],
        measure=measure,
        columns={
            "density": "density, mean",
            "density_first": "of the first half",
            "density_last": "of the second half",
            "delta_share": "delta / snapshot",
            "last": "held out, final",
        },
        plot=Plot(title="share of weights that a version changes", x="version", y="density", curve="density"),
    )


def measure(run: Run) -> Measured:
    """Of all versions but the first, which is whole."""
    versions = [line for line in run.of_kind("version") if line["version"] > 0]
    densities = [version["density"] for version in versions]
    half = len(densities) // 2
    sizes = [version["delta_bytes"] for version in versions]
    first = next(line for line in run.of_kind("version") if line["version"] == 0)
    return Measured(
        figures={
            "density": fmean(densities),
            "density_first": fmean(densities[:half] or densities),
            "density_last": fmean(densities[half:]),
            "delta_share": fmean(sizes) / first["snapshot_bytes"],
            "last": run.summary["heldout_last"],
        },
        curves={"density": [(version["version"], version["density"]) for version in versions]},
    )
