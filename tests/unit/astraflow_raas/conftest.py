"""Fixtures shared by the node's tests."""

from collections.abc import AsyncIterator

import pytest

from support.scripted_dataflow import RunningServer, ScriptedDataflow, running


@pytest.fixture
async def server() -> AsyncIterator[RunningServer]:
    """A scripted dataflow server that listens."""
    async with running(ScriptedDataflow()) as running_server:
        yield running_server
