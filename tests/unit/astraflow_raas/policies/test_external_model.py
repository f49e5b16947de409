"""An endpoint elsewhere: asked again while it is busy, within bounds, and every answer that is none has its own end."""

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path

import httpx
import pytest

from astraflow.errors import AstraflowError
from astraflow.plugins import GenerateResult, Message, MissingCapability
from astraflow.recipe import ExternalSettings
from astraflow_kit.metrics import Metrics
from astraflow_kit.settings import SettingsError
from astraflow_raas.engine.base import EngineFaulty, EngineRefused
from astraflow_raas.policies.external_model import ExternalEndpoint, ExternalModel, endpoints_of
from astraflow_raas.settings import NodeSettings
from support.raas_parts import SAMPLING

GOOD = {
    "choices": [{"message": {"content": "yes"}, "finish_reason": "length"}],
    "usage": {"prompt_tokens": 7},
}
Answers = Callable[[int], httpx.Response]


class Asked:
    """A model whose n-th attempt, from 1, gets `answers(n)`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, answers: Answers, **settings: object) -> None:
        self.requests: list[httpx.Request] = []
        self.metrics = Metrics()

        async def handle(request: httpx.Request) -> httpx.Response:
            self.requests.append(request)
            await asyncio.sleep(0)
            return unread(answers(len(self.requests)))

        transport = httpx.MockTransport(handle)
        monkeypatch.setattr(httpx, "AsyncClient", partial(httpx.AsyncClient, transport=transport))
        endpoint = ExternalEndpoint(base_url="http://there/v1", key="secret")
        options = ExternalSettings(model="wise", **settings)  # type: ignore[arg-type]
        self.model = ExternalModel(
            "judge", options, endpoint=endpoint, metrics=self.metrics, first_wait_s=0.001
        )

    async def chat(self) -> GenerateResult:
        return await self.model.chat([Message("user", "right?")], sampling=SAMPLING, max_new_tokens=5)


def json_answer(content: object, status: int = 200) -> httpx.Response:
    return httpx.Response(status, json=content)


def unread(given: httpx.Response) -> httpx.Response:
    """As it comes from a connection."""
    return httpx.Response(given.status_code, headers=given.headers, stream=httpx.ByteStream(given.content))


def lost(_: int) -> httpx.Response:
    raise httpx.ConnectError("nobody listens")


async def test_an_answer_is_text_without_tokens_and_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(monkeypatch, lambda _: json_answer(GOOD))
    assert await asked.chat() == GenerateResult((), (), (), "yes", "length")
    (request,) = asked.requests
    assert (str(request.url), request.headers["authorization"]) == (
        "http://there/v1/chat/completions",
        "Bearer secret",
    )
    page = asked.metrics.render().decode()
    assert 'external_calls_total{outcome="answered",policy="judge"} 1' in page
    assert 'external_tokens_total{kind="prompt",policy="judge"} 7' in page


@pytest.mark.parametrize("status", [429, 500, 503, 408])
async def test_a_busy_endpoint_is_asked_again(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(monkeypatch, lambda n: json_answer(GOOD) if n == 3 else json_answer({}, status))
    assert (await asked.chat()).text == "yes"
    assert len(asked.requests) == 3


@pytest.mark.parametrize(
    ("answers", "kind", "attempts", "says"),
    [
        (lambda _: json_answer({}, 503), EngineFaulty, 2, "2 attempts: HTTP 503"),
        (lost, EngineFaulty, 2, "nobody listens"),
        (lambda _: httpx.Response(200, text="<html>"), EngineFaulty, 2, "not JSON"),
        (lambda _: json_answer({"choices": []}), EngineFaulty, 1, "no chat completion"),
        (
            lambda _: json_answer({"choices": [{"message": {"content": 3}}]}),
            EngineFaulty,
            1,
            "no chat completion",
        ),
        (lambda _: json_answer([]), EngineFaulty, 1, "no chat completion"),
        (lambda _: json_answer("x" * 2**24), EngineFaulty, 1, "answered more than 16777216 bytes"),
        (lambda _: json_answer({"error": "no such model"}, 404), EngineRefused, 1, "no such model"),
        (lambda _: json_answer({}, 401), MissingCapability, 1, "--external-key-file judge=PATH"),
    ],
)
async def test_what_cannot_be_used_ends_with_a_reason(
    answers: Answers,
    kind: type[AstraflowError | MissingCapability],
    attempts: int,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = Asked(monkeypatch, answers, max_attempts=2)
    with pytest.raises(kind, match=says):
        await asked.chat()
    assert len(asked.requests) == attempts


async def test_no_more_calls_than_allowed_are_made_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    running, most = 0, 0

    async def handle(_: httpx.Request) -> httpx.Response:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return unread(json_answer(GOOD))

    asked = Asked(monkeypatch, lambda _: json_answer(GOOD), max_concurrent_calls=2)
    monkeypatch.setattr(
        httpx, "AsyncClient", partial(httpx.AsyncClient, transport=httpx.MockTransport(handle))
    )
    await asyncio.gather(*(asked.chat() for _ in range(8)))
    assert most == 2


def test_endpoints_and_keys_are_settings_of_the_node(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("secret\n")
    options = {"external": ("judge=https://a/v1?x=1",), "external_key_file": (f"judge={key}",)}
    found = endpoints_of(NodeSettings(join="h:1", **options))  # type: ignore[arg-type]
    assert found == {"judge": ExternalEndpoint(base_url="https://a/v1?x=1", key="secret")}
    assert "secret" not in repr(found)
    with pytest.raises(SettingsError):
        endpoints_of(NodeSettings(join="h:1", external_key_file=("judge=/nowhere",)))
    with pytest.raises(ValueError, match="POLICY=VALUE"):
        NodeSettings(join="h:1", external=("https://a/v1",))
