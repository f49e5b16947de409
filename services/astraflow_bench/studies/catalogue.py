"""Which studies there are. Asked by `commands.study`."""

from __future__ import annotations

from collections.abc import Sequence

from astraflow_bench.studies.disciplines import async_study
from astraflow_bench.studies.study import Study


def studies(lengths: Sequence[float] = ()) -> dict[str, Study]:
    """All studies by name; `lengths` are recorded ones, for `async`."""
    found = [async_study(lengths)]
    return {study.name: study for study in found}
