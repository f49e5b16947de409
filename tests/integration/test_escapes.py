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
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import get_type_hints

import psutil
import pytest
from pydantic import TypeAdapter

from astraflow.plugins import Episode, Message, Observation, Score, TaskSpec
from astraflow_environment.adapters.terminal import Terminal
from astraflow_raas.agents.program import AgentFailed
from astraflow_raas.rewards.code_tests import CodeTests
from astraflow_raas.workflows.agent_process import AgentProcess, AgentProcessSettings
from support.agents import ScriptedPolicy, serving_agents
from support.escapes import AGENTS, CODE, HOGS, TERMINAL, TerminalEscape, code_program, shell_task
from support.sandbox import needs_bubblewrap, without_override_of_permissions

pytestmark = [pytest.mark.integration, pytest.mark.ci, needs_bubblewrap]

FORGING_LIBRARY = """
#include <fcntl.h>
#include <unistd.h>
__attribute__((constructor)) static void forge(void) {
  int fd = open("/logs/verifier/reward.txt", O_WRONLY | O_CREAT | O_TRUNC, 0644);
  if (fd >= 0 && write(fd, "1", 1) == 1) _exit(0);
}
"""


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
    mounts, now = Path("/proc/self/mounts").read_text(), psutil.Process()  # noqa: ASYNC240 - not a disk
    before = {child.pid for child in now.children(recursive=True)}
    yield Host(secret, mark, tmp_path / "secret", tcp.sockets[0].getsockname()[1])
    left = [child for child in now.children(recursive=True) if child.pid not in before]
    assert not psutil.wait_procs(left, timeout=10)[1], "processes are left"
    assert Path("/proc/self/mounts").read_text() == mounts  # noqa: ASYNC240
    assert (tmp_path / "secret").read_text() == secret
    assert not [name for folder in ("/tmp", "/dev/shm") for name in os.listdir(folder) if mark in name]  # noqa: PTH208
    for server in (tcp, abstract):
        server.close()
        await server.wait_closed()


@contextlib.contextmanager
def many_open_files() -> Iterator[None]:
    """More than 256, as a busy node has: numbers of what is opened then are above any fixed bound."""
    opened = [os.open("/dev/null", os.O_RDONLY) for _ in range(300)]
    try:
        yield
    finally:
        for number in opened:
            os.close(number)


async def earned(program: str, wanted: str, *, seconds: float = 15.0) -> float:
    data = {"test_list": [f"assert f() == {wanted}  # SECRET={wanted}"]}
    reward = CodeTests(test_s=seconds, wall_s=2 * seconds, memory_mb=256)
    with many_open_files():
        score = await reward(TaskSpec("t", (), data), f"```python\n{program}\n```")
    assert score.metrics["has_code"] == 1.0
    return score.reward


async def test_a_program_that_knows_the_answer_earns_it(host: Host) -> None:
    assert await earned(f"def f(): return {host.secret!r}", repr(host.secret)) == 1.0
    assert await earned("def f(): return 1", repr(host.secret)) == 0.0


@pytest.mark.parametrize("attempt", CODE)
async def test_a_program_that_escapes_earns_nothing(attempt: str, host: Host) -> None:
    escape = CODE[attempt]
    if escape.sign:
        assert await earned(host.fill(code_program(escape, show_sign=True)), "True") == 1.0, "was not refused"
    program = host.fill(code_program(escape, show_sign=False))
    assert await earned(program, repr(host.secret), seconds=15.0 if escape.sign else 1.0) == 0.0


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


@pytest.mark.parametrize("attempt", TERMINAL)
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
    for path in folder.glob("*/result.json"):
        with contextlib.suppress(OSError):
            os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))


async def run_agent(program: str, host: Host, scratch: Path) -> Episode:
    async def judged(task: TaskSpec, completion: str, *, policies: object = None) -> Score:
        return Score(float(completion == task.data["answer"]))

    (recipe := scratch / "recipe").mkdir()
    (recipe / "agent.py").write_text(f"import os, signal, sys, time\n{host.fill(program)}")
    (work := scratch / "work").mkdir()
    async with serving_agents() as endpoint:
        workflow = AgentProcess(
            settings=AgentProcessSettings(
                command=("python", "agent.py"),
                hidden_data=("answer",),
                timeout_s=4.0,
                env={"MARK": host.mark},
            ),
            reward=judged,
            endpoint=endpoint,
            recipe_dir=recipe,
            scratch_dir=work,
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
    assert (await run_agent(program, host, scratch)).trajectories[0].reward == 1.0


# An agent is the author's program and runs as the node's user: where no control group holds it, it may kill its guard.
UNGUARDED = pytest.mark.xfail(strict=False, reason="only control groups hold a daemon that killed its guard")


@pytest.mark.parametrize(
    "attempt",
    [pytest.param(name, marks=UNGUARDED) if "without its guard" in name else name for name in AGENTS],
)
async def test_an_agent_that_escapes_fails_by_name_and_leaves_nothing(
    attempt: str, host: Host, scratch: Path
) -> None:
    escape = AGENTS[attempt]
    failing = asyncio.create_task(run_agent(escape.program, host, scratch))
    try:
        await asyncio.wait((failing,), timeout=30)
        assert failing.done(), "the episode does not end"
        with pytest.raises(AgentFailed, match=f"(?s){escape.failure}"):
            failing.result()
        assert alive_with(host.mark) == []
        assert list((scratch / "work").iterdir()) == []
    finally:
        free_readers(scratch / "work")
        for process in alive_with(host.mark):
            process.kill()


@pytest.mark.parametrize("hog", HOGS)
async def test_who_runs_beside_an_escape_does_not_wait_for_it(hog: str, host: Host) -> None:
    reward = CodeTests(test_s=600, wall_s=600, memory_mb=256, concurrency=2)
    data = {"stdio": [{"stdin": "", "stdout": "yes"}]}
    greedy = asyncio.create_task(reward(TaskSpec("t", (), data), f"```python\n{HOGS[hog]}\n```"))
    for _ in range(3):
        assert (await reward(TaskSpec("t", (), data), "```python\nprint('yes')\n```")).reward == 1.0
    if hog != "output without end":
        assert not greedy.done()
    greedy.cancel()
    await asyncio.wait((greedy,))


@pytest.mark.soak
@pytest.mark.timeout(900)
async def test_all_escapes_at_once_beside_honest_work(host: Host, evil: bytes) -> None:
    """Three times over: each earns nothing, each honest one between them 1."""
    slots = asyncio.Semaphore(8)

    async def program(name: str) -> tuple[str, float]:
        async with slots:
            return name, await earned(
                host.fill(code_program(CODE[name], show_sign=False)), repr(host.secret), seconds=2
            )

    async def shell(name: str) -> tuple[str, float]:
        async with slots:
            return name, (await played(TERMINAL[name], host, evil))[1].reward

    async def honest() -> tuple[str, float]:
        answer = TerminalEscape((f"echo '\"{host.secret}\"' > answer.json",), "")
        async with slots:
            assert (await played(answer, host, evil))[1].reward == 1.0
            return "honest", await earned(f"def f(): return {host.secret!r}", repr(host.secret)) - 1.0

    for _ in range(3):
        found = await asyncio.gather(
            *(
                work
                for code, other in zip_longest(CODE, TERMINAL)
                for work in (
                    *((program(code),) if code else ()),
                    *((shell(other),) if other else ()),
                    honest(),
                )
            )
        )
        assert [name for name, reward in found if reward] == []
