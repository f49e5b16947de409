"""`quickstart`: does the recipe learn, over many seeds, and does the control with learning rate 0 not?"""

from __future__ import annotations

from collections.abc import Sequence

from astraflow_bench.figures import Figure
from astraflow_bench.studies.study import Arm, Measured, Plot, Result, Run, Study, heldout_curve

MIN_HELDOUT = 0.70
MIN_GAIN = 0.25
_LEARNS, _CONTROL = "recipe", "control"


def quickstart_study() -> Study:
    """At least nine of ten seeds must learn, and the control must not."""
    return Study(
        name="quickstart",
        page="quickstart-study",
        title="Quickstart: does it learn?",
        intro=(
            "Held-out reward is sampled at temperature 1; the number pairs of held-out tasks occur neither in the warm "
            f"start nor in reinforcement learning. A seed has learned when its final evaluation is at least "
            f"{MIN_HELDOUT} and at least {MIN_GAIN} above its first. The control differs in the learning rate only: 0."
        ),
        recipe="quickstart",
        arms=[Arm(name=_LEARNS), Arm(name=_CONTROL, changes=("trainer.optimizer.learning_rate=0",), seeds=1)],
        measure=measure,
        columns={
            "first": "held out, first",
            "last": "final",
            "learned": "learned",
            "steps": "steps",
            "first_reward_s": "first reward s",
            "wall_s": "wall s",
            "staleness_max": "largest staleness",
            "delta_share": "delta / snapshot",
            "density": "density",
            "peak_gib": "peak PSS GiB",
            "conservation_error": "conservation error",
        },
        plot=Plot(
            title="quickstart",
            x="weight version",
            y="held-out reward (sampled)",
            curve="heldout",
            each_seed=True,
        ),
        conclude=conclude,
    )


def measure(run: Run) -> Measured:
    """What the summary says, and the held-out reward over versions."""
    summary = run.summary
    first, last = summary["heldout_first"], summary["heldout_last"]
    learned = None not in (first, last) and last >= MIN_HELDOUT and last - first >= MIN_GAIN
    return Measured(
        figures={
            "first": first,
            "last": last,
            "learned": float(learned),
            "steps": summary["steps"],
            "first_reward_s": summary["first_reward_s"],
            "wall_s": summary["wall_s"],
            "staleness_max": summary["staleness"]["max"],
            "delta_share": summary["delta_bytes_mean"] / summary["snapshot_bytes"],
            "density": summary["density_mean"],
            "peak_gib": summary["peak_pss_bytes"] / 2**30,
            "conservation_error": summary["conservation_error"],
        },
        curves={"heldout": heldout_curve(run)},
    )


def conclude(results: Sequence[Result]) -> list[Figure]:
    """Nine of ten seeds, rounded up; no control."""
    seeds = [one.number("learned") for one in results if one.arm == _LEARNS]
    controls = [one.number("learned") for one in results if one.arm == _CONTROL]
    needed = -(-9 * len(seeds) // 10)
    found = [
        Figure(what="seeds that learned", subject=f"of {len(seeds)}", value=sum(seeds), unit="", least=needed)
    ]
    if controls:
        found.append(
            Figure(
                what="controls that learned",
                subject=f"of {len(controls)}",
                value=sum(controls),
                unit="",
                most=0,
            )
        )
    return found
