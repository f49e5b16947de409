"""Results of cells by their figures, and evaluations of a run, for tests of studies."""

from collections.abc import Mapping
from typing import Any

from astraflow_bench.studies.study import Curve, Measured, Result


def result(arm: str, seed: int, *, curves: Mapping[str, Curve] | None = None, **figures: float) -> Result:
    """A finished cell of which only figures and curves matter."""
    nowhere = {"recipe": "", "machine": "", "date": "", "commit": ""}
    return Result(
        arm=arm,
        seed=seed,
        measured=Measured(figures=figures, curves=curves or {}),
        load=0,
        seconds=0,
        **nowhere,
    )


def evaluations(*points: tuple[int, float | None]) -> list[dict[str, Any]]:
    """Lines of a metrics file: (version, held-out reward) each, None without a sample."""
    return [
        {"kind": "evaluation", "policy": "solver", "version": version, "heldout_reward": reward}
        for version, reward in points
    ]
