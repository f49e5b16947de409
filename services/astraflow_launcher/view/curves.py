"""The curves of a run as a PNG: rewards, staleness, density, completions, entropy and KL. Drawn with matplotlib, off
screen, of the metrics file: it has every step.
"""

import math
from collections import defaultdict
from pathlib import Path

from astraflow_launcher.view.metrics_file import read_lines
from astraflow_launcher.view.observation import Observation

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
_REWARD, _DENSITY = "reward_mean", "density"
_DRAWN = (_REWARD, *(metric for _, lines in _OF_STEPS.values() for metric, _ in lines))
_PLACES = [["reward", "reward"], ["staleness", "density"], ["length", "truncated"], ["entropy", "mismatch"]]


# Metric -> points of (step or version, value).
_Curves = dict[str, list[tuple[int, float]]]


def draw_curves(observation: Observation, path: Path, *, metrics: Path, title: str) -> None:
    """Write the curves of every policy to `path`: evaluations as observed, steps and versions as `metrics` has them."""
    # matplotlib costs half a second to import and is needed once, at the end.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 9), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplot_mosaic(_PLACES, height_ratios=(3, 1, 1, 1))  # type: ignore[arg-type] # invariant list
    curves = _read_curves(metrics)
    for policy in observation.policies():
        axes["reward"].plot(*_columns(curves[policy][_REWARD]), label=f"{policy}: training", alpha=0.6)
        heldout = [(item.version, item.mean_reward) for item in observation.evaluations(policy)]
        axes["reward"].plot(*_columns(heldout), marker="o", label=f"{policy}: held out")
        for name, (_, lines) in _OF_STEPS.items():
            for metric, called in lines:
                label = f"{policy}: {called}" if called else policy
                axes[name].plot(*_columns(curves[policy][metric]), label=label)
        axes["density"].plot(*_columns(curves[policy][_DENSITY]), label=policy)
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


def _read_curves(metrics: Path) -> defaultdict[str, _Curves]:
    """The curves of each policy: of all that a step's line says only what is drawn."""
    found: defaultdict[str, _Curves] = defaultdict(lambda: defaultdict(list))
    for line in read_lines(metrics):
        curves = found[line["policy"]]
        if line["kind"] == "step":
            for name in _DRAWN:
                value = line.get(name)
                curves[name].append((line["step"], math.nan if value is None else value))
        elif line["kind"] == "version" and line["delta_bytes"]:
            curves[_DENSITY].append((line["version"], line["density"]))
    return found


def _columns(points: list[tuple[int, float]]) -> tuple[list[int], list[float]]:
    return [x for x, _ in points], [y for _, y in points]
