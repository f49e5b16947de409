"""Several policies trained in one run, against each of them trained alone in the same workflow.

Every arrangement runs `astraflow dev` as a process of its own, one after the other: all policies trained, then each
one alone while the others stay as they start (`train: false`). Seeds are paired, warm starts are made once. Figures
come from the metrics file of each run, so they are what a user would see. `commands.bench_policies` prints them.

In a recipe's own game policies meet each other, so alone and together are different games. `APART` gives each a game of
its own, in which nothing differs but what they share; `TIMED` gives calls and steps a length, in which the processors
rest, so that wall time is that of the data path.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from astraflow.recipe.file import load_recipe
from astraflow_bench.studies.running import run_recipe
from astraflow_launcher.view.metrics_file import read_lines

MAX_WALL_RATIO = 1.15
MAX_NO_CREDIT = 0.02
_GAME, _STEP = "astraflow_bench.side_by_side:SideBySide", "astraflow_bench.side_by_side:Sleeping"
_STEP_S, _CALL_S = {"solver": 1.0, "verifier": 0.8}, 0.6


def _game(seconds: float) -> str:
    settings = f'verifier_prompt: "{{problem}} Answer: {{answer}}", seconds: {seconds}'
    return f'raas.workflow={{use: "{_GAME}", with: {{{settings}}}}}'


APART = (_game(0.0),)
"""Overrides of `solver-verifier-tiny`."""
TIMED = (
    _game(_CALL_S),
    "raas.max_concurrent_tasks=2",
    "run.steps=24",
    "dataflow.group_size=4",
    "dataflow.groups_per_step=2",
    "dataflow.evaluation={every_versions: 1000, num_samples: 8, final_samples: 8}",
    "trainer.algorithm.drop_zero_advantage=false",
    "trainer.checkpoint_every_steps=8",
    *(f"policies.{name}.model.warm_start.steps=1" for name in _STEP_S),
    *(f"policies.{name}.sampling.max_new_tokens=4" for name in _STEP_S),
    *(
        f'policies.{name}.trainer.algorithm.advantage={{use: "{_STEP}", with: {{seconds: {seconds}}}}}'
        for name, seconds in _STEP_S.items()
    ),
)
"""The same with a tiny share of its work, and a sleep in each call and each step. Two tasks at once are at most 3.3
groups a second of each policy, where the trainers take 2 and 2.5.
"""
_NOISE = 2.0
"""Standard errors that a difference may have and still be noise."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """One policy in one run."""

    mean_reward: float
    """Training reward, mean over all steps: of two runs of equal length, the one that learned faster has more."""
    heldout: float
    """Of the final evaluation."""
    seconds: float
    """From its first step to its last."""


@dataclass(frozen=True, kw_only=True)
class RunFigures:
    """One run: with which seed, and what became of each policy that it trained."""

    seed: int
    trainings: Mapping[str, Training]
    no_credit: float
    """Share of its training trajectories that were dropped because their policy had no room."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Together minus alone, over paired seeds."""

    together: float
    alone: float
    standard_error: float
    """NaN for a single seed."""

    @property
    def within_noise(self) -> bool:
        """Whether together is at most by noise below alone."""
        return self.together >= self.alone - _NOISE * self.standard_error


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What training together costs and changes."""

    seeds: tuple[int, ...]
    mean_reward: Mapping[str, Difference]
    heldout: Mapping[str, Difference]
    wall_ratios: tuple[float, ...]
    """Seconds of training together over those of the policy that takes longer alone, of each seed."""
    no_credit: float
    """Largest share of any run together."""

    @property
    def wall_ratio(self) -> float:
        """Mean over seeds."""
        return fmean(self.wall_ratios)

    @property
    def met(self) -> bool:
        """Whether every target is met. Noise needs two seeds to be known."""
        return (
            all(item.within_noise for item in self.mean_reward.values())
            and self.wall_ratio <= MAX_WALL_RATIO
            and self.no_credit <= MAX_NO_CREDIT
        )


def measure(
    recipe: Path, *, seeds: int, folder: Path, overrides: Sequence[str], say: Callable[[str], None]
) -> Comparison:
    """Run every arrangement once per seed below `folder`. Raises ValueError for a recipe with fewer than two trained
    policies, InternalError when a run fails.
    """
    policies = trained_policies(recipe, overrides)
    trials: dict[str, list[RunFigures]] = {}
    for seed, arrangement in product(range(seeds), ("", *policies)):
        others = [name for name in policies if arrangement and name != arrangement]
        fixed = [*overrides, *(f"policies.{name}.train=false" for name in others)]
        trial = _run(recipe, seed=seed, folder=folder, overrides=fixed)
        trials.setdefault(arrangement, []).append(trial)
        what = f"{arrangement} alone" if arrangement else "together"
        heldout = ", ".join(f"{name} {item.heldout:.3f}" for name, item in trial.trainings.items())
        say(f"seed {seed}, {what}: held-out {heldout}; {_longest_s(trial):.0f} s of training")
    return compare(trials.pop(""), trials)


def trained_policies(recipe: Path, overrides: Sequence[str]) -> list[str]:
    """The policies of a recipe that are trained. Raises ValueError unless there are two."""
    roles = load_recipe(recipe, overrides=overrides).recipe.resolved_roles.values()
    policies = list(dict.fromkeys(role.policy_id for role in roles if role.is_trained))
    if len(policies) < 2:
        raise ValueError(f"{recipe} trains {len(policies)} policy; give a recipe that trains two or more")
    return policies


def compare(together: Sequence[RunFigures], alone: Mapping[str, Sequence[RunFigures]]) -> Comparison:
    """Pair the runs by seed; `alone` holds, by policy, the runs that trained only that one."""
    pairs = {
        name: [(both.trainings[name], one.trainings[name]) for both, one in zip(together, runs, strict=True)]
        for name, runs in alone.items()
    }
    ratios = [
        _longest_s(both) / max(_longest_s(runs[index]) for runs in alone.values())
        for index, both in enumerate(together)
    ]
    return Comparison(
        seeds=tuple(trial.seed for trial in together),
        mean_reward={
            name: _difference((both.mean_reward, one.mean_reward) for both, one in items)
            for name, items in pairs.items()
        },
        heldout={
            name: _difference((both.heldout, one.heldout) for both, one in items)
            for name, items in pairs.items()
        },
        wall_ratios=tuple(ratios),
        no_credit=max(trial.no_credit for trial in together),
    )


def _difference(pairs: Iterable[tuple[float, float]]) -> Difference:
    both, one = zip(*pairs, strict=True)
    gaps = [a - b for a, b in zip(both, one, strict=True)]
    error = stdev(gaps) / math.sqrt(len(gaps)) if len(gaps) > 1 else math.nan
    return Difference(together=fmean(both), alone=fmean(one), standard_error=error)


def _longest_s(trial: RunFigures) -> float:
    return max(training.seconds for training in trial.trainings.values())


def _run(recipe: Path, *, seed: int, folder: Path, overrides: Sequence[str]) -> RunFigures:
    # Runs below one folder share the cache of warm starts.
    summary, root = run_recipe(recipe, overrides=[*overrides, f"run.seed={seed}"], folder=folder)
    return trial_of(list(read_lines(root / "metrics.jsonl")), summary, seed=seed)


def trial_of(lines: Sequence[Mapping[str, Any]], summary: Mapping[str, Any], *, seed: int) -> RunFigures:
    """Read a run from the lines of its metrics file and its summary."""
    steps: dict[str, list[Mapping[str, Any]]] = {}
    heldout: dict[str, float] = {}
    for line in lines:
        if line["kind"] == "step":
            steps.setdefault(line["policy"], []).append(line)
        elif line["kind"] == "evaluation":
            heldout[line["policy"]] = line["heldout_reward"]
    account = summary["trajectories"]
    training = account["ingested"] - account["evaluated"]
    return RunFigures(
        seed=seed,
        trainings={
            name: Training(
                mean_reward=fmean(step["reward_mean"] for step in own if "reward_mean" in step),
                heldout=heldout.get(name, math.nan),
                seconds=own[-1]["seconds"] - own[0]["seconds"],
            )
            for name, own in steps.items()
        },
        no_credit=account["dropped"].get("no_credit", 0) / max(training, 1),
    )
