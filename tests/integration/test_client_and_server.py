"""The public client against the real dataflow server: what travels beside requests and errors."""

import pytest

from astraflow import __version__
from astraflow.client import correlated
from astraflow.dataflow.v1 import run_service_pb2
from astraflow.errors import NotFoundError
from support.dataflow_world import World

pytestmark = pytest.mark.integration


async def test_a_server_says_who_it_is(world: World) -> None:
    info = await world.client.server_info()
    assert (info.product_version, list(info.capabilities)) == (__version__, [])


async def test_an_error_names_the_correlation_id_of_its_call(world: World) -> None:
    with correlated("step-7"), pytest.raises(NotFoundError) as named:
        await world.ask(run_service_pb2.GetRunResponse, run_id="gone")
    with pytest.raises(NotFoundError) as unnamed:
        await world.ask(run_service_pb2.GetRunResponse, run_id="gone")
    assert named.value.metadata["correlation_id"] == "step-7"
    assert unnamed.value.metadata["correlation_id"] not in ("", "step-7")
