"""Every number of a budget bounds."""

import pytest

from astraflow_kit.sandbox.budget import Budget


@pytest.mark.parametrize(
    "name", ["memory_mb", "disk_mb", "files", "processes", "cpu_s", "wall_s", "output_kb"]
)
@pytest.mark.parametrize("number", [0, -1, float("nan"), float("inf")])
def test_no_number_is_nothing_or_without_bound(name: str, number: float) -> None:
    with pytest.raises(ValueError, match=f"{name} is {number}; give a finite number above 0"):
        Budget(**{name: number})  # type: ignore[arg-type]
