"""What an engine reports of its load counts only when it can be true."""

from typing import Any

import pytest

from astraflow_raas.engine.base import EngineFaulty, EngineLoad
from astraflow_raas.engine.load import read_load

RANK: dict[str, Any] = {
    "num_running_reqs": 3,
    "num_waiting_reqs": 1,
    "token_usage": 0.25,
    "gen_throughput": 80.5,
}


def test_ranks_count_together_and_the_fullest_memory_decides() -> None:
    answer = {"loads": [RANK, RANK | {"token_usage": 0.75, "dp_rank": 1}]}
    assert read_load(answer, where="it") == EngineLoad(
        running=6, waiting=2, kv_usage=0.75, tokens_per_s=161.0
    )


@pytest.mark.parametrize(
    ("answer", "names"),
    [
        ("not found", "no load"),
        ({}, "no load"),
        ({"loads": []}, "no load"),
        ({"loads": [None]}, "no load"),
        ({"loads": [{}]}, "num_running_reqs None"),
        ({"loads": [RANK | {"num_running_reqs": -1}]}, "num_running_reqs -1"),
        ({"loads": [RANK | {"num_running_reqs": True}]}, "num_running_reqs True"),
        ({"loads": [RANK | {"num_waiting_reqs": "3"}]}, "num_waiting_reqs 3"),
        ({"loads": [RANK | {"num_waiting_reqs": 1e18}]}, "num_waiting_reqs 1e+18"),
        ({"loads": [RANK | {"token_usage": float("nan")}]}, "token_usage nan"),
        ({"loads": [RANK | {"token_usage": 7}]}, "token_usage 7"),
        ({"loads": [RANK, RANK | {"gen_throughput": float("inf")}]}, "gen_throughput inf"),
    ],
)
def test_a_report_that_cannot_be_true_is_refused_and_named(answer: object, names: str) -> None:
    with pytest.raises(EngineFaulty, match=f"^it reports .*{names}".replace("+", r"\+")):
        read_load(answer, where="it")
