"""The HTTP client against a server that speaks SGLang: what it sends, how it swaps, what it repeats and what it doubts.

What it believes of an answer is in tests/integration/test_misbehaving_engine.py.
"""

import asyncio
import json
import pickle
from base64 import b64decode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import structlog.testing

from astraflow.plugins import VersionSpan
from astraflow_raas.engine.base import (
    EngineDoubtful,
    EngineFaulty,
    EngineRefused,
    EngineUnavailable,
    PauseMode,
)
from astraflow_raas.engine.changed_elements import LOADER, ChangedOrders
from astraflow_raas.engine.http import HttpEngine
from astraflow_weights.codec.tensors import TensorSpec
from astraflow_weights.mirror.changes import ChangedElements
from astraflow_weights.mirror.checkpoint import create_weights_file
from support import misbehaving_engine as bad
from support.misbehaving_engine import MisbehavingEngine, Misbehaviour
from support.raas_parts import generate_call
from support.scripted_dataflow import eventually

pytestmark = pytest.mark.slow

CALL = generate_call(
    prompt_ids=(5, 6), max_new_tokens=3, temperature=0.7, top_p=0.9, seed=42, stop_token_ids=(2,)
)
V5 = Path("v5")


@pytest.fixture
async def server() -> AsyncIterator[MisbehavingEngine]:
    async with bad.misbehaving_engine() as server:
        yield server


@pytest.fixture
async def engine(server: MisbehavingEngine) -> AsyncIterator[HttpEngine]:
    async with introduced(server) as engine:
        yield engine


@pytest.fixture
async def hasty(server: MisbehavingEngine) -> AsyncIterator[HttpEngine]:
    """A client that soon takes a silent engine for a hung one."""
    async with introduced(server, control_timeout_s=0.3) as engine:
        yield engine


@asynccontextmanager
async def introduced(server: MisbehavingEngine, **timeouts: float) -> AsyncIterator[HttpEngine]:
    client = HttpEngine(server.url, request_timeout_s=10.0, swap_timeout_s=1.0, **timeouts)
    await client.introduce()
    await client.served_version()
    server.asked.clear()
    yield client
    await client.close()


async def test_a_call_is_sent_in_sglangs_words(engine: HttpEngine, server: MisbehavingEngine) -> None:
    await engine.generate([CALL, replace(CALL, rid="r1", seed=43)])
    _, body = server.asked[-1]
    assert body["rid"] == ["r0", "r1"]
    assert body["input_ids"] == [[5, 6], [5, 6]]
    assert body["return_logprob"] is True
    assert body["extra_key"].endswith("-4")
    assert [params["sampling_seed"] for params in body["sampling_params"]] == [42, 43]
    assert "routed_dp_rank" not in body
    # Zero candidates mean all of them; SGLang says -1.
    assert body["sampling_params"][0] | {"sampling_seed": 0} == {
        "max_new_tokens": 3,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": -1,
        "sampling_seed": 0,
        "stop_token_ids": [2],
    }


async def test_an_answer_becomes_tokens_logprobs_and_spans(
    engine: HttpEngine, server: MisbehavingEngine
) -> None:
    (generation,) = await engine.generate([CALL])
    assert generation.token_ids == (7, 8, 2)
    assert generation.logprobs == (-0.5, -1.5, -2.5)
    assert generation.spans == (VersionSpan(0, 3, 4),)
    assert generation.finish_reason == "stop"
    server.next("/generate", bad.meta(weight_versions=None))
    (generation,) = await engine.generate([CALL])
    assert generation.spans == (VersionSpan(0, 3, 4),), "without a list one version made all tokens"
    server.next("/generate", bad.outputs(7, 8, 2, logprobs=(1e-7, -1.0, -1.0)))
    (generation,) = await engine.generate([CALL])
    assert generation.logprobs[0] == 0.0, "an ulp above zero is rounding"


async def test_a_call_that_met_a_swap_names_both_versions_unless_it_took_old_prefixes(
    engine: HttpEngine, server: MisbehavingEngine
) -> None:
    async def swap_meanwhile(exchange: bad.Exchange) -> None:
        await engine.swap(model_dir=V5, version=5)
        exchange.answer[0]["meta_info"] |= next_meta
        await exchange.send()

    next_meta: bad.Json = {
        "weight_versions": [{"version": v, "start": s, "end": e} for v, s, e in (("4", 0, 1), ("5", 1, 3))]
    }
    server.next("/generate", swap_meanwhile)
    (generation,) = await engine.generate([CALL])
    assert generation.spans == (VersionSpan(0, 1, 4), VersionSpan(1, 3, 5))
    # It waited inside the engine over the swap and began with a prefix of the old weights.
    next_meta = {"weight_versions": [{"version": "5", "start": 0, "end": 3}], "cached_tokens": 2}
    server.version = "4"
    await engine.served_version()
    server.next("/generate", swap_meanwhile)
    (generation,) = await engine.generate([CALL])
    assert generation.finish_reason == "abort", "it is made again"


STATUSES: dict[int, type[Exception]] = {
    **dict.fromkeys((400, 422), EngineRefused),
    **dict.fromkeys((429, 503), EngineUnavailable),
    500: EngineFaulty,
}


@pytest.mark.parametrize("status", STATUSES)
async def test_status_codes_say_what_to_do_next(
    engine: HttpEngine, server: MisbehavingEngine, status: int
) -> None:
    server.next("/generate", bad.says(status, '{"error": {"message": "as scripted"}}'))
    with pytest.raises(STATUSES[status], match="as scripted"):
        await engine.generate([CALL])


async def test_nobody_at_the_address_and_an_engine_given_up_are_unavailable(tmp_path: Path) -> None:
    engine = HttpEngine("http://127.0.0.1:9")
    for attempt in (engine.generate([CALL]), engine.check_health(), engine.served_version()):
        with pytest.raises(EngineUnavailable):
            await attempt
    await engine.close()
    with pytest.raises(EngineUnavailable, match="gone"):
        await engine.served_version()


async def test_a_swap_pauses_in_place_loads_asks_and_continues(
    engine: HttpEngine, server: MisbehavingEngine
) -> None:
    await engine.swap(model_dir=V5, version=5)
    assert server.asked == [
        ("/pause_generation", {"mode": "in_place"}),
        ("/update_weights_from_disk", {"model_path": "v5", "weight_version": "5", "flush_cache": False}),
        ("/model_info", {}),
        ("/continue_generation", {"torch_empty_cache": False}),
    ]


def straddling(exchange: bad.Exchange) -> None:
    """An answer that was under way when version 4 became 5."""
    spans = [{"version": "4", "start": 0, "end": 1}, {"version": "5", "start": 1, "end": 3}]
    exchange.answer[0]["meta_info"]["weight_versions"] = spans


async def swapped_while_running(
    engine: HttpEngine, server: MisbehavingEngine, running: PauseMode
) -> tuple[VersionSpan, ...]:
    """The spans of a call that ran when version 5 was loaded."""

    async def swap_meanwhile(exchange: bad.Exchange) -> None:
        await engine.swap(model_dir=V5, version=5, running=running)
        straddling(exchange)
        await exchange.send()

    server.next("/generate", swap_meanwhile)
    (generation,) = await engine.generate([CALL])
    return generation.spans


async def test_retracted_calls_find_no_older_prefix_and_their_spans_say_so(
    engine: HttpEngine, server: MisbehavingEngine
) -> None:
    spans = await swapped_while_running(engine, server, PauseMode.RETRACT)
    assert spans == (VersionSpan(0, 1, 4), VersionSpan(1, 3, 5, recomputed=True))
    assert server.paths[1:] == [
        "/pause_generation",
        "/update_weights_from_disk",
        "/model_info",
        "/flush_cache",
        "/continue_generation",
    ]
    assert server.asked[1][1] == {"mode": "retract"}


async def test_a_cache_that_was_not_flushed_is_not_called_computed_anew(
    engine: HttpEngine, server: MisbehavingEngine
) -> None:
    async def refuse(exchange: bad.Exchange) -> None:
        exchange.status = 400
        await exchange.send()

    server.next("/flush_cache", refuse)
    spans = await swapped_while_running(engine, server, PauseMode.RETRACT)
    assert [span.recomputed for span in spans] == [False, False]
    assert not server.paused


async def test_a_repair_ends_running_calls_and_the_prefixes_of_its_version(
    engine: HttpEngine, server: MisbehavingEngine
) -> None:
    await engine.generate([CALL])
    await engine.swap(model_dir=V5, version=4, running=PauseMode.ABORT)
    await engine.generate([CALL])
    before, after = (body["extra_key"] for path, body in server.asked if path == "/generate")
    assert server.asked[1] == ("/pause_generation", {"mode": "abort"})
    assert before != after


async def swap_begun(engine: HttpEngine, server: MisbehavingEngine) -> "asyncio.Task[None]":
    """A swap that waits for the engine to load."""
    server.may_update.clear()
    swapping = asyncio.create_task(engine.swap(model_dir=V5, version=5))
    await eventually(lambda: "/update_weights_from_disk" in server.paths, what="the update")
    return swapping


async def test_calls_made_during_a_swap_wait_and_never_share_prefixes_with_older_weights(
    engine: HttpEngine, server: MisbehavingEngine
) -> None:
    swapping = await swap_begun(engine, server)
    calling = asyncio.create_task(engine.generate([CALL]))
    await asyncio.sleep(0.05)
    assert "/generate" not in server.paths
    server.may_update.set()
    await asyncio.gather(swapping, calling)
    assert server.asked[-1][0] == "/generate"
    assert server.asked[-1][1]["extra_key"].endswith("-5")


async def test_a_cancelled_swap_never_leaves_the_engine_paused(
    engine: HttpEngine, server: MisbehavingEngine
) -> None:
    swapping = await swap_begun(engine, server)
    server.next("/continue_generation", bad.says(503, "busy"))
    swapping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await swapping
    server.may_update.set()
    await eventually(lambda: server.paths.count("/continue_generation") == 2, what="the resume is repeated")
    assert not server.paused


@pytest.mark.parametrize("path", ["/pause_generation", "/continue_generation", "/model_info"])
@pytest.mark.parametrize("how", [bad.reset, bad.half_closed, bad.says(503, "busy")])
async def test_a_swap_outlives_a_lost_answer(
    engine: HttpEngine, server: MisbehavingEngine, path: str, how: Misbehaviour
) -> None:
    server.next(path, how)
    await engine.swap(model_dir=V5, version=5)
    assert (server.version, server.paused) == ("5", False)


async def test_an_update_whose_answer_was_lost_has_happened(
    engine: HttpEngine, server: MisbehavingEngine
) -> None:
    server.next("/update_weights_from_disk", bad.reset)
    await engine.swap(model_dir=V5, version=5)
    assert server.paths.count("/update_weights_from_disk") == 1
    assert not server.paused


async def test_an_engine_that_never_acknowledges_its_resume_is_doubted(
    hasty: HttpEngine, server: MisbehavingEngine
) -> None:
    server.next("/continue_generation", *[bad.says(500, "it stays paused")] * 100)
    with pytest.raises(
        EngineDoubtful, match="may still be paused: /continue_generation was not acknowledged"
    ):
        await hasty.swap(model_dir=V5, version=5)


async def test_an_engine_that_freezes_before_it_pauses_is_doubted_after_one_time_to_pause_and_one_to_resume(
    hasty: HttpEngine, server: MisbehavingEngine
) -> None:
    for path in ("/pause_generation", "/continue_generation"):
        server.next(path, *[bad.hang] * 100)
    with pytest.raises(EngineDoubtful, match=r"may still be paused.* within 0\.3 s"):
        await hasty.swap(model_dir=V5, version=5)
    assert server.paths.count("/pause_generation") == 1


DOUBTFUL: dict[str, tuple[Misbehaviour, str]] = {
    "a refusal": (
        bad.says(400, '{"success": false, "message": "shape mismatch"}'),
        "refused version 5.*shape mismatch",
    ),
    "a failure in a good answer": (bad.says(200, '{"success": false, "message": "no memory"}'), "no memory"),
    "a crash": (bad.says(500, "Internal Server Error"), "did not load version 5.*Internal Server Error"),
    "a broken answer": (bad.truncated_json, "broken JSON"),
}


@pytest.mark.parametrize("name", DOUBTFUL)
async def test_an_update_that_did_not_succeed_leaves_an_engine_that_is_doubted_and_not_paused(
    engine: HttpEngine, server: MisbehavingEngine, name: str
) -> None:
    misbehaviour, words = DOUBTFUL[name]
    server.next("/update_weights_from_disk", misbehaviour)
    with pytest.raises(EngineDoubtful, match=words):
        await engine.swap(model_dir=V5, version=5)
    assert not server.paused


async def test_a_version_that_does_not_move_is_noticed_before_anything_is_sampled(
    engine: HttpEngine, server: MisbehavingEngine
) -> None:
    server.next("/model_info", bad.says(200, '{"weight_version": "4"}'))
    with pytest.raises(EngineDoubtful, match="given version 5 from v5 and serves version 4"):
        await engine.swap(model_dir=V5, version=5)


async def test_an_engine_that_hangs_while_it_loads_is_doubted_after_its_time(
    engine: HttpEngine, server: MisbehavingEngine
) -> None:
    server.next("/model_info", bad.says(200, '{"weight_version": "4"}'))
    server.next("/update_weights_from_disk", bad.hang)
    with pytest.raises(EngineDoubtful, match=r"no whole answer within 1.0 s"):
        await engine.swap(model_dir=V5, version=5)


@pytest.fixture
async def embedded(server: MisbehavingEngine) -> AsyncIterator[HttpEngine]:
    server.server_info = {"engine": "astraflow"}
    engine = HttpEngine(server.url)
    await engine.introduce()
    server.asked.clear()
    yield engine
    await engine.close()


async def test_the_embedded_engine_loads_before_it_is_paused(
    embedded: HttpEngine, server: MisbehavingEngine
) -> None:
    await embedded.swap(model_dir=V5, version=5)
    named = {"model_path": "v5", "weight_version": "5"}
    assert server.asked[:3] == [
        ("/prepare_weights", named),
        ("/pause_generation", {"mode": "in_place"}),
        ("/update_weights_from_disk", named | {"flush_cache": False, "prepared": True}),
    ]


async def test_a_version_that_the_embedded_engine_cannot_load_pauses_nothing(
    embedded: HttpEngine, server: MisbehavingEngine
) -> None:
    server.next("/prepare_weights", bad.says(400, '{"success": false, "message": "NaN"}'))
    with pytest.raises(EngineRefused, match="NaN"):
        await embedded.swap(model_dir=V5, version=5)
    assert server.paths == ["/prepare_weights"]


async def test_a_repair_loads_what_is_on_disk_once_nothing_runs(
    embedded: HttpEngine, server: MisbehavingEngine
) -> None:
    await embedded.swap(model_dir=V5, version=5, running=PauseMode.ABORT)
    assert server.paths[:2] == ["/pause_generation", "/update_weights_from_disk"]
    assert "prepared" not in server.asked[1][1]


async def test_the_embedded_engine_keeps_its_weights_when_it_refuses(
    embedded: HttpEngine, server: MisbehavingEngine
) -> None:
    server.next("/update_weights_from_disk", bad.says(400, '{"success": false, "message": "NaN"}'))
    with pytest.raises(EngineRefused, match="NaN") as refused:
        await embedded.swap(model_dir=V5, version=5)
    assert not isinstance(refused.value, EngineDoubtful)


async def test_calls_go_to_the_rank_whose_places_were_taken(server: MisbehavingEngine) -> None:
    state = {"effective_max_running_requests_per_dp": 5}
    server.server_info = {"internal_states": [state, state]}
    engine = HttpEngine(server.url)
    await engine.introduce()
    taken = [engine.slots.take(9) for _ in range(2)]
    assert taken == [(0, 4), (1, 4)], "one place of each stays free for probes"
    await engine.generate([CALL], rank=1)
    assert server.asked[-1][1]["routed_dp_rank"] == 1
    await engine.close()


@pytest.mark.parametrize(("named", "served"), [("4", 4), ("default", None), ("v4", None), ("", None)])
async def test_only_a_numbered_version_counts_as_ours(
    engine: HttpEngine, server: MisbehavingEngine, named: str, served: int | None
) -> None:
    server.version = named
    assert await engine.served_version() == served


async def test_calls_are_aborted_by_their_id(engine: HttpEngine, server: MisbehavingEngine) -> None:
    await engine.abort(["r1", "r2"])
    assert server.asked == [("/abort_request", {"rid": "r1"}), ("/abort_request", {"rid": "r2"})]


@dataclass
class Changing:
    """A client of an engine that was started with the loader, and a mirror that changed from version 4 to 5."""

    engine: HttpEngine
    orders: ChangedOrders
    mirror: Path
    changes: ChangedElements

    async def swap(self, **changes: PauseMode) -> None:
        await self.engine.swap(model_dir=self.mirror, version=5, changes=self.changes, **changes)


@pytest.fixture
async def changing(server: MisbehavingEngine, tmp_path: Path) -> AsyncIterator[Changing]:
    server.server_info = {"custom_weight_loader": [LOADER]}
    create_weights_file(tmp_path / "model.safetensors", [TensorSpec(name="w", dtype="bfloat16", shape=(4,))])
    orders = ChangedOrders(tmp_path / "orders")
    engine = HttpEngine(server.url, orders=orders)
    await engine.introduce()
    await engine.served_version()
    changes = ChangedElements(base_version=4, version=5, positions={"w": np.array([1], np.uint32)})
    yield Changing(engine, orders, tmp_path, changes)
    await engine.close()


def carried_out(server: MisbehavingEngine, folder: Path, **outcome: object) -> None:
    """What the loader in the engine does, to the next order."""

    async def carry_out(exchange: bad.Exchange) -> None:
        nonce = json.loads((folder / "order.json").read_text())["nonce"]
        (folder / "outcome-0.json").write_text(json.dumps({"nonce": nonce, **outcome}))
        server.version = exchange.body["weight_version"]
        await exchange.send()

    server.next(TENSORS, carry_out)


TENSORS, DISK = "/update_weights_from_tensor", "/update_weights_from_disk"


async def test_changed_elements_take_the_place_of_a_whole_load(
    server: MisbehavingEngine, changing: Changing, tmp_path: Path
) -> None:
    carried_out(server, tmp_path / "orders", written=1, whole=0)
    await changing.swap()
    assert DISK not in server.paths
    (body,) = [body for path, body in server.asked if path == TENSORS]
    assert (body["load_format"], body["weight_version"], body["flush_cache"]) == (LOADER, "5", False)
    assert pickle.loads(b64decode(body["serialized_named_tensors"][0])) == []
    assert server.paths.index("/pause_generation") < server.paths.index(TENSORS)


async def test_an_order_that_failed_is_followed_by_a_whole_load_in_the_same_pause_and_is_the_last(
    server: MisbehavingEngine, changing: Changing, tmp_path: Path
) -> None:
    carried_out(server, tmp_path / "orders", error="no plain copy")
    with structlog.testing.capture_logs() as logs:
        await changing.swap()
    assert [line["reason"] for line in logs if line["event"] == "engine.whole_loads"] == [
        "rank 0: no plain copy"
    ]
    assert server.paths.count("/pause_generation") == server.paths.count(DISK) == 1
    await changing.swap()
    assert server.paths.count(TENSORS) == 1


@pytest.mark.parametrize(
    "how", [bad.reset, bad.says(500, "CUDA error"), bad.says(400, "unknown load_format")]
)
async def test_an_order_whose_end_is_not_known_is_followed_by_a_whole_load(
    server: MisbehavingEngine, changing: Changing, how: Misbehaviour
) -> None:
    server.next(TENSORS, how)
    await changing.swap()
    assert server.paths.count(DISK) == 1


async def test_a_repair_and_changes_of_another_version_load_the_whole(
    server: MisbehavingEngine, changing: Changing
) -> None:
    changing.changes = replace(changing.changes, base_version=3)
    await changing.swap()
    await changing.swap(running=PauseMode.ABORT)
    assert (TENSORS in server.paths, server.paths.count(DISK)) == (False, 2)


@pytest.mark.parametrize(
    ("info", "why"),
    [
        ({"custom_weight_loader": None}, "not started with --custom-weight-loader"),
        ({"internal_states": [{"effective_max_running_requests_per_dp": 8}] * 2}, "2 data-parallel ranks"),
        ({"quantization": "fp8"}, "it quantises"),
        ({"speculative_algorithm": "EAGLE"}, "a draft model"),
        ({"pp_size": 2}, "pipeline parallel"),
    ],
)
async def test_an_engine_that_cannot_load_changes_says_so_once_and_loads_the_whole(
    server: MisbehavingEngine, changing: Changing, info: dict[str, object], why: str
) -> None:
    server.server_info |= info
    with structlog.testing.capture_logs() as logs:
        await changing.engine.introduce()
        await changing.swap()
    (said,) = [line["reason"] for line in logs if line["event"] == "engine.whole_loads"]
    assert why in said
    assert (TENSORS in server.paths, server.paths.count(DISK)) == (False, 1)
