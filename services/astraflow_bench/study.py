"""`make study`: does the quickstart learn, over many seeds, and does the control not?

Runs `astraflow dev` once per seed, one after the other on a quiet machine, and once more with learning rate
0. Writes the table, the raw summaries and the curve that `docs/results/` keeps. A seed has learned when its
final evaluation is at least `MIN_HELDOUT` and at least `MIN_GAIN` above its first.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean

from astraflow_bench.machine import cpu_name

MIN_HELDOUT = 0.70
MIN_GAIN = 0.25
CONTROL = "control"
_RUN_TIMEOUT_S = 900


@dataclass(frozen=True)
class Trial:
    """One run of the recipe."""

    name: str
    summary: dict[str, object]
    evaluations: list[tuple[int, float, float]]
    """(version, seconds since start, held-out reward)."""

    def number(self, key: str) -> float:
        """Return a numeric field of the summary; NaN when it is null."""
        value = self.summary[key]
        return float(value) if isinstance(value, int | float) else float("nan")

    @property
    def learned(self) -> bool:
        """Whether the final evaluation meets both bounds."""
        first, last = self.number("heldout_first"), self.number("heldout_last")
        return last >= MIN_HELDOUT and last - first >= MIN_GAIN


def main() -> int:
    """Run the study; the exit status is 0 when it supports the claim."""
    options = _arguments()
    trials = [_run(options.recipe, f"seed {seed}", ["--seed", str(seed)]) for seed in range(options.seeds)]
    for _ in range(options.controls):
        no_learning = ["--seed", "0", "--set", "trainer.optimizer.learning_rate=0"]
        trials.append(_run(options.recipe, CONTROL, no_learning))
    options.out.mkdir(parents=True, exist_ok=True)
    _write(trials, options.out)
    learned = sum(trial.learned for trial in trials if trial.name != CONTROL)
    control_learned = any(trial.learned for trial in trials if trial.name == CONTROL)
    needed = -(-9 * options.seeds // 10)
    verdict = f"{learned} of {options.seeds} seeds learned, at least {needed} wanted"
    _say(f"{verdict}; control learned: {control_learned}")
    return 0 if learned >= needed and not control_learned else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipe", type=Path, default=Path("recipes/quickstart"))
    parser.add_argument("--seeds", type=int, default=10, help="seeds 0 … N-1")
    parser.add_argument("--controls", type=int, default=1, help="runs with learning rate 0")
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    return parser.parse_args()


def _run(recipe: Path, name: str, arguments: list[str]) -> Trial:
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="astraflow-study-") as folder:
        command = [sys.executable, "-m", "astraflow.cli", "dev", str(recipe), "--json", "--quiet"]
        done = subprocess.run(
            [*command, "--data-dir", folder, *arguments],
            stdout=subprocess.PIPE,
            text=True,
            timeout=_RUN_TIMEOUT_S,
            check=True,
        )
        lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    summary = json.loads(done.stdout.strip().splitlines()[-1])
    points = [json.loads(line) for line in lines]
    curve = [
        (point["version"], point["seconds"], point["heldout_reward"])
        for point in points
        if point["kind"] == "evaluation"
    ]
    trial = Trial(name, summary, curve)
    first, last = trial.number("heldout_first"), trial.number("heldout_last")
    seconds = time.monotonic() - started
    _say(f"{name}: held-out {first:.3f} → {last:.3f} in {seconds:.0f} s, learned {trial.learned}")
    return trial


def _write(trials: list[Trial], out: Path) -> None:
    raw = [
        {"name": trial.name, "summary": trial.summary, "evaluations": trial.evaluations} for trial in trials
    ]
    (out / "quickstart-study.json").write_text(json.dumps(raw, indent=1) + "\n")
    (out / "quickstart-study.md").write_text(_report(trials))
    _draw(trials, out / "quickstart-study.png")


def _report(trials: list[Trial]) -> str:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
    )
    seeds = [trial for trial in trials if trial.name != CONTROL]
    head = [
        "# Quickstart: does it learn?",
        "",
        "Written by `make study`. Held-out reward is sampled at temperature 1; the number pairs of held-out "
        "tasks occur neither in the warm start nor in reinforcement learning. A seed has learned when its "
        f"final evaluation is at least {MIN_HELDOUT} and at least {MIN_GAIN} above its first. The control "
        "differs in the learning rate only: 0.",
        "",
        f"* machine: {platform.machine()}, {cpu_name()}, Python {platform.python_version()}",
        f"* date: {datetime.now(tz=UTC):%Y-%m-%d}, commit {commit.stdout.strip()}",
        f"* learned: {sum(trial.learned for trial in seeds)} of {len(seeds)} seeds; "
        f"mean final held-out reward {fmean(trial.number('heldout_last') for trial in seeds):.3f}",
        "",
        "| run | held-out first → last (n) | learned | steps | first reward s | wall s "
        "| staleness p50/p99/max | delta / snapshot | density | peak PSS GiB | conservation error |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    return "\n".join(
        [*head, *map(_row, trials), "", "![held-out reward over versions](quickstart-study.png)", ""]
    )


def _row(trial: Trial) -> str:
    staleness = trial.summary["staleness"]
    assert isinstance(staleness, dict)
    share = trial.number("delta_bytes_mean") / trial.number("snapshot_bytes")
    heldout = f"{trial.number('heldout_first'):.3f} → {trial.number('heldout_last'):.3f}"
    cells = [
        trial.name,
        f"{heldout} ({trial.number('heldout_n'):.0f})",
        "yes" if trial.learned else "no",
        f"{trial.number('steps'):.0f}",
        f"{trial.number('first_reward_s'):.0f}",
        f"{trial.number('wall_s'):.0f}",
        f"{staleness['p50']:.0f}/{staleness['p99']:.0f}/{staleness['max']}",
        f"{share:.2f}",
        f"{trial.number('density_mean'):.3f}",
        f"{trial.number('peak_pss_bytes') / 2**30:.2f}",
        f"{trial.number('conservation_error'):.0f}",
    ]
    return f"| {' | '.join(cells)} |"


def _draw(trials: list[Trial], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for trial in trials:
        versions = [version for version, _, _ in trial.evaluations]
        rewards = [reward for _, _, reward in trial.evaluations]
        style = {"color": "black", "linestyle": "--"} if trial.name == CONTROL else {"alpha": 0.7}
        axes.plot(versions, rewards, marker=".", label=trial.name, **style)
    axes.axhline(MIN_HELDOUT, color="gray", linewidth=0.8)
    axes.set(xlabel="weight version", ylabel="held-out reward (sampled)", ylim=(0, 1), title="quickstart")
    axes.legend(fontsize="small", ncols=2)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")


if __name__ == "__main__":
    sys.exit(main())
