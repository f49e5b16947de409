"""What a daemon says of itself."""

import time

from astraflow import __version__
from astraflow.connecting import compatibility
from astraflow_kit.server_info import server_info


def test_a_daemon_names_its_release_its_features_in_order_and_its_clock() -> None:
    before = time.time_ns()
    info = server_info(["recipe_code", "durable_acknowledgements"])
    assert (info.product_version, info.contract_version) == (__version__, compatibility.CONTRACT_VERSION)
    assert list(info.capabilities) == ["durable_acknowledgements", "recipe_code"]
    assert before <= info.server_time.ToNanoseconds() <= time.time_ns()
