"""An engine is used only when its release, its scheduling and its size are known to be right."""

import pytest

from astraflow_raas.engine.base import Arithmetic
from astraflow_raas.engine.server_info import EngineUnsuitable, read_server_info

STATE = {"effective_max_running_requests_per_dp": 64}
SGLANG: dict[str, object] = {
    "version": "0.5.20",
    "disable_overlap_schedule": True,
    "internal_states": [STATE, STATE | {"effective_max_running_requests_per_dp": 60}],
}


@pytest.mark.parametrize("version", ["0.5.19", "0.5.20.post1", "0.5.23"])
def test_a_supported_release_says_how_much_it_takes(version: str) -> None:
    info = read_server_info(SGLANG | {"version": version}, where="it")
    assert (info.slots_per_rank, info.num_ranks, info.is_embedded) == (60, 2, False)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, Arithmetic.HALF),
        ({"dtype": "auto", "kv_cache_dtype": "auto", "quantization": None}, Arithmetic.HALF),
        ({"dtype": "float32"}, Arithmetic.FLOAT32),
        ({"quantization": "fp8"}, Arithmetic.QUANTIZED),
        ({"dtype": "bfloat16", "kv_cache_dtype": "fp8_e5m2"}, Arithmetic.QUANTIZED),
        ({"engine": "astraflow"}, Arithmetic.FLOAT32),
    ],
)
def test_it_says_how_exactly_it_computes(changes: dict[str, object], expected: Arithmetic) -> None:
    assert read_server_info(SGLANG | changes, where="it").arithmetic is expected


def test_the_embedded_engine_has_no_release_and_overlaps_nothing() -> None:
    info = read_server_info({"engine": "astraflow", "internal_states": [STATE]}, where="it")
    assert (info.slots_per_rank, info.num_ranks, info.is_embedded) == (64, 1, True)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"version": "0.5.18"}, r"is SGLang 0.5.18, this node works with 0.5.19 to 0.5.23; .*pip install"),
        ({"version": "0.6.0"}, "is SGLang 0.6.0"),
        ({"version": None}, "is SGLang None"),
        ({"disable_overlap_schedule": False}, "start it with --disable-overlap-schedule"),
        ({"internal_states": []}, "does not say how many requests"),
        ({"internal_states": [{}]}, "does not say how many requests"),
    ],
)
def test_an_unsuitable_engine_is_refused_with_a_remedy(changes: dict[str, object], words: str) -> None:
    with pytest.raises(EngineUnsuitable, match=words):
        read_server_info(SGLANG | changes, where="the engine")


def test_something_else_is_no_engine() -> None:
    with pytest.raises(EngineUnsuitable, match="is no SGLang server: /server_info says <html>"):
        read_server_info("<html>", where="http://here")
