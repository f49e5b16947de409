"""Densities and bytes of the versions of a run; figures by hand."""

import pytest

from astraflow_bench.studies.study import Run
from astraflow_bench.studies.weights_in_training import measure


def test_versions_are_counted_without_the_first_which_is_whole() -> None:
    sizes = [(0, 0.0, 0, 1000), (1, 0.1, 100, 0), (2, 0.3, 300, 0)]
    versions = [
        {
            "kind": "version", "policy": "solver", "version": number, "density": density, "delta_bytes": delta,
            "snapshot_bytes": whole,
        }
        for number, density, delta, whole in sizes
    ]  # fmt: skip
    run = Run(summary={"heldout_last": 0.9}, metrics=versions, events=[])
    figures = measure(run).figures
    assert figures["density"] == pytest.approx(0.2)
    assert (figures["density_first"], figures["density_last"]) == (0.1, 0.3)
    assert figures["delta_share"] == pytest.approx(0.2)
