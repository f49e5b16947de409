"""Paths, status codes and SGLang's error shapes."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from astraflow_engine.api import ModelLimits
from astraflow_engine.server import ServedModel, create_app
from astraflow_engine.service import EngineService
from astraflow_kit import failpoints
from astraflow_kit.metrics import Metrics
from support.engine_parts import DEADLINE_S


@pytest.fixture
async def client(service: EngineService) -> AsyncIterator[httpx.AsyncClient]:
    limits = ModelLimits(vocab_size=97, context_length=128)
    model = ServedModel(limits=limits, settings={"max_running_requests": 4})
    app = create_app(service, model=model, metrics=Metrics())
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
        yield client


def nested(response: httpx.Response) -> str:
    """The message of the shape that wrong values of /generate get."""
    body: dict[str, Any] = response.json()
    assert list(body) == ["error"]
    return str(body["error"]["message"])


def flat(response: httpx.Response) -> str:
    """The message of the shape that everything else gets."""
    body: dict[str, Any] = response.json()
    assert body["object"] == "error"
    assert body["code"] == response.status_code
    return str(body["message"])


async def test_a_wrong_value_is_a_400_with_a_nested_message(client: httpx.AsyncClient) -> None:
    response = await client.post("/generate", json={"input_ids": [1, 97]})
    assert response.status_code == 400
    assert "input_ids[1] is 97" in nested(response)


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe", b'{"input_ids": [1'])
async def test_a_body_that_is_no_json_is_a_400(client: httpx.AsyncClient, content: bytes) -> None:
    response = await client.post("/generate", content=content)
    assert response.status_code == 400
    assert "the request body is not JSON" in flat(response)


async def test_an_unknown_path_says_where_the_paths_are_listed(client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/completions", json={})
    assert response.status_code == 404
    assert "docs/engine.md lists the paths" in flat(response)


async def test_a_wrong_method_is_a_405(client: httpx.AsyncClient) -> None:
    response = await client.get("/generate")
    assert response.status_code == 405
    assert flat(response).startswith("GET /generate: Method Not Allowed")


async def test_a_stopped_engine_is_a_503(client: httpx.AsyncClient, service: EngineService) -> None:
    await service.stop(deadline_s=DEADLINE_S)
    response = await client.post("/generate", json={"input_ids": [1]})
    assert response.status_code == 503
    assert "the engine has stopped" in flat(response)
    assert (await client.get("/health")).status_code == 503
    assert (await client.get("/health_generate")).status_code == 503


async def test_a_defect_is_a_500_without_details(client: httpx.AsyncClient) -> None:
    failpoints.arm("engine.before_swap=raise")
    body = {"model_path": "nowhere", "weight_version": "1"}
    assert (await client.post("/update_weights_from_disk", json=body)).status_code == 400
    info = (await client.get("/model_info")).json()
    response = await client.post("/update_weights_from_disk", json=body | {"model_path": info["model_path"]})
    assert response.status_code == 500
    assert flat(response) == "the engine met a defect; its log has the cause"


async def test_a_refused_update_answers_in_the_update_s_shape(client: httpx.AsyncClient) -> None:
    response = await client.post("/update_weights_from_disk", json={"model_path": "x"})
    assert response.status_code == 400
    assert response.json() == {
        "success": False,
        "message": (
            "weight_version is missing; name the version, or its tokens would carry the old version's name"
        ),
        "num_paused_requests": 0,
    }


async def test_a_wrong_query_is_a_400(client: httpx.AsyncClient) -> None:
    response = await client.post("/flush_cache?timeout=soon")
    assert response.status_code == 400
    assert "timeout" in flat(response)


async def test_server_information_holds_settings_limits_and_state(client: httpx.AsyncClient) -> None:
    info = (await client.get("/server_info")).json()
    assert (info["engine"], info["max_running_requests"], info["max_req_input_len"]) == ("astraflow", 4, 127)
    (state,) = info["internal_states"]
    assert (state["num_running"], state["num_waiting"], state["num_slots"], state["paused"]) == (
        0,
        0,
        4,
        False,
    )


async def test_metrics_are_exported(client: httpx.AsyncClient) -> None:
    await client.post(
        "/generate", json={"input_ids": [1], "sampling_params": {"max_new_tokens": 3, "ignore_eos": True}}
    )
    text = (await client.get("/metrics")).text
    assert 'astraflow_engine_tokens{kind="generated"} 3.0' in text
    assert 'astraflow_engine_requests{state="running"} 0.0' in text
