"""Which studies there are. Asked by `commands.study`."""

from __future__ import annotations

from collections.abc import Sequence

from astraflow_bench.studies.data_algorithms import data_study
from astraflow_bench.studies.disciplines import async_study
from astraflow_bench.studies.pools.autoscaling import autoscaling_study
from astraflow_bench.studies.pools.heterogeneous import heterogeneous_study
from astraflow_bench.studies.quickstart import quickstart_study
from astraflow_bench.studies.recipes import recipes_study
from astraflow_bench.studies.staleness import staleness_study
from astraflow_bench.studies.study import Study
from astraflow_bench.studies.two_policies import two_policies_study
from astraflow_bench.studies.weights_in_training import weights_study


def studies(lengths: Sequence[float] = ()) -> dict[str, Study]:
    """All studies by name; `lengths` are recorded ones, for `async`."""
    found = [
        quickstart_study(),
        async_study(lengths),
        staleness_study(),
        data_study(),
        two_policies_study(),
        autoscaling_study(),
        heterogeneous_study(),
        weights_study(),
        recipes_study(),
    ]
    return {study.name: study for study in found}
