"""Calls with deadlines: a caller that leaves takes its sequences along, an update works whole or not at
all."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from astraflow_engine import api, errors
from astraflow_engine.core import EngineCore
from astraflow_engine.requests import Completion, FinishKind, GenerateRequest, PauseMode
from astraflow_engine.service import EngineService
from astraflow_kit import failpoints
from support import engine_parts, tiny_models


async def never() -> None:
    await asyncio.Event().wait()


async def live(service: EngineService) -> int:
    return await service.ask(lambda core: core.num_live)


async def until_live(service: EngineService, count: int) -> None:
    """Wait until the engine holds `count` requests."""
    async with asyncio.timeout(engine_parts.DEADLINE_S):
        while await live(service) < count:  # noqa: ASYNC110 - the engine signals nobody
            await asyncio.sleep(0)


@asynccontextmanager
async def held(service: EngineService, rid: str = "held") -> AsyncIterator[list[Completion]]:
    """A paused engine that holds one request; at the end it has ended and the list has its completion."""
    await service.pause(PauseMode.IN_PLACE)
    request = asyncio.create_task(generated(service, engine_parts.greedy(rid)))
    await until_live(service, 1)
    ended: list[Completion] = []
    yield ended
    ended += await asyncio.wait_for(request, engine_parts.DEADLINE_S)


async def generated(service: EngineService, *requests: GenerateRequest) -> list[Completion]:
    """The completions of a call whose caller waits."""
    completions = await service.generate(requests, caller_is_gone=never())
    assert completions is not None
    return completions


async def greedy_tokens(service: EngineService) -> tuple[tuple[int, ...], str]:
    """What the engine says now, and under which version."""
    (completion,) = await generated(service, engine_parts.greedy("probe"))
    return completion.tokens, completion.spans[0].version


def update(folder: Path, **differing: Any) -> api.WeightUpdate:
    given = {"weight_version": "1", "flush_cache": True, "abort_all_requests": False, "prepared": False}
    return api.WeightUpdate(model_path=folder, **(given | differing))


async def test_sequences_come_back_in_order(service: EngineService) -> None:
    requests = [engine_parts.greedy(str(index), max_new_tokens=9 - index) for index in range(6)]
    completions = await generated(service, *requests)
    assert [len(completion.tokens) for completion in completions] == [9, 8, 7, 6, 5, 4]


async def test_a_caller_that_leaves_takes_its_sequences_along(service: EngineService) -> None:
    await service.pause(PauseMode.IN_PLACE)
    gone = asyncio.Event()
    call = asyncio.ensure_future(
        service.generate([engine_parts.greedy("a"), engine_parts.greedy("b")], caller_is_gone=gone.wait())  # type: ignore[arg-type]
    )
    await until_live(service, 2)
    gone.set()
    assert await asyncio.wait_for(call, engine_parts.DEADLINE_S) is None
    assert await live(service) == 0


async def test_a_request_beyond_the_deadline_is_aborted(folder: Path) -> None:
    service = engine_parts.make_service(folder, engine_parts.make_worker(folder), request_timeout_s=0.2)
    await service.start()
    await service.pause(PauseMode.IN_PLACE)
    with pytest.raises(errors.RequestTimeout, match=r"not finished after 0\.2 s"):
        await generated(service, engine_parts.greedy("late"))
    assert await live(service) == 0
    await service.stop(deadline_s=engine_parts.DEADLINE_S)


async def test_a_call_with_a_used_rid_fails_whole_and_spares_its_owner(service: EngineService) -> None:
    async with held(service, "mine") as owner:
        with pytest.raises(errors.InvalidRequest, match="rid 'mine' is already in progress"):
            await generated(service, engine_parts.greedy("other"), engine_parts.greedy("mine"))
        assert await live(service) == 1
        await service.resume()
    assert owner[0].finish.kind is FinishKind.LENGTH


async def test_a_failing_update_keeps_weights_path_and_version(service: EngineService, folder: Path) -> None:
    before = await greedy_tokens(service)
    with pytest.raises(errors.ModelError, match="neither model"):
        await service.update_weights(update(folder.parent / "nowhere"))
    failpoints.arm("engine.before_swap=raise")
    with pytest.raises(failpoints.FailpointRaised):
        await service.update_weights(update(folder))
    assert await greedy_tokens(service) == before
    assert service.model_path == folder


async def test_what_was_prepared_is_swapped_in_once_and_only_under_its_name(
    service: EngineService, folder: Path, tmp_path: Path
) -> None:
    others = tiny_models.save_tiny_model(tmp_path / "others", seed=1)
    before = await greedy_tokens(service)
    await service.prepare_weights(update(others))
    assert await greedy_tokens(service) == before
    shutil.rmtree(others)
    await service.update_weights(update(others, prepared=True))
    assert (await greedy_tokens(service))[0] != before[0]
    for differing in ({}, {"weight_version": "2"}, {"prepared": False}):
        if differing:
            await service.prepare_weights(update(folder))
        with pytest.raises(errors.ModelError):
            await service.update_weights(update(others, **({"prepared": True} | differing)))


async def test_weights_that_cannot_be_prepared_take_away_what_was(
    service: EngineService, folder: Path, tmp_path: Path
) -> None:
    others = tiny_models.save_tiny_model(tmp_path / "others", seed=1)
    await service.prepare_weights(update(others))
    shutil.rmtree(others)
    with pytest.raises(errors.ModelError):
        await service.prepare_weights(update(others))
    with pytest.raises(errors.ModelError):
        await service.update_weights(update(others, prepared=True))


async def test_an_update_under_paused_requests_must_not_flush(service: EngineService, folder: Path) -> None:
    async with held(service) as request:
        with pytest.raises(errors.CacheInUse, match="send flush_cache: false"):
            await service.update_weights(update(folder, weight_version="refused"))
        assert await service.update_weights(update(folder, flush_cache=False)) == 1
        await service.resume()
    assert [span.version for span in request[0].spans] == ["1"]


async def test_an_update_may_abort_what_runs(service: EngineService, folder: Path) -> None:
    async with held(service) as request:
        await service.update_weights(update(folder, abort_all_requests=True))
    assert request[0].finish.kind is FinishKind.ABORT


async def test_an_abort_without_a_name_means_nothing(service: EngineService) -> None:
    async with held(service):
        await service.abort(api.AbortRequest(rid="", abort_all=False))
        assert await live(service) == 1
        await service.abort(api.AbortRequest(rid="", abort_all=True))


async def test_a_flush_waits_for_an_idle_engine_as_long_as_it_may(service: EngineService) -> None:
    running = asyncio.create_task(generated(service, engine_parts.greedy("r", max_new_tokens=100)))
    await until_live(service, 1)
    await service.flush(timeout_s=engine_parts.DEADLINE_S)
    assert (await asyncio.wait_for(running, engine_parts.DEADLINE_S))[0].tokens


async def test_a_failed_thread_ends_the_service_and_shows_as_not_alive(service: EngineService) -> None:
    assert service.alive
    failpoints.arm("engine.decode_step=raise")
    with pytest.raises(errors.EngineUnavailable, match="the engine has stopped"):
        await generated(service, engine_parts.greedy("r"))
    with pytest.raises(errors.EngineFault, match="FailpointRaised"):
        await asyncio.wait_for(service.run(), engine_parts.DEADLINE_S)
    assert not service.alive


async def test_a_paused_engine_is_healthy(service: EngineService) -> None:
    await service.pause(PauseMode.IN_PLACE)
    await asyncio.wait_for(service.prove_generating(), engine_parts.DEADLINE_S)


async def test_an_idle_engine_proves_its_health_by_a_token(service: EngineService) -> None:
    await service.prove_generating()
    assert (await service.stats()).num_generated_tokens == 1


async def test_concurrent_updates_take_turns(service: EngineService, tmp_path: Path) -> None:
    folders = [tiny_models.save_tiny_model(tmp_path / str(seed), seed=seed) for seed in range(3)]
    await asyncio.gather(*(service.update_weights(update(f, weight_version=f.name)) for f in folders))
    stats = await service.stats()
    assert (stats.num_swaps, stats.weight_version) == (3, service.model_path.name)


async def test_orders_after_the_end_are_refused(service: EngineService) -> None:
    await service.ask(EngineCore.stats)
    await service.stop(deadline_s=engine_parts.DEADLINE_S)
    with pytest.raises(errors.EngineUnavailable):
        await service.ask(EngineCore.stats)
    assert not service.alive
