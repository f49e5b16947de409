"""What a policy tries instead of solving its task earns nothing, has a name, and leaves nothing: by public entries.

Each surface has a control that earns 1, and each attempt shows a sign that it was made.
"""

import asyncio
import base64
import contextlib
import os
import secrets
import shutil
import subprocess
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from astraflow.plugins import Message, Observation, TaskSpec
from astraflow_environment.adapters.terminal import Terminal
from astraflow_environment.terminal.sandbox import SandboxLimits
from astraflow_raas.rewards.code_tests import CodeTests
from support.escapes import CODE, TERMINAL, TerminalEscape, code_program, shell_task
from support.sandbox import needs_bubblewrap

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
    mounts, now = Path("/proc/self/mounts").read_text(), psutil.Process()
    before = {child.pid for child in now.children(recursive=True)}
    yield Host(secret, mark, tmp_path / "secret", tcp.sockets[0].getsockname()[1])
    left = [child for child in now.children(recursive=True) if child.pid not in before]
    assert not [child for child in psutil.wait_procs(left, timeout=10)[1]], "processes are left"
    assert Path("/proc/self/mounts").read_text() == mounts
    assert (tmp_path / "secret").read_text() == secret
    assert not [*Path("/tmp").glob(f"*{mark}*"), *Path("/dev/shm").glob(f"*{mark}*")]
    for server in (tcp, abstract):
        server.close()
        await server.wait_closed()


@contextlib.contextmanager
def many_open_files() -> AsyncIterator[None]:
    """More than 256, as a busy node has: numbers of what is opened then are above any fixed bound."""
    opened = [os.open("/dev/null", os.O_RDONLY) for _ in range(300)]
    try:
        yield
    finally:
        for number in opened:
            os.close(number)


async def earned(program: str, wanted: str) -> float:
    data = {"test_list": [f"assert f() == {wanted}  # SECRET={wanted}"]}
    reward = CodeTests(test_s=5.0, wall_s=20.0, memory_mb=256)
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
    assert await earned(host.fill(code_program(escape, show_sign=False)), repr(host.secret)) == 0.0


@pytest.fixture(scope="module")
def evil(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A library that writes its own reward when it is loaded."""
    folder = tmp_path_factory.mktemp("evil")
    (folder / "evil.c").write_text(FORGING_LIBRARY)
    assert (cc := shutil.which("cc")), "needs a C compiler; .ci/run installs it"
    subprocess.run([cc, "-shared", "-fPIC", "-o", folder / "evil.so", folder / "evil.c"], check=True)
    return (folder / "evil.so").read_bytes()


async def played(escape: TerminalEscape, host: Host, evil: bytes) -> tuple[list[str], Observation]:
    """What the commands print, and the graded end."""
    limits = SandboxLimits(disk_mb=40, memory_mb=512, processes=64)
    environment = Terminal(calls="text", command_s=5.0, grade_s=5.0, limits=limits)
    library = base64.b64encode(evil).decode()
    setup = f"echo {library} | base64 -d > /app/evil.so"
    try:
        await environment.reset(shell_task(host.secret, evil, escape.grader))
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
    assert escape.sign in printed[-1], printed
    assert host.secret not in "".join(printed)
    assert (end.done, end.reward) == (True, 0.0), (printed, end)
