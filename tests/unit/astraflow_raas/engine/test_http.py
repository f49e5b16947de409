"""The HTTP client against a scripted server that speaks SGLang: what it sends, believes, and how it fails."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from astraflow.plugins import VersionSpan
from astraflow_kit.http import HttpServer
from astraflow_raas.engine.base import EngineFaulty, EngineRefused, EngineUnavailable
from astraflow_raas.engine.http import HttpEngine
from support.raas_parts import generate_call
from support.scripted_dataflow import eventually

pytestmark = pytest.mark.slow

UPDATE = "/update_weights_from_disk"
CALL = generate_call(
    prompt_ids=(5, 6), max_new_tokens=3, temperature=0.7, top_p=0.9, seed=42, stop_token_ids=(2,)
)


def answer(**meta: object) -> dict[str, object]:
    """One answer of /generate: three tokens under version 4."""
    given: dict[str, object] = {
        "id": "r0",
        "finish_reason": {"type": "stop", "matched": 2},
        "weight_version": "4",
        "weight_versions": [{"version": "4", "start": 0, "end": 3}],
        "output_token_logprobs": [(-0.5, 7, None), (-0.25, 8, None), (-1.0, 2, None)],
    }
    return {"output_ids": [7, 8, 2], "meta_info": given | meta}


@dataclass
class Script:
    """Answers by path and what was asked, in order."""

    answers: dict[str, Response] = field(default_factory=dict)
    """One good answer for each call of /generate unless given."""
    asked: list[tuple[str, Any]] = field(default_factory=list)
    may_update: asyncio.Event = field(default_factory=asyncio.Event)

    def answer(self, path: str, content: object, status: int = 200) -> None:
        self.answers[path] = JSONResponse(content, status_code=status)

    @property
    def paths(self) -> list[str]:
        return [path for path, _ in self.asked]

    async def respond(self, request: Request) -> Response:
        path, body = request.url.path, await request.json() if await request.body() else None
        self.asked.append((path, body))
        if path == UPDATE:
            await self.may_update.wait()
        good = [answer() for _ in body["rid"]] if path == "/generate" else {"success": True, "message": "ok"}
        return self.answers.get(path, JSONResponse(good))


@pytest.fixture
def script() -> Script:
    script = Script()
    script.answer("/model_info", {"weight_version": "4"})
    script.may_update.set()
    return script


@pytest.fixture
async def engine(script: Script) -> AsyncIterator[HttpEngine]:
    server = HttpServer(Starlette(routes=[Route("/{path}", script.respond, methods=["GET", "POST"])]))
    await server.start()
    serving = asyncio.create_task(server.run())
    client = HttpEngine(f"http://{server.address}", request_timeout_s=10.0)
    yield client
    await client.close()
    await server.stop(deadline_s=1.0)
    await serving


async def test_a_call_is_sent_in_sglangs_words(engine: HttpEngine, script: Script) -> None:
    await engine.served_version()
    await engine.generate([CALL, replace(CALL, rid="r1", seed=43)])
    _, body = script.asked[-1]
    # Zero candidates mean all of them; SGLang says -1.
    sampling = {"max_new_tokens": 3, "temperature": 0.7, "top_p": 0.9, "top_k": -1, "stop_token_ids": [2]}
    assert body == {
        "rid": ["r0", "r1"],
        "input_ids": [[5, 6], [5, 6]],
        "return_logprob": True,
        "extra_key": "4",
        "stream": False,
        "sampling_params": [{**sampling, "sampling_seed": seed} for seed in (42, 43)],
    }


async def test_an_answer_becomes_tokens_logprobs_and_spans(engine: HttpEngine, script: Script) -> None:
    spans = [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 3}]
    script.answer("/generate", [answer(weight_versions=spans)])
    (generation,) = await engine.generate([CALL])
    assert generation.spans == (VersionSpan(0, 1, 3), VersionSpan(1, 3, 4))
    assert (generation.token_ids, generation.logprobs) == ((7, 8, 2), (-0.5, -0.25, -1.0))
    assert generation.finish_reason == "stop"


async def test_without_a_list_of_versions_one_made_all_tokens(engine: HttpEngine, script: Script) -> None:
    script.answer("/generate", [answer(weight_versions=None)])
    (generation,) = await engine.generate([CALL])
    assert generation.spans == (VersionSpan(0, 3, 4),)


@pytest.mark.parametrize(
    "meta",
    [
        {"output_token_logprobs": [(-0.5, 7, None)]},
        {"output_token_logprobs": [(-0.5, 7, None), (-0.2, 9, None), (-1.0, 2, None)]},
        {"output_token_logprobs": [(-0.5, 7, None), (0.3, 8, None), (-1.0, 2, None)]},
        {"output_token_logprobs": [(-0.5, 7, None), (None, 8, None), (-1.0, 2, None)]},
        {"output_token_logprobs": None},
        {"weight_versions": [{"version": "4", "start": 0, "end": 2}]},
        {"weight_versions": [{"version": "4", "start": 1, "end": 3}]},
        {"weight_versions": [{"version": "default", "start": 0, "end": 3}]},
        {"finish_reason": None},
    ],
)
async def test_contradictory_answers_are_not_believed(engine: HttpEngine, script: Script, meta: Any) -> None:
    script.answer("/generate", [answer(**meta)])
    with pytest.raises(EngineFaulty, match="call r0 is unusable"):
        await engine.generate([CALL])


async def test_the_wrong_number_of_answers_is_not_believed(engine: HttpEngine, script: Script) -> None:
    script.answer("/generate", [answer(), answer()])
    with pytest.raises(EngineFaulty, match="1 calls"):
        await engine.generate([CALL])


async def test_a_logprob_an_ulp_above_zero_is_rounding(engine: HttpEngine, script: Script) -> None:
    pairs = [(1e-7, 7, None), (-0.25, 8, None), (-1.0, 2, None)]
    script.answer("/generate", [answer(output_token_logprobs=pairs)])
    (generation,) = await engine.generate([CALL])
    assert generation.logprobs[0] == 0.0


REFUSED, AWAY = EngineRefused, EngineUnavailable
STATUSES = {400: REFUSED, 422: REFUSED, 429: AWAY, 503: AWAY, 500: EngineFaulty}


@pytest.mark.parametrize("status", STATUSES)
async def test_status_codes_say_what_to_do_next(engine: HttpEngine, script: Script, status: int) -> None:
    script.answer("/generate", {"error": {"message": "as scripted"}}, status)
    with pytest.raises(STATUSES[status], match="as scripted"):
        await engine.generate([CALL])


async def test_nobody_at_the_address_and_an_engine_given_up_are_unavailable(tmp_path: Path) -> None:
    engine = HttpEngine("http://127.0.0.1:9")
    for attempt in (engine.generate([CALL]), engine.check_health(), engine.served_version()):
        with pytest.raises(EngineUnavailable):
            await attempt
    await engine.close()
    for attempt in (engine.served_version(), engine.swap(model_dir=tmp_path, version=1)):
        with pytest.raises(EngineUnavailable, match="gone"):
            await attempt


async def test_a_swap_pauses_in_place_loads_and_continues(engine: HttpEngine, script: Script) -> None:
    await engine.swap(model_dir=Path("v5"), version=5)
    update = {"model_path": "v5", "weight_version": "5", "flush_cache": False}
    assert script.asked[:2] == [("/pause_generation", {"mode": "in_place"}), (UPDATE, update)]
    assert script.paths[2:] == ["/continue_generation"]


async def swap_begun(engine: HttpEngine, script: Script) -> "asyncio.Task[None]":
    """A swap that waits for the engine to load."""
    script.may_update.clear()
    swapping = asyncio.create_task(engine.swap(model_dir=Path("v5"), version=5))
    await eventually(lambda: UPDATE in script.paths, what="the update")
    return swapping


async def test_calls_made_during_a_swap_wait_and_never_share_prefixes_with_older_weights(
    engine: HttpEngine, script: Script
) -> None:
    await engine.served_version()
    swapping = await swap_begun(engine, script)
    calling = asyncio.create_task(engine.generate([CALL]))
    await asyncio.sleep(0.05)
    assert "/generate" not in script.paths
    script.may_update.set()
    await asyncio.gather(swapping, calling)
    path, body = script.asked[-1]
    assert (path, body["extra_key"]) == ("/generate", "5")


async def test_a_refused_update_leaves_the_engine_running(engine: HttpEngine, script: Script) -> None:
    script.answer(UPDATE, {"success": False, "message": "shape mismatch"}, 400)
    with pytest.raises(EngineRefused, match="shape mismatch"):
        await engine.swap(model_dir=Path("v5"), version=5)
    assert script.paths[-1] == "/continue_generation"
    await engine.generate([CALL])


async def test_a_cancelled_swap_never_leaves_the_engine_paused(engine: HttpEngine, script: Script) -> None:
    swapping = await swap_begun(engine, script)
    swapping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await swapping
    script.may_update.set()
    assert script.paths[-1] == "/continue_generation"


@pytest.mark.parametrize(("named", "served"), [("4", 4), ("default", None), ("v4", None), (None, None)])
async def test_only_a_numbered_version_counts_as_ours(
    engine: HttpEngine, script: Script, named: str | None, served: int | None
) -> None:
    script.answer("/model_info", {"weight_version": named})
    assert await engine.served_version() == served


async def test_calls_are_aborted_by_their_id(engine: HttpEngine, script: Script) -> None:
    await engine.abort(["r1", "r2"])
    assert script.asked == [("/abort_request", {"rid": "r1"}), ("/abort_request", {"rid": "r2"})]
