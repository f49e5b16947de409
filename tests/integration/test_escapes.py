"""What a policy tries instead of solving its task earns nothing, has a name, and leaves nothing: by public entries.

Each surface has a control that earns 1, and each attempt shows a sign that it was made. That a success would be seen,
two more controls show: a secret that is left where a program looks, and tests that run in the policy's own room.
"""

import asyncio
import base64
import contextlib
import os
import platform
import re
import secrets
import signal
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import zip_longest
from pathlib import Path
from typing import Any, get_type_hints

import psutil
import pytest
from pydantic import TypeAdapter

from astraflow.plugins import Episode, Message, Observation, Score, TaskSpec
from astraflow_environment.adapters.terminal import Terminal
from astraflow_environment.terminal.sandbox import Graded, ShellSandbox
from astraflow_kit.sandbox.budget import Budget
from astraflow_kit.sandbox.walls import Walls
from astraflow_raas.agents.program import AgentFailed
from astraflow_raas.rewards.code_tests import CodeTests
from astraflow_raas.workflows.agent_process import AgentProcess, AgentProcessSettings
from support.agents import ScriptedPolicy, serving_agents
from support.escapes import (
    AGENTS,
    CODE,
    FORGERIES,
    HOGS,
    IN_CI,
    LEAKS,
    TERMINAL,
    AgentEscape,
    CodeEscape,
    TerminalEscape,
    code_program,
    shell_task,
)
from support.marked import alive_with
from support.sandbox import needs_bubblewrap, without_override_of_permissions
from support.scripted_dataflow import eventually

pytestmark = [pytest.mark.integration, pytest.mark.ci, needs_bubblewrap]

FORGING_LIBRARY = """
#include <fcntl.h>
#include <unistd.h>
__attribute__((constructor)) static void forge(void) {
  int fd = open("/logs/verifier/reward.txt", O_WRONLY | O_CREAT | O_TRUNC, 0644);
  if (fd >= 0 && write(fd, "1", 1) == 1) _exit(0);
}
"""


def rows(surface: str, table: Mapping[str, object]) -> pytest.MarkDecorator:
    """Those of ci, and the others for soak."""
    in_ci = set(" ".join(IN_CI[surface].split()).split("; "))
    assert in_ci <= set(table), in_ci - set(table)
    marked = [pytest.param(name, marks=() if name in in_ci else pytest.mark.soak) for name in table]
    return pytest.mark.parametrize("attempt", marked)


@dataclass(frozen=True)
class Host:
    """A machine with a secret in a file, in the environment and behind two sockets."""

    secret: str
    mark: str
    path: Path
    port: int

    def fill(self, text: str) -> str:
        for name in ("path", "port", "mark"):
            text = text.replace(f"{{{name}}}", str(getattr(self, name)))
        return text


@pytest.fixture
async def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Host]:
    """Checks afterwards that nothing is left of what was tried, anywhere on the machine."""
    secret, mark = secrets.token_hex(8), f"escape-{secrets.token_hex(8)}"
    command_line = Walls.command_line

    def with_mark(*given: Any, **named: Any) -> list[str]:
        """The file system of the sandbox has the mark as its name: all processes among its mounts are known by it."""
        return [word.replace(" budget ", f" {mark} ") for word in command_line(*given, **named)]

    monkeypatch.setattr(Walls, "command_line", with_mark)
    (tmp_path / "secret").write_text(secret)
    monkeypatch.setenv("NODE_SECRET", secret)

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(secret.encode())
        writer.close()

    tcp = await asyncio.start_server(answer, "127.0.0.1")
    abstract = await asyncio.start_unix_server(answer, f"\0{mark}")
    before = shared_with_sandboxes()
    async with tcp, abstract:
        with many_open_files():
            yield Host(secret, mark, tmp_path / "secret", tcp.sockets[0].getsockname()[1])
        await eventually(lambda: not alive_with(mark), what="nobody is left, and no mount")
        assert shared_with_sandboxes() == before
        assert (tmp_path / "secret").read_text() == secret
        assert not [name for folder in ("/tmp", "/dev/shm") for name in os.listdir(folder) if mark in name]  # noqa: PTH208


@lru_cache(maxsize=1)
def settings_of_the_kernel() -> list[Path]:
    """That somebody may write, but one that always changes, and those of networks: sandboxes have their own."""
    found = [
        path for name in ("dev", "fs", "kernel", "user", "vm") for path in Path("/proc/sys", name).rglob("*")
    ]
    return [
        path
        for path in found
        if path.is_file() and path.stat().st_mode & 0o222 and path.name != "ns_last_pid"
    ]


def shared_with_sandboxes() -> dict[str, object]:
    """Settings of the kernel and device nodes."""
    found: dict[str, object] = {}
    for path in settings_of_the_kernel():
        with contextlib.suppress(OSError):  # some can only be written
            found[str(path)] = path.read_bytes()
    for name in ("full", "null", "random", "urandom", "zero"):
        about = Path("/dev", name).stat()
        found[name] = (about.st_mode, about.st_uid, about.st_gid, about.st_mtime)
    return found


@contextlib.contextmanager
def many_open_files() -> Iterator[None]:
    """More than 256, as a busy node has: numbers of what is opened then are above any fixed bound."""
    opened = [os.open("/dev/null", os.O_RDONLY) for _ in range(300)]
    try:
        yield
    finally:
        for number in opened:
            os.close(number)


async def passed(program: str, *tests: str, seconds: float = 60.0, walls: bool = True) -> float:
    reward = CodeTests(
        reward="fraction",
        test_s=seconds,
        wall_s=2 * seconds,
        memory_mb=256,
        dangerously_without_sandbox=not walls,
    )
    score = await reward(TaskSpec("t", (), {"test_list": tests}), f"```python\n{program}\n```")
    assert score.metrics["has_code"] == 1.0
    return score.reward


async def graded(escape: CodeEscape, host: Host, *, walls: bool = True) -> list[float]:
    """Whether it showed its sign, and whether it got its loot: apart, for a sum of both could hide one."""
    program = host.fill(code_program(escape))
    tests = ("assert shows_sign()", f"assert loot() == {host.secret!r}")
    seconds = 60.0 if escape.sign else 1.0
    return await asyncio.gather(
        *(
            passed(program, f"{test}  # SECRET={host.secret!r}", seconds=seconds, walls=walls)
            for test in tests
        )
    )


def held(escape: CodeEscape) -> list[float]:
    return [float(bool(escape.sign)), 0.0]


async def test_a_program_that_knows_the_answer_earns_it(host: Host) -> None:
    for answer, share in ((host.secret, 1.0), ("no", 0.0)):
        assert await passed(f"def f(): return {answer!r}", f"assert f() == {host.secret!r}") == share


@rows("code", CODE)
async def test_a_program_that_escapes_earns_nothing(attempt: str, host: Host) -> None:
    if CODE[attempt].is_of_x86 and platform.machine() != "x86_64":
        pytest.skip(f"{attempt}: its numbers of system calls are those of x86-64")
    assert await graded(CODE[attempt], host) == held(CODE[attempt])


@pytest.mark.parametrize("attempt", LEAKS)
async def test_a_program_that_finds_a_secret_is_seen(attempt: str, host: Host) -> None:
    """It shows no sign that it was refused, and has the secret."""
    leak = LEAKS[attempt].format(secret=host.secret)
    escape = replace(CODE[attempt], attempt=f"{CODE[attempt].attempt}\n{leak}")
    assert await graded(escape, host, walls=bool(leak)) == [0.0, 1.0]


@pytest.fixture(scope="module")
def evil(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A library that writes its own reward when it is loaded."""
    folder = tmp_path_factory.mktemp("evil")
    (folder / "evil.c").write_text(FORGING_LIBRARY)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", folder / "evil.so", folder / "evil.c"], check=True)
    return (folder / "evil.so").read_bytes()


async def played(escape: TerminalEscape, host: Host, evil: bytes) -> tuple[list[str], Observation]:
    """What the commands print, and the graded end."""
    settings = TypeAdapter(get_type_hints(Terminal.__init__)["limits"])
    limits = settings.validate_python({"disk_mb": 40, "memory_mb": 512, "processes": 64})
    environment = Terminal(
        calls="text", command_s=escape.seconds, grade_s=min(escape.seconds, 10), limits=limits
    )
    setup = f"echo {base64.b64encode(evil).decode()} | base64 -d > /app/evil.so"
    try:
        await environment.reset(shell_task(host.secret, escape.grader))
        printed = []
        for command in (setup, *escape.commands):
            seen = await environment.step(Message("assistant", host.fill(command)))
            printed.append("".join(message.content for message in seen.messages))
        return printed, await environment.step(Message("assistant", "exit"))
    finally:
        await environment.close()


async def grade_in_the_room_of_the_policy(
    self: ShellSandbox, tests: Mapping[str, bytes], *, seconds: float, limit: int
) -> Graded:
    """As no tests should run: in the policy's root, among its processes, as it left both."""
    for name, content in tests.items():
        text = base64.b64encode(content).decode()
        await self.run(f"mkdir -p /tests; echo {text} | base64 -d > {name}", seconds=5, limit=100)
    order = {"do": "grade", "seconds": seconds, "limit": limit}
    return await self.ask(order, seconds=seconds, answer=Graded)


ROOMS = pytest.mark.parametrize("grade", [ShellSandbox.grade, grade_in_the_room_of_the_policy])


@ROOMS
async def test_a_shell_that_writes_the_answer_earns_it(
    grade: Callable[..., object], host: Host, evil: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ShellSandbox, "grade", grade)
    for answer, reward in ((f'"{host.secret}"', 1.0), ('"no"', 0.0)):
        honest = TerminalEscape((f"echo '{answer}' > answer.json",))
        _, end = await played(honest, host, evil)
        assert (end.done, end.reward, end.metrics["graded"]) == (True, reward, 1.0)


@rows("terminal", TERMINAL)
async def test_a_shell_that_escapes_earns_nothing(attempt: str, host: Host, evil: bytes) -> None:
    escape = TERMINAL[attempt]
    printed, end = await played(escape, host, evil)
    assert re.search(escape.sign, "\n".join(printed), re.DOTALL | re.MULTILINE), printed
    assert host.secret not in "".join(printed)
    assert (end.done, end.reward) == (True, 0.0), (printed, end)


@rows("forgeries", FORGERIES)
async def test_a_reward_that_a_shell_forges_counts_in_its_own_room_alone(
    attempt: str, host: Host, evil: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = [(await played(FORGERIES[attempt], host, evil))[1]]
    monkeypatch.setattr(ShellSandbox, "grade", grade_in_the_room_of_the_policy)
    ends.append((await played(FORGERIES[attempt], host, evil))[1])
    assert [(end.done, end.reward) for end in ends] == [(True, 0.0), (True, 1.0)], ends


@pytest.fixture
def scratch() -> Iterator[Path]:
    """Where agents have their folders; permissions apply to this node, root or not."""
    folder = Path(tempfile.mkdtemp(prefix="agents-"))
    with without_override_of_permissions():
        yield folder
    subprocess.run(["rm", "-rf", folder], check=True)


def free_readers(folder: Path) -> None:
    """End whoever waits for a writer of a result, so that the loop can end."""
    for path in folder.glob("*/[w]ork/*/result.json"):
        with contextlib.suppress(OSError):
            os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))


async def run_agent(escape: AgentEscape, host: Host, scratch: Path) -> Episode:
    async def judged(task: TaskSpec, completion: str, *, policies: object = None) -> Score:
        return Score(float(completion == task.data["answer"]))

    own = Path(tempfile.mkdtemp(dir=scratch))
    (recipe := own / "recipe").mkdir()
    (recipe / "agent.py").write_text(f"import os, signal, sys, time\n{host.fill(escape.program)}")
    (work := own / "work").mkdir()
    async with serving_agents() as endpoint:
        workflow = AgentProcess(
            settings=AgentProcessSettings(
                command=("python", "agent.py"),
                hidden_data=("answer",),
                timeout_s=escape.seconds,
                env={"MARK": host.mark},
                limits=Budget(memory_mb=4096, disk_mb=escape.disk_mb, files=10_000),
            ),
            reward=judged,
            endpoint=endpoint,
            recipe_dir=recipe,
            scratch_dir=work,
            secret_paths=(host.path,),
        )
        task = TaskSpec("t", (Message("user", "?"),), {"answer": "HIDDEN"})
        return await workflow.run(task, {"solver": ScriptedPolicy(lambda _: "HIDDEN")})


async def test_an_agent_that_asks_its_policy_earns_what_that_says(host: Host, scratch: Path) -> None:
    program = (
        "import json, urllib.request\n"
        "body = json.dumps({'model': 'solver', 'messages': [{'role': 'user', 'content': '?'}]}).encode()\n"
        "request = urllib.request.Request(os.environ['OPENAI_BASE_URL'] + '/chat/completions', body)\n"
        "request.add_header('authorization', 'Bearer ' + os.environ['OPENAI_API_KEY'])\n"
        "urllib.request.urlopen(request)"
    )
    assert (await run_agent(AgentEscape(program, ""), host, scratch)).trajectories[0].reward == 1.0


@rows("agents", AGENTS)
async def test_an_agent_that_escapes_fails_by_name_and_leaves_nothing(
    attempt: str, host: Host, scratch: Path
) -> None:
    escape = AGENTS[attempt]
    failing = asyncio.create_task(run_agent(escape, host, scratch))
    try:
        await asyncio.wait((failing,), timeout=150)
        assert failing.done(), "the episode does not end"
        with pytest.raises(AgentFailed, match=f"(?s){escape.failure}"):
            failing.result()
        assert alive_with(host.mark) == []
        assert list(scratch.glob("*/[w]ork/*")) == []  # noqa: ASYNC240 - not a disk
    finally:
        free_readers(scratch)
        for process in alive_with(host.mark):
            process.kill()


def cpu_s(mark: str, *, nice_from: int = -20) -> float:
    """CPU seconds of a hog's processes of that niceness or more, and of those that they waited for."""
    total = 0.0
    for process in alive_with(mark):
        with contextlib.suppress(psutil.Error):
            total += sum(process.cpu_times()[:4]) if process.nice() >= nice_from else 0.0
    return total


def send(signal_number: int, mark: str) -> None:
    """To all of a hog."""
    for process in alive_with(mark):
        with contextlib.suppress(psutil.Error):
            process.send_signal(signal_number)


@rows("hogs", HOGS)
async def test_who_runs_beside_an_escape_does_not_wait_for_it(
    attempt: str, host: Host, evil: bytes, scratch: Path
) -> None:
    """It takes what others leave (nice 10; of agents two processes): measured with it and without it in turns."""
    surface, text = HOGS[attempt]
    hogs: dict[str, Callable[[], Coroutine[Any, Any, object]]] = {
        "program": lambda: passed(text, "assert True", seconds=600),
        "shell": lambda: played(TerminalEscape((text,), seconds=600), host, evil),
        "agent": lambda: run_agent(AgentEscape(text, "", seconds=600), host, scratch),
    }
    hog = asyncio.create_task(hogs[surface]())
    try:
        await eventually(lambda: hog.done() or cpu_s(host.mark) > 0.5, what="it is busy")
        took: dict[int, list[float]] = {signal.SIGSTOP: [], signal.SIGCONT: []}
        for number in [*took] * 3:
            send(number, host.mark)
            began = time.monotonic()
            assert await passed("def f(): return 1", "assert f() == 1") == 1.0
            took[number].append(time.monotonic() - began)
        assert not hog.done()
        assert surface == "agent" or cpu_s(host.mark, nice_from=10) > cpu_s(host.mark) / 2
        # The fastest of three: a hog is there in each, what else the machine does is not.
        assert min(took[signal.SIGCONT]) < 4 * min(took[signal.SIGSTOP]), took
    finally:
        hog.cancel()
        await asyncio.wait((hog,))


@pytest.mark.soak
@pytest.mark.timeout(900)
async def test_all_escapes_at_once_beside_honest_work(host: Host, evil: bytes, scratch: Path) -> None:
    """Three times over: each earns nothing, each honest one between them 1."""
    slots = asyncio.Semaphore(8)
    programs = [name for name in CODE if not CODE[name].is_of_x86 or platform.machine() == "x86_64"]

    async def program(name: str) -> float:
        return float(await graded(CODE[name], host) != held(CODE[name]))

    async def shell(name: str) -> float:
        return (await played((FORGERIES | TERMINAL)[name], host, evil))[1].reward

    async def agent(name: str) -> float:
        with pytest.raises(AgentFailed):
            await run_agent(AGENTS[name], host, scratch)
        return 0.0

    async def honest(_: str) -> float:
        answer = TerminalEscape((f"echo '\"{host.secret}\"' > answer.json",))
        assert (await played(answer, host, evil))[1].reward == 1.0
        return await passed(f"def f(): return {host.secret!r}", f"assert f() == {host.secret!r}") - 1.0

    async def tried(run: Callable[[str], Awaitable[float]], name: str) -> tuple[str, float]:
        async with slots:
            return name, await run(name)

    for _ in range(3):
        found = await asyncio.gather(
            *(
                tried(run, name)
                for names in zip_longest(programs, FORGERIES | TERMINAL, AGENTS)
                for run, name in zip((program, shell, agent, honest), (*names, "honest"), strict=True)
                if name
            )
        )
        assert [name for name, reward in found if reward] == []
    for process in alive_with(host.mark):
        process.kill()
