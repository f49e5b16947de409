"""What a policy tries instead of solving its task earns nothing, has a name, and leaves nothing: by public entries.

Each surface has a control that earns 1, and each attempt shows a sign that it was made.
"""

import asyncio
import base64
import contextlib
import os
import secrets
import subprocess
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import get_type_hints

import psutil
import pytest
from pydantic import TypeAdapter

from astraflow.plugins import Episode, Message, Observation, Score, TaskSpec
from astraflow_environment.adapters.terminal import Terminal
from astraflow_kit.sandbox.budget import Budget
from astraflow_raas.agents.program import AgentFailed
from astraflow_raas.rewards.code_tests import CodeTests
from astraflow_raas.workflows.agent_process import AgentProcess, AgentProcessSettings
from support.agents import ScriptedPolicy, serving_agents
from support.escapes import (
    AGENTS,
    CODE,
    HOGS,
    IN_CI,
    TERMINAL,
    AgentEscape,
    CodeEscape,
    TerminalEscape,
    code_program,
    shell_task,
)
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


def rows(surface: str, table: Collection[str]) -> pytest.MarkDecorator:
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
    """Checks afterwards that nothing is left of what was tried."""
    secret, mark = secrets.token_hex(8), f"escape-{secrets.token_hex(8)}"
    (tmp_path / "secret").write_text(secret)
    monkeypatch.setenv("NODE_SECRET", secret)

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(secret.encode())
        writer.close()

    tcp = await asyncio.start_server(answer, "127.0.0.1")
    abstract = await asyncio.start_unix_server(answer, f"\0{mark}")
    now = psutil.Process()
    before, mounts = {child.pid for child in now.children(recursive=True)}, mounts_below(tmp_path.parent)
    async with tcp, abstract:
        yield Host(secret, mark, tmp_path / "secret", tcp.sockets[0].getsockname()[1])
        left = [child for child in now.children(recursive=True) if child.pid not in before]
        assert not psutil.wait_procs(left, timeout=10)[1], "processes are left"
        assert mounts_below(tmp_path.parent) == mounts
        assert (tmp_path / "secret").read_text() == secret
        assert not [name for folder in ("/tmp", "/dev/shm") for name in os.listdir(folder) if mark in name]  # noqa: PTH208


def mounts_below(folder: Path) -> list[str]:
    """Mounts below a folder, or of what is below it: tests of other processes mount elsewhere meanwhile."""
    return [line for line in Path("/proc/self/mounts").read_text().splitlines() if str(folder) in line]


@contextlib.contextmanager
def many_open_files() -> Iterator[None]:
    """More than 256, as a busy node has: numbers of what is opened then are above any fixed bound."""
    opened = [os.open("/dev/null", os.O_RDONLY) for _ in range(300)]
    try:
        yield
    finally:
        for number in opened:
            os.close(number)


async def passed(program: str, *tests: str, seconds: float = 60.0) -> float:
    reward = CodeTests(reward="fraction", test_s=seconds, wall_s=2 * seconds, memory_mb=256)
    with many_open_files():
        score = await reward(TaskSpec("t", (), {"test_list": tests}), f"```python\n{program}\n```")
    assert score.metrics["has_code"] == 1.0
    return score.reward


async def escaped(escape: CodeEscape, host: Host) -> float:
    """The share of what it must not earn; it must have shown its sign."""
    signs = ("assert shows_sign()",) if escape.sign else ()
    loots = f"assert loot() == {host.secret!r}  # SECRET={host.secret!r}"
    program = host.fill(code_program(escape))
    share = await passed(program, *signs, loots, seconds=60.0 if escape.sign else 1.0)
    return share * (1 + len(signs)) - len(signs)


async def test_a_program_that_knows_the_answer_earns_it(host: Host) -> None:
    for answer, share in ((host.secret, 1.0), ("no", 0.0)):
        assert await passed(f"def f(): return {answer!r}", f"assert f() == {host.secret!r}") == share


@rows("code", CODE)
async def test_a_program_that_escapes_earns_nothing(attempt: str, host: Host) -> None:
    assert await escaped(CODE[attempt], host) == 0.0, "1 is earned; -1 was not refused"


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


async def test_a_shell_that_writes_the_answer_earns_it(host: Host, evil: bytes) -> None:
    for answer, reward in ((f'"{host.secret}"', 1.0), ('"no"', 0.0)):
        honest = TerminalEscape((f"echo '{answer}' > answer.json",), "")
        _, end = await played(honest, host, evil)
        assert (end.done, end.reward, end.metrics["graded"]) == (True, reward, 1.0)


@rows("terminal", TERMINAL)
async def test_a_shell_that_escapes_earns_nothing(attempt: str, host: Host, evil: bytes) -> None:
    escape = TERMINAL[attempt]
    printed, end = await played(escape, host, evil)
    assert any(sign in printed[-1] for sign in escape.sign.split("|")), printed
    assert host.secret not in "".join(printed)
    assert (end.done, end.reward) == (True, 0.0), (printed, end)


@pytest.fixture
def scratch() -> Iterator[Path]:
    """Where agents have their folders; permissions apply to this node, root or not."""
    folder = Path(tempfile.mkdtemp(prefix="agents-"))
    with without_override_of_permissions():
        yield folder
    subprocess.run(["rm", "-rf", folder], check=True)


def alive_with(mark: str) -> list[psutil.Process]:
    """Processes that inherited it, whoever is their parent by now."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("MARK") == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


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


def cpu_s_beside(known: Collection[psutil.Process]) -> float:
    """CPU seconds of this process's descendants but the known ones."""
    total = 0.0
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            total += 0.0 if process in known else sum(process.cpu_times()[:2])
    return total


@rows("hogs", HOGS)
async def test_who_runs_beside_an_escape_does_not_wait_for_it(attempt: str, host: Host) -> None:
    reward = CodeTests(test_s=600, wall_s=600, memory_mb=256, concurrency=2)
    data = {"stdio": [{"stdin": "", "stdout": "yes"}]}
    before = set(psutil.Process().children(recursive=True))
    greedy = asyncio.create_task(reward(TaskSpec("t", (), data), f"```python\n{HOGS[attempt]}\n```"))
    await eventually(lambda: greedy.done() or cpu_s_beside(before) > 0.5, what="it keeps the processor busy")
    for _ in range(3):
        assert (await reward(TaskSpec("t", (), data), "```python\nprint('yes')\n```")).reward == 1.0
    assert not greedy.done()
    greedy.cancel()
    await asyncio.wait((greedy,))


@pytest.mark.soak
@pytest.mark.timeout(900)
async def test_all_escapes_at_once_beside_honest_work(host: Host, evil: bytes, scratch: Path) -> None:
    """Three times over: each earns nothing, each honest one between them 1."""
    slots = asyncio.Semaphore(8)

    async def program(name: str) -> float:
        return await escaped(CODE[name], host)

    async def shell(name: str) -> float:
        return (await played(TERMINAL[name], host, evil))[1].reward

    async def agent(name: str) -> float:
        with pytest.raises(AgentFailed):
            await run_agent(AGENTS[name], host, scratch)
        return 0.0

    async def honest(_: str) -> float:
        answer = TerminalEscape((f"echo '\"{host.secret}\"' > answer.json",), "")
        assert (await played(answer, host, evil))[1].reward == 1.0
        return await passed(f"def f(): return {host.secret!r}", f"assert f() == {host.secret!r}") - 1.0

    async def tried(run: Callable[[str], Awaitable[float]], name: str) -> tuple[str, float]:
        async with slots:
            return name, await run(name)

    for _ in range(3):
        found = await asyncio.gather(
            *(
                tried(run, name)
                for names in zip_longest(CODE, TERMINAL, AGENTS)
                for run, name in zip((program, shell, agent, honest), (*names, "honest"), strict=True)
                if name
            )
        )
        assert [name for name, reward in found if reward] == []
    for process in alive_with(host.mark):
        process.kill()
