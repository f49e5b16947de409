"""The curves of a run as a PNG: rewards, staleness, density, completions, entropy and KL. Drawn with matplotlib, off
screen.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from astraflow_launcher.view.observation import Observation

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw_curves"]

# Axes name -> label, and (metric of steps, how its line is called) of each line.
_OF_STEPS = {
    "staleness": ("staleness\n(versions)", (("staleness_mean", ""),)),
    "length": (
        "completion\n(tokens)",
        (("completion_tokens_mean", "mean"), ("completion_tokens_p90", "p90")),
    ),
    "truncated": ("truncated\n(share)", (("truncated_fraction", ""),)),
    "entropy": ("entropy\n(nats)", (("entropy", ""),)),
    "mismatch": ("KL of engine and\ntrainer (nats)", (("mismatch_kl", ""),)),
}
_PLACES = [["reward", "reward"], ["staleness", "density"], ["length", "truncated"], ["entropy", "mismatch"]]


def draw_curves(observation: Observation, path: Path, *, title: str) -> None:
    """Write the curves of every policy to `path`."""
    # matplotlib costs half a second to import and is needed once, at the end.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 9), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplot_mosaic(_PLACES, height_ratios=(3, 1, 1, 1))  # type: ignore[arg-type] # invariant list
    for policy in observation.policies():
        _draw_rewards(axes["reward"], observation, policy)
        for name, (_, lines) in _OF_STEPS.items():
            for metric, called in lines:
                points = [(p.step, p.metrics.get(metric, math.nan)) for p in observation.steps_of(policy)]
                axes[name].plot(*_columns(points), label=f"{policy}: {called}" if called else policy)
        deltas = [version for version in observation.versions.get(policy, []) if version.delta_bytes]
        axes["density"].plot(*_columns([(item.version, item.density) for item in deltas]), label=policy)
    for name, means in observation.heldout_metrics().items():
        axes["reward"].plot(*zip(*means, strict=True), marker=".", linestyle=":", label=f"{name}: held out")
    axes["reward"].set(title=title, ylabel="reward", ylim=(0, 1.02))
    axes["density"].set(ylabel="delta density")
    for name, (label, _) in _OF_STEPS.items():
        axes[name].set(ylabel=label)
    for each in axes.values():
        each.grid(alpha=0.3)
    for name in ("entropy", "mismatch"):
        axes[name].set(xlabel="step / version")
    if observation.policies():
        axes["reward"].legend(loc="lower right")
        axes["length"].legend(loc="lower right", fontsize="small")
    figure.savefig(path, dpi=120)


def _draw_rewards(axes: Axes, observation: Observation, policy: str) -> None:
    points = [(point.step, point.metrics.get("reward_mean", 0.0)) for point in observation.steps_of(policy)]
    axes.plot(*_columns(points), label=f"{policy}: training", alpha=0.6)
    heldout = [(item.version, item.mean_reward) for item in observation.evaluations(policy)]
    axes.plot(*_columns(heldout), marker="o", label=f"{policy}: held out")


def _columns(points: list[tuple[int, float]]) -> tuple[list[int], list[float]]:
    return [x for x, _ in points], [y for _, y in points]
