"""The curves of a run as a PNG: rewards, staleness and delta density over time. Drawn with matplotlib, off
screen.
"""

from __future__ import annotations

from pathlib import Path

from astraflow_launcher.view.observation import Observation

__all__ = ["draw_curves"]


def draw_curves(observation: Observation, path: Path, *, title: str) -> None:
    """Write the curves of every policy to `path`."""
    # matplotlib costs half a second to import and is needed once, at the end.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 7), layout="constrained")
    FigureCanvasAgg(figure)
    reward, staleness, density = figure.subplots(3, 1, height_ratios=(3, 1, 1))
    for policy in observation.policies():
        points = observation.steps_of(policy)
        steps = [point.step for point in points]
        reward.plot(
            steps,
            [point.metrics.get("reward_mean", 0.0) for point in points],
            label=f"{policy}: training",
            alpha=0.6,
        )
        evaluations = observation.evaluations(policy)
        reward.plot(
            [item.version for item in evaluations],
            [item.mean_reward for item in evaluations],
            marker="o",
            label=f"{policy}: held out",
        )
        staleness.plot(steps, [point.metrics.get("staleness_mean", 0.0) for point in points], label=policy)
        deltas = [version for version in observation.versions.get(policy, []) if version.delta_bytes]
        density.plot(
            [version.version for version in deltas], [version.density for version in deltas], label=policy
        )
    for name, means in observation.heldout_metrics().items():
        reward.plot(*zip(*means, strict=True), marker=".", linestyle=":", label=f"{name}: held out")
    reward.set(title=title, ylabel="reward", ylim=(0, 1.02))
    staleness.set(ylabel="staleness\n(versions)")
    density.set(ylabel="delta density", xlabel="step / version")
    for axes in (reward, staleness, density):
        axes.grid(alpha=0.3)
    if observation.policies():
        reward.legend(loc="lower right")
    figure.savefig(path, dpi=120)
