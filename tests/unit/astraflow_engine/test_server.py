"""Paths, status codes and SGLang's error shapes."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import pytest

from astraflow_engine import api, server
from astraflow_engine.model_config import load_model_config
from astraflow_engine.service import EngineService
from astraflow_kit import failpoints, metrics
from support.engine_parts import DEADLINE_S


@pytest.fixture
async def client(service: EngineService, folder: Path) -> AsyncIterator[httpx.AsyncClient]:
    limits = api.ModelLimits(vocab_size=97, context_length=128)
    config = load_model_config(folder)
    model = server.ServedModel(config=config, limits=limits, settings={"max_running_requests": 4})
    app = server.create_app(service, model=model, metrics=metrics.Metrics())
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
        yield client


def refusal(response: httpx.Response, status: int) -> str:
    """The message in the shape that everything but wrong values of /generate gets."""
    body: dict[str, Any] = response.json()
    assert (response.status_code, body["code"], body["object"]) == (status, status, "error")
    return str(body["message"])


async def test_with_a_key_only_health_answers_strangers() -> None:
    app = server.create_app(Mock(alive=True), model=Mock(), metrics=metrics.Metrics(), api_key="k")
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://engine") as stranger:
        answers = [await stranger.get(path) for path in ("/health", "/metrics", "/server_info", "/nowhere")]
        wrong = await stranger.post("/pause_generation", headers={"authorization": "Bearer other"})
        known = await stranger.get("/nowhere", headers={"authorization": "Bearer k"})
    assert [answer.status_code for answer in answers] == [200, 401, 401, 401]
    assert (wrong.status_code, wrong.json()) == (401, {"error": "Unauthorized"})
    assert known.status_code == 404


async def test_a_wrong_value_is_a_400_with_a_nested_message(client: httpx.AsyncClient) -> None:
    response = await client.post("/generate", json={"input_ids": [1, 97]})
    assert response.status_code == 400
    assert list(response.json()) == ["error"]
    assert "input_ids[1] is 97" in response.json()["error"]["message"]


NO_REQUESTS = [
    ("POST", "/generate", b"{", 400, "the request body is not JSON"),
    ("POST", "/generate", b"\xff\xfe", 400, "the request body is not JSON"),
    ("POST", "/generate", b'{"input_ids": [1', 400, "the request body is not JSON"),
    ("POST", "/v1/completions", b"{}", 404, "docs/engine.md lists the paths"),
    ("POST", "/flush_cache?timeout=soon", b"", 400, "timeout"),
    ("GET", "/generate", b"", 405, "GET /generate: Method Not Allowed"),
]


@pytest.mark.parametrize(("method", "path", "content", "status", "complaint"), NO_REQUESTS)
async def test_what_is_no_request_is_refused(
    client: httpx.AsyncClient, method: str, path: str, content: bytes, status: int, complaint: str
) -> None:
    assert complaint in refusal(await client.request(method, path, content=content), status)


async def test_a_stopped_engine_is_a_503(client: httpx.AsyncClient, service: EngineService) -> None:
    await service.stop(deadline_s=DEADLINE_S)
    response = await client.post("/generate", json={"input_ids": [1]})
    assert "the engine has stopped" in refusal(response, 503)
    assert (await client.get("/health")).status_code == 503
    assert (await client.get("/health_generate")).status_code == 503


async def test_a_defect_is_a_500_without_details(client: httpx.AsyncClient) -> None:
    failpoints.arm("engine.before_swap=raise")
    body = {"model_path": "nowhere", "weight_version": "1"}
    assert (await client.post("/update_weights_from_disk", json=body)).status_code == 400
    info = (await client.get("/model_info")).json()
    response = await client.post("/update_weights_from_disk", json=body | {"model_path": info["model_path"]})
    assert refusal(response, 500) == "the engine met a defect; its log has the cause"


async def test_a_refused_update_answers_in_the_update_s_shape(client: httpx.AsyncClient) -> None:
    for path in ("/update_weights_from_disk", "/prepare_weights"):
        response = await client.post(path, json={"model_path": "x"})
        assert response.status_code == 400
        said = "weight_version is missing; name the version, or its tokens would carry the old version's name"
        assert response.json() == {"success": False, "message": said, "num_paused_requests": 0}


async def test_model_information_names_the_family(client: httpx.AsyncClient) -> None:
    info = (await client.get("/model_info")).json()
    assert (info["model_type"], info["architectures"]) == ("qwen3", ["Qwen3ForCausalLM"])


async def test_server_information_holds_settings_limits_and_state(client: httpx.AsyncClient) -> None:
    info = (await client.get("/server_info")).json()
    assert (info["engine"], info["max_running_requests"], info["max_req_input_len"]) == ("astraflow", 4, 127)
    (state,) = info["internal_states"]
    expected = {"num_running": 0, "num_waiting": 0, "num_slots": 4, "paused": False}
    assert state == state | expected


async def test_metrics_are_exported(client: httpx.AsyncClient) -> None:
    params = {"max_new_tokens": 3, "ignore_eos": True}
    await client.post("/generate", json={"input_ids": [1], "sampling_params": params})
    text = (await client.get("/metrics")).text
    assert 'astraflow_engine_tokens{kind="generated"} 3.0' in text
    assert 'astraflow_engine_requests{state="running"} 0.0' in text
