"""`recipes`: does each recipe of the release learn at its small size, and the control with learning rate 0 not?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from astraflow.recipe.shipped import shipped_recipes
from astraflow_bench.figures import Figure
from astraflow_bench.studies.study import (
    Arm,
    Measured,
    Plot,
    Result,
    Run,
    Study,
    error_of,
    heldout_curve,
    mean_figure,
    paired,
)

CONTROL = " control"
"""Ends the name of the arm that differs in the learning rate only."""
_NO_LEARNING = ("trainer.optimizer.learning_rate=0",)


def recipes_study() -> Study:
    """Two arms for each small size: as it is, and the control."""
    files = list(_small_files())
    return Study(
        name="recipes",
        title="Recipes at their small size: what is learned",
        intro=(
            "Held-out reward, sampled, in the first and the last complete evaluation; of several policies the mean. "
            "The gain is the last evaluation's reward over that of the control of the same seed, which differs in the "
            "learning rate only: 0. A recipe has learned when its mean gain is at least two standard errors; one seed "
            "shows none."
        ),
        recipe="",
        arms=[
            Arm(name=name + suffix, recipe=file, changes=changes)
            for name, file in files
            for suffix, changes in (("", ()), (CONTROL, _NO_LEARNING))
        ],
        measure=measure,
        columns={
            "first": "held out, before",
            "last": "after",
            "change": "change",
            "steps": "steps",
            "reward_last": "training reward, last step",
            "minutes": "minutes",
        },
        plot=Plot(title="recipes at their small size", x="", y="change of held-out reward", figure="change"),
        conclude=conclude,
        lists_seeds=True,
    )


def _small_files() -> Iterator[tuple[str, str]]:
    """Name and file of each small size: `small*.yaml`, or the only file of a recipe that has no other size."""
    for folder, path in shipped_recipes().items():
        found = sorted(each.name for each in path.glob("small*.yaml")) or ["recipe.yaml"]
        for file in found:
            variant = file.removesuffix(".yaml").removeprefix("small").removeprefix("recipe")
            yield folder + variant, f"{folder}/{file}"


def measure(run: Run) -> Measured:
    """What the summary says, and the held-out reward over versions of a run that has one policy."""
    summary = run.summary
    first, last = summary["heldout_first"], summary["heldout_last"]
    return Measured(
        figures={
            "first": first,
            "last": last,
            "change": None if None in (first, last) else last - first,
            "steps": summary["steps"],
            "reward_last": summary["reward_last"],
            "minutes": summary["wall_s"] / 60,
        },
        curves={"heldout": heldout_curve(run)} if len(summary["policies"]) == 1 else {},
    )


def conclude(results: Sequence[Result]) -> list[Figure]:
    """The gain of each recipe of which a seed and its control have finished."""
    found = []
    for arm in dict.fromkeys(one.arm.removesuffix(CONTROL) for one in results):
        pairs = paired(results, arm, arm + CONTROL)
        gains = [run.number("last") - control.number("last") for run, control in pairs]
        known = [gain for gain in gains if gain == gain]  # NaN where an evaluation is missing
        if known:
            least = round(2 * error_of(known), 3) if len(known) > 1 else None
            found.append(mean_figure("gain", arm, known, least=least))
    return found
