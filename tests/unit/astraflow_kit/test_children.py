"""Whenever a program is killed, even before the guard in front of it listens, nothing of it is left."""

import asyncio
import random
import sys

import psutil
import pytest

from astraflow_kit.children import kill_family
from astraflow_kit.family import ending_with_us

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="uses prctl")


async def test_a_kill_at_any_instant_of_the_start_leaves_nothing_that_left_the_group_either() -> None:
    seconds = str(random.randrange(10**6, 10**7))
    for _ in range(20):
        child = await asyncio.create_subprocess_exec(
            *ending_with_us("sh", "-c", f"setsid sleep {seconds} & sleep {seconds}"), start_new_session=True
        )
        await asyncio.sleep(random.uniform(0, 0.15))
        await kill_family(child)
        assert child.returncode is not None
    await kill_family(child)
    left = [
        process for process in psutil.process_iter(["cmdline"]) if seconds in (process.info["cmdline"] or ())
    ]
    assert left == []
