"""Plug-ins that are made beside whoever needs them: named while it lasts, and ended by a deadline or a memory limit."""

import asyncio
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from astraflow.errors import PluginError
from astraflow.plugins import Reward
from astraflow.recipe.plugin_settings import PluginSettings
from astraflow_kit import making
from astraflow_kit.making import Making, MakingLimits
from astraflow_kit.plugins import RecipeSource, make

CODE = """
import time
class Odd:
    def __init__(self) -> None:
        {constructor}
    def __call__(self, task, completion):
        return 0.0
"""


def plugin(folder: Path, constructor: str) -> Callable[[], object]:
    """What makes a plug-in whose constructor does this."""
    folder.joinpath("recipe.py").write_text(CODE.format(constructor=constructor))
    source = RecipeSource(folder=folder)
    return lambda: make(PluginSettings(use="recipe:Odd"), protocol=Reward, source=source)


def bounds() -> tuple[object, ...]:
    """What of the process making changes while it lasts."""
    return resource.getrlimit(resource.RLIMIT_DATA), signal.getitimer(signal.ITIMER_PROF)


async def test_what_is_made_is_returned_and_the_process_is_as_before(tmp_path: Path) -> None:
    before = bounds()
    assert await Making(plugin(tmp_path, "pass"), MakingLimits()).made_beside()
    assert Making(plugin(tmp_path, "pass"), MakingLimits()).made()
    assert bounds() == before


async def test_what_is_made_slowly_is_told_while_the_loop_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(making, "SHOWN_S", 0.5)
    told, num_turns = list[str](), 0
    made = asyncio.ensure_future(
        Making(plugin(tmp_path, "time.sleep(1.5)"), MakingLimits()).made_beside(told.append)
    )
    while not made.done():
        await asyncio.sleep(0.01)
        num_turns += 1
    assert num_turns > 20
    assert set(told) <= {f"recipe:Odd: its constructor has not returned for {s} s" for s in (0, 1, 2)}
    assert told


@pytest.mark.parametrize("waits", ["thread", "loop"])
async def test_what_does_not_return_is_ended_with_its_name_and_place(tmp_path: Path, waits: str) -> None:
    before, limits = bounds(), MakingLimits(timeout_s=0.6)
    slow = Making(plugin(tmp_path, "time.sleep(30)"), limits)
    with pytest.raises(
        PluginError,
        match=r"^recipe:Odd: its constructor did not return within plugin_start_timeout_s 0\.6 s, it stood in __init__ "
        r"\(recipe\.py:5\); .*--plugin-start-timeout-s$",
    ):
        slow.made() if waits == "thread" else await slow.made_beside()
    assert bounds() == before


@pytest.mark.skipif(sys.platform != "linux", reason="the limit counts the process's data there alone")
def test_what_takes_too_much_memory_is_refused_with_the_limit(tmp_path: Path) -> None:
    greedy = Making(plugin(tmp_path, "self.held = bytearray(1 << 30)"), MakingLimits(memory_mb=256))
    with pytest.raises(PluginError, match=r"MemoryError.*plugin_memory_mb 256 MiB.*--plugin-memory-mb"):
        greedy.made()
    assert bytearray(1 << 28), "nothing is bounded any more"


async def test_whoever_stops_waiting_leaves_nothing_behind(tmp_path: Path) -> None:
    before, ended = bounds(), threading.Event()

    def work() -> None:
        time.sleep(0.5)
        ended.set()

    waiting = asyncio.ensure_future(Making(work, MakingLimits()).made_beside())
    await asyncio.sleep(0.05)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert bounds() == before
    assert ended.wait(5)


@pytest.mark.slow
def test_what_keeps_the_interpreters_lock_ends_the_process_with_its_stack() -> None:
    program = (
        "from astraflow_kit.making import Making, MakingLimits\n"
        "def keeps(): return 9**9**9 if limits else 0\n"
        "limits = MakingLimits(timeout_s=0.5)\n"
        "Making(keeps, limits).made()\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert ended.returncode == -signal.SIGPROF
    assert "line 2 in keeps" in ended.stderr
