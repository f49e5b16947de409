"""A loop ends where it waits, runs its last `finally`, and keeps errors apart from cancellations."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from astraflow.client import AsyncClient, Connection
from astraflow.errors import AstraflowError, UnauthenticatedError
from astraflow_raas.loops import LoopService, StreamService


class Waiting(LoopService):
    """Waits for ever and notes how it ended."""

    def __init__(self, fault: Exception | None = None) -> None:
        super().__init__()
        self.fault = fault
        self.cleaned_up = False
        self.started = asyncio.Event()

    async def _loop(self) -> None:
        self.started.set()
        if self.fault is not None:
            raise self.fault
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.01)
            self.cleaned_up = True


async def started() -> "tuple[Waiting, asyncio.Task[None]]":
    """A service in its loop, and the task that runs it."""
    service = Waiting()
    running = asyncio.create_task(service.run())
    await service.started.wait()
    return service, running


async def test_stop_waits_for_the_last_finally_and_run_returns() -> None:
    service, running = await started()
    await service.stop(deadline_s=5.0)
    assert service.cleaned_up
    await running
    await service.stop(deadline_s=5.0)


async def test_a_service_stopped_before_it_runs_does_nothing() -> None:
    service = Waiting()
    await service.stop(deadline_s=1.0)
    await service.run()
    assert not service.started.is_set()


async def test_an_error_of_the_loop_reaches_whoever_runs_it() -> None:
    with pytest.raises(ValueError, match="broken"):
        await Waiting(ValueError("broken")).run()


async def test_a_cancellation_from_outside_spreads_and_still_cleans_up() -> None:
    service, running = await started()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert service.cleaned_up


class Refused(StreamService):
    """A stream whose first attempts a server refuses for their token."""

    def __init__(self, client: AsyncClient, *, refusals: int) -> None:
        super().__init__()
        self._client, self.refusals = client, refusals
        self.reported: list[str] = []
        self.worked = asyncio.Event()

    async def _stream(self) -> None:
        if self.refusals:
            self.refusals -= 1
            raise UnauthenticatedError("the token has expired")
        self.worked.set()
        await asyncio.Event().wait()

    def _stream_failed(self, error: AstraflowError, *, report: Callable[..., None]) -> None:
        self.reported.append(error.reason)


async def test_a_refused_token_is_waited_out_where_a_file_may_bring_another(tmp_path: Path) -> None:
    connection = Connection("127.0.0.1:1", token=tmp_path / "token")
    (tmp_path / "token").write_text("t")
    async with AsyncClient(connection) as client:
        service = Refused(client, refusals=2)
        running = asyncio.create_task(service.run())
        async with asyncio.timeout(10):
            await service.worked.wait()
        assert service.reported == ["UNAUTHENTICATED"] * 2
        await service.stop(deadline_s=5.0)
        await running


async def test_a_refused_token_that_nothing_can_replace_ends_the_service() -> None:
    async with AsyncClient(Connection("127.0.0.1:1", token="t")) as client:
        with pytest.raises(UnauthenticatedError):
            await Refused(client, refusals=1).run()
