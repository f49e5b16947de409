"""Fixtures shared by the engine's tests."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from astraflow_engine.service import EngineService
from astraflow_kit import failpoints
from support import engine_parts, tiny_models


@pytest.fixture(autouse=True)
def no_failpoint_stays_armed() -> Iterator[None]:
    """What a test arms ends with it."""
    yield
    failpoints.arm("")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The checkpoint of a tiny random model."""
    return tiny_models.save_tiny_model(tmp_path / "model")


@pytest.fixture
async def service(folder: Path) -> AsyncIterator[EngineService]:
    """A started service over it."""
    service = engine_parts.make_service(folder, engine_parts.make_worker(folder))
    await service.start()
    yield service
    await service.stop(deadline_s=engine_parts.DEADLINE_S)
