"""The ready-made selectors."""

from collections.abc import Sequence

import pytest

from astraflow.plugins import ReadyGroup, Selector, StepRequest, TrajectorySummary
from astraflow_dataflow.plugins.selectors.balance_lengths import BalanceLengths
from astraflow_dataflow.plugins.selectors.balance_sources import BalanceSources
from astraflow_dataflow.plugins.selectors.edf import Edf
from astraflow_dataflow.plugins.selectors.fifo import Fifo
from astraflow_dataflow.plugins.selectors.freshest_first import FreshestFirst

# Name, version, arrival, source, tokens.
READY = [
    ("a", 1, 5, "math", 10),
    ("b", 1, 6, "math", 80),
    ("c", 2, 1, "code", 20),
    ("d", 2, 3, "math", 70),
    ("e", 3, 2, "math", 30),
    ("f", 3, 4, "code", 60),
]


def candidates() -> Sequence[ReadyGroup]:
    return [
        ReadyGroup(
            group_id=name,
            arrival=arrival,
            source=source,
            trajectories=(TrajectorySummary(reward=0.0, min_version=version, num_tokens=tokens),),
        )
        for name, version, arrival, source, tokens in READY
    ]


@pytest.mark.parametrize(
    ("selector", "num_groups", "chosen"),
    [
        (Edf(), 4, "abcd"),
        (Fifo(), 4, "cedf"),
        (FreshestFirst(), 4, "efcd"),
        (BalanceSources(), 4, "acbf"),
        (BalanceSources(), 6, "acbfde"),
        (BalanceSources(within="arrival"), 3, "cef"),
        (BalanceSources(within="freshest"), 4, "efdc"),
        # By length a c e | f d b: of each half the nearest deadline, the first arrival, the newest.
        (BalanceLengths(), 2, "ab"),
        (BalanceLengths(within="arrival"), 2, "cd"),
        (BalanceLengths(within="freshest"), 2, "ef"),
        # In four parts: a, c e, f, d b.
        (BalanceLengths(), 4, "abcf"),
    ],
)
def test_these_groups_are_chosen(selector: Selector, num_groups: int, chosen: str) -> None:
    request = StepRequest(
        policy="p", step=1, base_version=3, num_groups=num_groups, max_staleness=2, num_outstanding=0
    )
    assert "".join(selector.select(candidates(), request)) == chosen
