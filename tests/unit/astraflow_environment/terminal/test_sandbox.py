"""A sandbox with a shell: what it keeps, what ends it, and what a policy cannot do to its tests."""

import asyncio
import os
import shlex
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast
from unittest.mock import AsyncMock, Mock

import psutil
import pytest

from astraflow_environment.terminal.sandbox import CarryFailed, SandboxDied, ShellSandbox, graders_variables
from astraflow_kit.sandbox.budget import Budget
from astraflow_kit.sandbox.sessions import SandboxSession
from support.sandbox import CHANGES_THE_HOST, needs_bubblewrap
from support.scripted_dataflow import eventually

pytestmark = needs_bubblewrap
REWARD = "/logs/verifier/reward.txt"


@asynccontextmanager
async def opened(
    disk_mb: int = 32, files: int = 4096, processes: int = 256, **variables: str
) -> AsyncIterator[ShellSandbox]:
    limits = Budget(disk_mb=disk_mb, files=files, processes=processes)
    made = await ShellSandbox.start(
        {"/app/in.txt": b"seven\n"}, folder="/app", variables=variables, limits=limits
    )
    try:
        yield made
    finally:
        await made.close()


async def said(sandbox: ShellSandbox, command: str) -> str:
    return (await sandbox.run(command, seconds=10, limit=4000)).output.strip()


async def graded(sandbox: ShellSandbox, test: str, *, seconds: float = 10) -> tuple[str | None, bool]:
    found = await sandbox.grade({"/tests/test.sh": test.encode()}, seconds=seconds, limit=4000)
    return found.reward and found.reward.strip(), found.late


async def test_folder_variables_and_background_programs_live_from_command_to_command() -> None:
    async with opened(WHO="me") as sandbox:
        assert await said(sandbox, "cat in.txt; echo $WHO; id -un") == "seven\nme\nroot"
        await said(sandbox, "cd /tmp; export X=3; (sleep 0.2; echo late > late.txt) & ")
        assert await said(sandbox, "sleep 0.5; pwd; echo $X; cat late.txt") == "/tmp\n3\nlate"
        failing = await sandbox.run("false", seconds=5, limit=100)
        assert (failing.status, failing.late, failing.ended) == (1, False, False)


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
            assert (found.late, found.status) == (True, None)
        flood = await sandbox.run("echo begin; seq 100000; echo end", seconds=10, limit=100)
        assert flood.output.startswith("begin\n1\n")
        assert flood.output.endswith("\nend\n")
        assert "bytes left out" in flood.output
        assert len(flood.output) < 200


async def test_within_there_is_no_network_nothing_of_the_host_and_bounded_files() -> None:
    async with opened(disk_mb=4) as sandbox:
        assert "lo" not in await said(sandbox, "cat /proc/net/route")
        assert await said(sandbox, "ls /home /etc | tr '\\n' ' '; touch /usr/x; env | grep -c ASTRA")
        assert "Permission denied" in await said(sandbox, "cat /proc/1/environ")
        assert "No space left" in await said(sandbox, "for i in 1 2 3; do head -c 2M /dev/zero > $i; done")


async def test_neither_a_shell_nor_its_tests_can_change_what_is_shared_with_the_host() -> None:
    look = f"python3 -c {shlex.quote(CHANGES_THE_HOST)}"
    async with opened() as sandbox:
        assert await said(sandbox, look) == "7"
        assert await graded(sandbox, f"{look} > {REWARD}") == ("7", False)


async def test_the_tests_see_the_work_folder_and_nothing_else_that_the_shell_left() -> None:
    async with opened() as sandbox:
        await said(
            sandbox, f"mkdir -p /logs/verifier /tests; echo 1 > {REWARD}; echo 'echo 1' > /tests/test.sh"
        )
        await said(
            sandbox, f"(while true; do echo 1 > {REWARD}; done) & echo done > made.txt; echo x > /mine.txt"
        )
        assert await graded(
            sandbox,
            f'[ -e /mine.txt ] || [ "$(ls /tests)" != test.sh ] || grep -q done made.txt && echo 0.5 > {REWARD}',
        ) == ("0.5", False)


async def test_a_reward_may_be_json_and_none_is_none() -> None:
    for test, reward in (("true", None), ("echo '{\"reward\": 0.25}' > /logs/verifier/reward.json", "0.25")):
        async with opened() as sandbox:
            assert await graded(sandbox, test) == (reward, False)


JUDGE = f"""
python3 -c 'import json, random, sys; sys.exit(json.loads("7") - 7)' || exit 1
git status >/dev/null 2>&1
if diff -q /tests/expected out >/dev/null; then echo 1; else echo 0; fi > {REWARD}
"""
EVIL_PYTHON = f"import os; open('{REWARD}', 'w').write('1'); os._exit(0)"
EVIL_SHELL = f"#!/usr/bin/bash\\necho 1 > {REWARD}; kill -9 $PPID; exit 0\\n"
CHEATS = {
    "nothing": "true",
    "a bash of its own": f"rm /bin; mkdir /bin; printf '{EVIL_SHELL}' > /bin/bash; chmod +x /bin/bash",
    "a library that is loaded first": "echo /app/evil.so > /etc/ld.so.preload",
    "a reward that nobody may replace": (
        f"mkdir -p /logs/verifier; echo 1 > {REWARD}; chmod 444 {REWARD}; chmod 555 /logs/verifier"
    ),
    "a module beside the tests": (
        f'mkdir -p /tests/json; echo "{EVIL_PYTHON}" > /tests/json/__init__.py; chmod 555 /tests/json'
    ),
    "modules in the work folder": f'for m in json random sitecustomize; do echo "{EVIL_PYTHON}" > $m.py; done',
    "programs in the work folder": (
        f"mkdir bin; for p in python3 diff git echo; do printf '{EVIL_SHELL}' > bin/$p; chmod +x bin/$p; done"
    ),
    "a file that bash reads first": f"echo 'echo 1 > {REWARD}; exit' > env.sh",
    "profiles": f"for f in .bashrc .bash_profile .profile; do echo 'echo 1 > {REWARD}; exit' > $f; done",
    "a repository with programs": (
        f"git init -q . && printf '{EVIL_SHELL}' > fs && chmod +x fs && git config core.fsmonitor /app/fs"
    ),
    "settings of git in the home": f"printf '[core]\\nfsmonitor = /app/fs\\n' > .gitconfig; printf '{EVIL_SHELL}' > fs",
    "a link to the tests": "ln -s /tests/expected out",
    "a relative link to the tests": "ln -s ../tests/expected out",
    "a link by a link": "ln -s ../tests d; ln -s d/expected out",
    "a link by a folder that is missing": "ln -s missing/../../tests/expected out",
    "a link to the root of /proc": "ln -s /proc/self/root/tests/expected out",
    "a link to what the reader has open": "ln -s /proc/self/fd/3 out",
    "a link to a descriptor": "ln -s /dev/fd/3 out",
    "a folder that is a link": "rm -rf /app/*; cd /; rmdir /app 2>/dev/null || rm -r /app; ln -s /tests /app",
    "a pipe": "mkfifo out; exec 9<>out; (while :; do echo 42 >&9; done) &",
    "a device": "mknod out c 1 5; cp -a /dev/zero out",
    "a socket": "python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind(\"out\")'",
    "a process that writes for ever": f"(while :; do echo 1 > {REWARD}; done) & disown",
    "a full disk": "head -c 100M /dev/zero > full; echo more > more",
    "a full table of files": "for i in $(seq 3000); do : > f$i || break; done",
    "a folder that nobody may enter": "mkdir -p a/b; chmod 0 a/b a",
    "names that are no text": "touch $'a\\nb' $'\\xff\\xfe' '-rf' '*'",
    "a sparse giant": "truncate -s 30M s1 s2 s3 s4",
    "links in a circle": "ln -s b a; ln -s a b; ln -s out out",
    "hard links": "for i in $(seq 50); do ln in.txt h$i; done; ln /etc/passwd out",
    "a set-uid file": "cp /usr/bin/true out; chmod 6755 out",
}


@pytest.mark.parametrize("cheat", CHEATS)
async def test_a_policy_earns_by_nothing_but_its_work(cheat: str) -> None:
    hostile = {"PATH": "/app/bin:/usr/bin", "PYTHONPATH": "/app", "BASH_ENV": "/app/env.sh", "HOME": "/app"}
    tests = {"/tests/test.sh": JUDGE.encode(), "/tests/expected": b"42\n"}
    for honest in (False, True):
        async with opened(files=2000, **hostile) as sandbox:
            await sandbox.run(CHEATS[cheat], seconds=20, limit=4000)
            if honest:
                await sandbox.run("cd /app; rm -rf out; echo 42 > out", seconds=10, limit=100)
            try:
                found = await sandbox.grade(tests, seconds=20, limit=4000)
            except CarryFailed:
                assert cheat in NOT_CARRIED
                continue
        assert (found.reward or "0").strip() == str(int(honest and cheat not in SPOILT)), found


# The policy's own doing: it cannot be brought to the tests at all.
NOT_CARRIED = {"a sparse giant", "a folder that is a link"}
SPOILT = {"a full disk", "a full table of files"}
"""There is no room left for an answer."""


def test_tests_search_nothing_in_the_work_folder_and_keep_the_other_variables() -> None:
    given = {
        "PATH": "/app/bin:/usr/bin:/app/../app:bin::/opt/x",
        "PYTHONPATH": "/app",
        "LD_PRELOAD": "/app/a.so /usr/lib/b.so",
        "DATA_PATH": "/app/data",
        "HOME": "/app",
    }
    kept = graders_variables(given, folder="/app")
    assert {name: kept.get(name) for name in given} == {
        "PATH": "/usr/bin:/opt/x",
        "PYTHONPATH": None,
        "LD_PRELOAD": "/usr/lib/b.so",
        "DATA_PATH": "/app/data",
        "HOME": "/var/home",
    }


async def test_tests_cannot_be_changed_by_a_program_of_the_work_folder_that_they_run() -> None:
    async with opened() as sandbox:
        program = (
            "rm -f /tests/test.sh /bin/sh; echo x > /tests/new; echo x > /new; echo x > /usr/new; ls / /tests"
        )
        await said(sandbox, f"echo '{program}' > run.sh")
        found = await sandbox.grade(
            {"/tests/test.sh": f"bash run.sh; echo 0 > {REWARD}".encode()}, seconds=10, limit=4000
        )
        assert found.output.count("Read-only file system") == 5
        assert "new" not in found.output.splitlines()


async def test_tests_that_do_not_end_are_killed_with_what_they_started() -> None:
    for test, ending in (("sleep 60 & yes", (None, True)), (f"sleep 60 & echo 1 > {REWARD}", ("1", False))):
        async with opened() as sandbox:
            assert await graded(sandbox, test, seconds=10 if ending[0] else 0.3) == ending


async def test_a_flood_of_processes_is_ended_with_its_shell() -> None:
    async with opened(processes=40) as sandbox:
        found = await sandbox.run("for i in $(seq 500); do sleep 30 & done; wait", seconds=20, limit=4000)
        assert found.ended or "Resource temporarily unavailable" in found.output
        assert int(await said(sandbox, "ls -d /proc/[0-9]* | wc -l")) < 20


async def test_all_writable_folders_have_one_budget_of_bytes_and_of_files() -> None:
    async with opened(disk_mb=8, files=200) as sandbox:
        for folder in ("/app", "/tmp", "/dev/shm", "/"):
            assert "No space left" in await said(
                sandbox, f"head -c 9M /dev/zero > {folder}/x; rm -f {folder}/x"
            )
        assert "cannot" in await said(sandbox, "touch /dev/x /dev/pts/x; mkdir /dev/y")
        await said(sandbox, "for f in /app /tmp /dev/shm; do for i in $(seq 60); do : > $f/$i; done; done")
        assert "No space left" in await said(sandbox, "for i in $(seq 60); do : > /x$i || break; done")


async def test_closing_leaves_nothing_alive() -> None:
    async with opened() as sandbox:
        await said(sandbox, "setsid sleep 987 & until grep -q 987 /proc/$!/cmdline; do :; done")
        living = psutil.Process(sandbox._session.leader.pid).children(recursive=True)
        assert any("987" in process.cmdline() for process in living)
    _, alive = await asyncio.to_thread(psutil.wait_procs, living, 10)
    assert not alive
    with pytest.raises(SandboxDied):
        await sandbox.run("true", seconds=1, limit=10)


class Pretender:
    """A session whose first process answers this, whatever it is asked."""

    def __init__(self, *frames: bytes) -> None:
        self.leader, self.stdin, self.stdout = self, AsyncMock(write=Mock()), asyncio.StreamReader()
        for frame in frames:
            self.stdout.feed_data(len(frame).to_bytes(4, "big") + frame)
        self.stdout.feed_eof()


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (b"[1]", "ValueError"),
        (b"1", "ValueError"),
        (b"[" * 100_000, "RecursionError"),
        (b"no JSON", "JSONDecodeError"),
        (b"", "JSONDecodeError"),
        (b'{"number": 1, "output": "x"}', "ValidationError"),
        (b'{"number": 1, "error": "FileNotFoundError: /bin/bash"}', "run: FileNotFoundError: /bin/bash"),
        (b'{"number": 0}', "IncompleteReadError"),
    ],
)
async def test_an_answer_that_is_none_is_the_end_of_the_sandbox(answer: bytes, why: str) -> None:
    pretender = cast("SandboxSession", Pretender(answer))
    sandbox = ShellSandbox(pretender, about={}, budget=Budget())
    with pytest.raises(SandboxDied, match=why):
        await sandbox.run("true", seconds=1, limit=10)


async def test_tests_are_not_begun_beside_a_sandbox_that_does_not_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    end = SandboxSession.end

    async def does_not_end(session: SandboxSession) -> bool:
        return await end(session) and False

    async with opened() as sandbox:
        monkeypatch.setattr(SandboxSession, "end", does_not_end)
        with pytest.raises(SandboxDied, match="the tests were not begun"):
            await graded(sandbox, f"echo 1 > {REWARD}")


FLOODS = {
    "processes": "for i in $(seq 300); do sleep 30 & done; wait",
    "threads": (
        "python3 -c 'import threading, time\nthreading.stack_size(2**16)\n"
        "for _ in range(300): threading.Thread(target=time.sleep, args=(30,)).start()'"
    ),
}


@pytest.mark.skipif(os.geteuid() != 0, reason="the kernel bounds everybody but root")
@pytest.mark.parametrize("flood", FLOODS.values(), ids=FLOODS)
async def test_a_flood_in_the_background_is_ended_while_nobody_asks(flood: str) -> None:
    async with opened(processes=40) as sandbox:
        await said(sandbox, f"(sleep 0.2; {flood}) >/dev/null 2>&1 &")
        leader = psutil.Process(sandbox._session.leader.pid)
        await eventually(lambda: len(leader.children(recursive=True)) == 1, what="only the first is left")
        assert (await sandbox.run("echo x", seconds=5, limit=10)).ended
        assert await said(sandbox, "cat /app/in.txt") == "seven"


UNCOUNTED = """
import ctypes, os, sys
call = ctypes.CDLL(None, use_errno=True).syscall
x86 = os.uname().machine == "x86_64"
numbers = (319, 447, 68, 64, 321, 425, 248, 249, 250) if x86 else (279, 447, 186, 190, 280, 425, 217, 218, 219)
for number in numbers:
    print(call(number, 0, 0, 0, 0, 0), ctypes.get_errno(), end=" ")
for size in (2**32, 2**20, 4096):
    print(call(29 if x86 else 194, 0, ctypes.c_size_t(size), 0o1600) >= 0, end=" ")
"""


async def test_a_shell_has_no_memory_that_nobody_counts_and_no_keys_that_outlive_it() -> None:
    look = f"python3 -c {shlex.quote(UNCOUNTED)}"
    async with opened() as sandbox:
        refused = "-1 38 " * 9 + "False False True"  # a page is what databases need to find each other
        assert await said(sandbox, look) == refused
        assert await graded(sandbox, f"{look} > {REWARD}") == (refused[:64].strip(), False)
