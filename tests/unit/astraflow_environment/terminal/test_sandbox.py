"""A sandbox with a shell: what it keeps, what ends it, and what a policy cannot do to its tests."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import psutil
import pytest

from astraflow_environment.terminal.sandbox import SandboxDied, SandboxLimits, ShellSandbox
from support.sandbox import needs_bubblewrap

pytestmark = needs_bubblewrap
REWARD = "/logs/verifier/reward.txt"


@asynccontextmanager
async def opened(disk_mb: int = 32, **variables: str) -> AsyncIterator[ShellSandbox]:
    limits = SandboxLimits(disk_mb=disk_mb)
    made = await ShellSandbox.start(
        {"/app/in.txt": b"seven\n"}, folder="/app", variables=variables, limits=limits
    )
    try:
        yield made
    finally:
        await made.close()


async def said(sandbox: ShellSandbox, command: str) -> str:
    output: str = (await sandbox.run(command, seconds=10, limit=4000))["output"]
    return output.strip()


async def graded(sandbox: ShellSandbox, test: str, *, seconds: float = 10) -> tuple[str | None, bool]:
    found = await sandbox.grade({"/tests/test.sh": test.encode()}, seconds=seconds, limit=4000)
    return found["reward"] and found["reward"].strip(), found["late"]


async def test_folder_variables_and_background_programs_live_from_command_to_command() -> None:
    async with opened(WHO="me") as sandbox:
        assert await said(sandbox, "cat in.txt; echo $WHO; id -un") == "seven\nme\nroot"
        await said(sandbox, "cd /tmp; export X=3; (sleep 0.2; echo late > late.txt) & ")
        assert await said(sandbox, "sleep 0.5; pwd; echo $X; cat late.txt") == "/tmp\n3\nlate"
        failing = await sandbox.run("false", seconds=5, limit=100)
        assert (failing["status"], failing["late"], failing["ended"]) == (1, False, False)


@pytest.mark.parametrize(
    "command", ["echo 'open", "cat", "exit 3", "exec true", "kill -9 $$", "kill -9 1 -1"]
)
async def test_no_command_costs_more_than_its_shell(command: str) -> None:
    async with opened() as sandbox:
        await sandbox.run(command, seconds=5, limit=100)
        assert await said(sandbox, "cat /app/in.txt") == "seven"


async def test_a_command_that_does_not_end_is_killed_and_what_floods_is_cut_in_the_middle() -> None:
    async with opened() as sandbox:
        for endless in ("sleep 60", "yes"):
            found = await sandbox.run(endless, seconds=0.3, limit=100)
            assert (found["late"], found["status"]) == (True, None)
        flood = await sandbox.run("echo begin; seq 100000; echo end", seconds=10, limit=100)
        assert flood["output"].startswith("begin\n1\n")
        assert flood["output"].endswith("\nend\n")
        assert "bytes left out" in flood["output"]
        assert len(flood["output"]) < 200


async def test_within_there_is_no_network_nothing_of_the_host_and_bounded_files() -> None:
    async with opened(disk_mb=4) as sandbox:
        assert "lo" not in await said(sandbox, "cat /proc/net/route")
        assert await said(sandbox, "ls /home /etc | tr '\\n' ' '; touch /usr/x; env | grep -c ASTRA")
        assert "Permission denied" in await said(sandbox, "cat /proc/1/environ")
        assert "No space left" in await said(sandbox, "for i in 1 2 3; do head -c 2M /dev/zero > $i; done")


async def test_the_tests_see_what_the_shell_left_and_nothing_that_it_planted() -> None:
    async with opened() as sandbox:
        await said(
            sandbox, f"mkdir -p /logs/verifier /tests; echo 1 > {REWARD}; echo 'echo 1' > /tests/test.sh"
        )
        await said(sandbox, f"(while true; do echo 1 > {REWARD}; done) & echo done > made.txt")
        assert await graded(sandbox, "true") == (None, False)
        assert await graded(
            sandbox, f"ls /tests > /app/seen; grep -q done made.txt && echo 0.5 > {REWARD}"
        ) == (
            "0.5",
            False,
        )
        assert await said(sandbox, "cat seen") == "test.sh"
        assert await graded(sandbox, "echo '{\"reward\": 0.25}' > /logs/verifier/reward.json") == (
            "0.25",
            False,
        )


async def test_a_folder_of_tests_that_is_a_link_elsewhere_is_emptied_all_the_same() -> None:
    async with opened() as sandbox:
        await said(
            sandbox, "ln -s /tmp /tests; mkdir -p /logs; ln -s /tmp /logs/verifier; echo 1 > /tmp/reward.txt"
        )
        assert await graded(sandbox, "true") == (None, False)
        assert await graded(sandbox, f"echo 1 > {REWARD}") == ("1", False)


async def test_tests_that_do_not_end_are_killed_with_what_they_started_and_the_sandbox_goes_on() -> None:
    async with opened() as sandbox:
        assert await graded(sandbox, "sleep 60 & yes", seconds=0.3) == (None, True)
        assert await graded(sandbox, f"sleep 60 & echo 1 > {REWARD}") == ("1", False)


async def test_closing_leaves_nothing_alive() -> None:
    async with opened() as sandbox:
        await said(sandbox, "setsid sleep 987 & until grep -q 987 /proc/$!/cmdline; do :; done")
        living = psutil.Process(sandbox._child.pid).children(recursive=True)
        assert any("987" in process.cmdline() for process in living)
    _, alive = await asyncio.to_thread(psutil.wait_procs, living, 10)
    assert not alive
    with pytest.raises(SandboxDied):
        await sandbox.run("true", seconds=1, limit=10)
