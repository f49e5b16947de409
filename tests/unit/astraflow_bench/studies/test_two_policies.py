"""Training together may cost a policy what noise is, and no more."""

import pytest

from astraflow_bench.studies.two_policies import conclude
from support.study_results import result


@pytest.mark.parametrize(("together", "met"), [((0.70, 0.72), True), ((0.60, 0.61), False)])
def test_together_may_be_lower_by_noise_only(together: tuple[float, float], met: bool) -> None:
    results = [result("together", seed, solver=reward, no_credit=0) for seed, reward in enumerate(together)]
    results += [result("solver-alone", seed, solver=reward) for seed, reward in enumerate((0.71, 0.71))]
    found = conclude(results)
    assert all(figure.met is not False for figure in found) is met
