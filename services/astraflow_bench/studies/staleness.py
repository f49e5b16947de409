"""`staleness`: which loss holds when the weights have moved on by many versions since a token was sampled.

Invariant: arms differ in loss and in `max_staleness`. Nodes always run ahead as far as that allows, because every step
sleeps, so the lag is the window's and not the machine's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import product
from statistics import fmean

from astraflow_bench.figures import Figure
from astraflow_bench.studies.study import (
    Arm,
    Measured,
    Plot,
    Result,
    Run,
    Study,
    heldout_curve,
    mean_figure,
    mean_until,
    paired,
)
from astraflow_bench.studies.timed_team import sleeping_steps

LAGS = (8, 32)
_LOSSES = {
    "none": "{kind: none}",
    "clip": "{kind: ppo_clip, low: 0.2, high: 0.2}",
    "m2po": "{kind: m2po}",
    "m2po-clip": "{kind: m2po_clip}",
}
_COMPARED = (("m2po", "clip"), ("m2po-clip", "clip"), ("m2po", "none"))
_SLEEP_S = 2.0
_BASE = (
    "run.steps=96",
    "dataflow.evaluation={every_versions: 16, num_samples: 256, final_samples: 256}",
    "trainer.optimizer.learning_rate=2e-4",
    "trainer.optimizer.eps=1e-3",
    "trainer.checkpoint_every_steps=1000",
    sleeping_steps(_SLEEP_S),
)


def staleness_study() -> Study:
    """Losses by lag, and the on-policy reference."""
    lagging = [
        Arm(
            name=f"{loss}-{lag}",
            changes=(f"dataflow.max_staleness={lag}", f"trainer.algorithm.loss={settings}"),
        )
        for lag in LAGS
        for loss, settings in _LOSSES.items()
    ]
    reference = ("dataflow.max_staleness=0", f"trainer.algorithm.loss={_LOSSES['none']}")
    return Study(
        name="staleness",
        title="Losses when samples are old",
        intro=(
            "The quickstart with AdamW at 2e-4 and eps 1e-3, 96 steps. Arms are named by loss and largest staleness "
            "allowed; `on-policy` allows none. [How the lag is held](../studies.md#staleness)."
        ),
        recipe="quickstart",
        base=_BASE,
        arms=[Arm(name="on-policy", changes=reference), *lagging],
        measure=measure,
        columns={
            "late": "held out, mean of the last two",
            "best": "highest",
            "staleness": "staleness, mean",
            "clipped": "tokens cut",
            "second_moment": "mean squared log-ratio",
        },
        plot=Plot(title="held-out reward by loss and lag", x="version", y="held-out reward", curve="heldout"),
        conclude=conclude,
    )


def measure(run: Run) -> Measured:
    """Held-out reward, and how far the samples were from the weights."""
    curve, steps = heldout_curve(run), run.of_kind("step")
    rewards = [reward for _, reward in curve]
    return Measured(
        figures={
            "late": fmean(rewards[-2:]),
            "best": max(rewards),
            "staleness": fmean(step["staleness_mean"] for step in steps),
            "clipped": _mean(steps, "clip_fraction_up", "clip_fraction_down"),
            "second_moment": _mean(steps, "second_moment"),
        },
        curves={"heldout": curve},
    )


def conclude(results: Sequence[Result]) -> list[Figure]:
    """M2PO against PPO's clip and against no bound, by paired seeds: over the whole curve, and where it ends."""
    figures = []
    by = (("mean of the curve", _mean_reward), ("last two evaluations", _late))
    for lag, (one, other), (what, of) in product(LAGS, _COMPARED, by):
        gaps = [of(first) - of(second) for first, second in paired(results, f"{one}-{lag}", f"{other}-{lag}")]
        if gaps:
            aim = (one, other, lag, of) == ("m2po", "clip", 32, _mean_reward)
            compared = f"held out, {what}: {one} less {other}"
            figures.append(mean_figure(compared, f"lag {lag}", gaps, least=0.0 if aim else None))
    return figures


def _mean_reward(result: Result) -> float:
    curve = result.measured.curves["heldout"]
    mean = mean_until(curve, curve[-1][0])
    return math.nan if mean is None else mean


def _late(result: Result) -> float:
    return result.number("late")


def _mean(steps: Sequence[Mapping[str, float]], *names: str) -> float | None:
    """Of the steps that were taken; a skipped one has no loss."""
    found = [sum(step[name] for name in names) for step in steps if names[0] in step]
    return fmean(found) if found else None
