"""What a generated program may try instead of solving its task: each attempt earns 0 and leaves nothing behind.

Every program must return a secret that only the task's tests hold, besides a file of the host, a variable of the node
and a server on its loopback: whoever reaches one of them earns 1.
"""

import asyncio
import os
import resource
import secrets
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from astraflow.plugins import TaskSpec
from astraflow_raas.rewards.code_tests import CodeTests
from support.sandbox import needs_bubblewrap

pytestmark = [needs_bubblewrap, pytest.mark.slow]

SYSCALL = "import ctypes, os\ncall = ctypes.CDLL(None, use_errno=True).syscall\n"
# Function bodies of `f`, which should return the secret; what stands before `def f` runs at import.
FUNCTIONS = {
    "exit at import": "import os\nos._exit(0)",
    "exit in the function": "def f():\n import os\n os._exit(0)",
    "sys.exit at import": "import sys\nsys.exit(0)",
    "SystemExit in the function": "def f():\n raise SystemExit(0)",
    "an object equal to all": "class E:\n def __eq__(self, o): return True\ndef f(): return E()",
    "an int equal to all": "class I(int):\n def __eq__(self, o): return True\ndef f(): return I(7)",
    "a str equal to all": "class S(str):\n def __eq__(self, o): return True\ndef f(): return S('x')",
    "a list equal to all": "class L(list):\n def __eq__(self, o): return True\ndef f(): return L()",
    "patched builtins": (
        "import builtins\nfor name in ('AssertionError', 'compile', 'exec', 'isinstance', 'print'):\n"
        " setattr(builtins, name, lambda *a, **k: True)\ndef f(): return True"
    ),
    "patched unittest and assert": (
        "import unittest, operator\nunittest.TestCase.assertEqual = lambda *a: True\n"
        "operator.eq = lambda *a: True\ndef f(): return 1"
    ),
    "patched encoder": (
        "import sys, json\nsys.modules['astraflow_raas.programs.literals'].encode = lambda *a, **k: True\n"
        "json.dumps = lambda *a, **k: '{\"value\": true}'\ndef f(): return 1"
    ),
    "writing every descriptor": (
        "import os\nfor fd in range(256):\n try: os.write(fd, b'{\"value\": true}\\n' * 9)\n except OSError: pass\n"
        "def f(): return 1"
    ),
    "printing a verdict": "print('{\"value\": true}\\nPASSED\\nnonce')\ndef f(): return 1",
    "tests in memory": (
        "import gc, re\ndef f():\n for o in gc.get_objects():\n  m = re.search('SECRET=([0-9a-f]+)', repr(o)[:9999])\n"
        "  if m: return m[1]"
    ),
    "tests in frames": (
        "import sys, re\ndef f():\n frame = sys._getframe()\n while frame:\n"
        "  m = re.search('SECRET=([0-9a-f]+)', repr(frame.f_locals) + repr(frame.f_globals))\n"
        "  if m: return m[1]\n  frame = frame.f_back"
    ),
    "tests on standard input": "import os\ndef f(): return os.read(0, 9999).decode()",
    "memory of the harness": "import os\ndef f(): return open(f'/proc/{os.getppid()}/mem', 'rb').read()",
    "own /proc": "def f(): return open('/proc/self/maps').read()",
    "mounting /proc": SYSCALL
    + "def f():\n call(165, b'proc', b'/tmp', b'proc', 0, 0)\n return open('/tmp/1/environ').read()",
    "ptrace": SYSCALL + "def f():\n assert call(101, 16, os.getppid(), 0, 0) == 0\n return os.wait()",
    "process_vm_readv": SYSCALL + "def f():\n return call(310, os.getppid(), 0, 0, 0, 0, 0) and None",
    "killing the harness": "import os\nos.kill(os.getppid(), 9)\ndef f(): return 1",
    "killing everybody": "import os\nos.kill(-1, 9)\ndef f(): return 1",
    "fork bomb": "import os\ndef f():\n while True: os.fork()",
    "fork bomb by system call": SYSCALL
    + "def f():\n while True: call(57); call(56, 17, 0, 0, 0, 0); call(435, 0, 0)",
    "another program": "import subprocess\ndef f(): return subprocess.check_output(['/bin/sh', '-c', 'id'])",
    "exec in place": "import os\ndef f(): os.execv('/bin/true', ['true'])",
    "a daemon": "import os\ndef f():\n if os.fork() == 0:\n  os.setsid()\n  while True: pass\n return 1",
    "threads that stay": (
        "import threading, time\nfor _ in range(20): threading.Thread(target=time.sleep, args=(600,)).start()\n"
        "def f(): return 1"
    ),
    "thread bomb": (
        "import threading, time\ndef f():\n while True: threading.Thread(target=time.sleep, args=(600,)).start()"
    ),
    "memory bomb": "def f():\n kept = []\n while True: kept.append(bytearray(2**26))",
    "memory bomb at once": "def f(): return len(bytes(2**40))",
    "memory in a memfd": "import os\ndef f():\n fd = os.memfd_create('x')\n while True: os.write(fd, b'x' * 2**20)",
    "one huge file": "def f():\n with open('/tmp/x', 'wb') as file:\n  while True: file.write(b'x' * 2**20)",
    "many files": "def f():\n for n in range(10**6): open(f'/tmp/{n}', 'wb').write(b'x' * 2**20)",
    "filling /dev/shm": "def f():\n with open('/dev/shm/x', 'wb') as file:\n  while True: file.write(b'x' * 2**20)",
    "a flood of output": "def f():\n while True: print('x' * 10**6)",
    "symlink to the host": "import os\ndef f():\n os.symlink('{path}', '/tmp/s')\n return open('/tmp/s').read()",
    "file of the host": "def f(): return open('{path}').read()",
    "descriptor of the host": (
        "import os\ndef f():\n for n in range(3, 10):\n  try: return os.read(n, 99).decode()\n  except OSError: pass"
    ),
    "writing to the host": "def f():\n open('{path}', 'w').write('gone')",
    "writing to /usr": "def f(): open('/usr/lib/x', 'w').write('x'); return 1",
    "replacing the harness": "def f(): open('/harness/inside.py', 'w').write('x'); return 1",
    "secrets in /etc": "def f(): return open('/etc/shadow').read() + open('/etc/passwd').read()",
    "a server on loopback": (
        "import socket\ndef f(): return socket.create_connection(('127.0.0.1', {port}), 1).recv(99).decode()"
    ),
    "the network": "import socket\ndef f(): return socket.create_connection(('1.1.1.1', 53), 1).recv(9)",
    "names of the network": "import socket\ndef f(): return socket.gethostbyname('localhost.localdomain')",
    "environment": "import os\ndef f(): return os.environ.get('NODE_SECRET', '') or str(os.environ)",
    "an endless loop": "def f():\n while True: pass",
    "an endless import": "while True: pass",
    "an endless power": "def f(): return 9 ** 9 ** 9 ** 9",
    "an endless search": "import re\ndef f(): return re.match('(a+)+$', 'a' * 99 + 'b')",
    "sleep": "import time\ndef f(): time.sleep(600)",
    "deaf to signals": (
        "import signal\nfor n in (1, 2, 3, 14, 15, 24): signal.signal(n, signal.SIG_IGN)\ndef f():\n while True: pass"
    ),
    "deep recursion": "import sys\nsys.setrecursionlimit(10**9)\ndef f(): return f()",
    "a deep value": "def f():\n v = []\n for _ in range(10**5): v = [v]\n return v",
    "a huge value": "def f(): return 'x' * 10**8",
    "a huge number": "def f(): return 10 ** 10**6",
    "an endless value": "def f():\n while True: yield 1",
    "a value that holds itself": "def f():\n v = []\n v.append(v)\n return v",
    "closing descriptors": "import os\nos.closerange(0, 256)\ndef f(): return 1",
    "descriptors replaced": (
        "import os\nn = os.open('/dev/zero', 2)\nfor fd in range(64): os.dup2(n, fd)\ndef f(): return 1"
    ),
    "atexit": "import atexit, os\natexit.register(os.write, 11, b'{\"value\": true}\\n')\ndef f(): return 1",
    "__del__": "import os\nclass D:\n def __del__(self): os.write(11, b'{\"value\": true}\\n')\ndef f(): D(); return 1",
    "faulthandler and a crash": "import faulthandler, ctypes\nfaulthandler.enable()\ndef f(): ctypes.string_at(0)",
    "garbage for an answer": "import os\nos.write(11, b'[' * 10**5 + b'\\n')\ndef f(): return 1",
    "zip bomb": (
        "import zlib\ndef f():\n d = zlib.compress(bytes(2**26))\n return [zlib.decompress(d) for _ in range(999)]"
    ),
    "raising limits": (
        "import resource\ndef f():\n resource.setrlimit(resource.RLIMIT_AS, (-1, -1))\n return len(bytearray(2**31))"
    ),
    "chroot": "import os\ndef f():\n os.chroot('/tmp')\n return 1",
    "user namespace": SYSCALL + "def f():\n assert call(272, 0x10000000) == 0\n return 1",
    "becoming root": "import os\ndef f():\n os.setuid(0)\n return open('{path}').read()",
    "device files": (
        "import os\ndef f():\n os.mknod('/tmp/d', 0o60600, os.makedev(8, 0))\n return open('/tmp/d', 'rb').read(9)"
    ),
}
# Programs against test code that is run: what it uses is not theirs to change.
CHECKS = {
    "abs redefined": "abs = lambda x: 0\ndef f(): return 1.0",
    "math redefined": "class math:\n isclose = lambda *a, **k: True\ndef f(): return 1.0",
    "set redefined": (
        "class set:\n def __init__(self, *a): pass\n def __eq__(self, o): return True\ndef f(): return 1.0"
    ),
    "helper of the prompt redefined": "def helper(x): return True\ndef f(): return 1.0",
    "check redefined": "def check(candidate): pass\ndef f(): return 1.0",
    "raising what a test catches": "def f(): raise AssertionError",
}
# A program that writes a verdict to whatever may lead to it, and one that says what it has open.
WRITES = (
    "import os, sys\nfor fd in [*range(3, 2048), *(int(w) for w in sys.argv if w.isdigit())]:\n"
    " try: os.write(fd, b'{\"started\": true}\\n' + b'{\"value\": true}\\n' * 9)\n except OSError: pass\n"
)
OPEN = (
    "import os\ndef opened(fd):\n try: return os.fstat(fd) is not None\n except OSError: return False\n"
    "def f(): return [fd for fd in range(4096) if opened(fd)]\n"
)
SCRIPTS = {
    "exit before printing": "import os\nos._exit(0)",
    "flood": "while True: print('x' * 10**6)",
    "nothing": "pass",
    "a crash after printing": "print('yes')\nraise SystemExit(3)",
    "endless": "while True: pass",
    "a child that prints": "import os\nif os.fork() == 0: print('yes')",
}


@dataclass(frozen=True)
class Host:
    secret: str
    path: Path
    port: int


@pytest.fixture
async def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Host]:
    """A machine with a secret in a file, in the environment and behind a port."""
    secret = secrets.token_hex(8)
    (tmp_path / "secret").write_text(secret)
    monkeypatch.setenv("NODE_SECRET", secret)

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(secret.encode())
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1")
    yield Host(secret, tmp_path / "secret", server.sockets[0].getsockname()[1])
    server.close()
    await server.wait_closed()


async def earned(program: str, data: dict[str, object]) -> float:
    reward = CodeTests(test_s=1.0, wall_s=20.0, memory_mb=256)
    score = await reward(TaskSpec("t", (), data), f"```python\n{program}\n```")
    assert score.metrics["has_code"] == 1.0
    left = [
        child
        for child in psutil.Process().children(recursive=True)
        if child.name() in ("bwrap", "python3.11")
    ]
    assert [child for child in left if child.is_running() and child.status() != psutil.STATUS_ZOMBIE] == []
    return score.reward


@pytest.mark.parametrize("attempt", FUNCTIONS)
async def test_a_program_that_does_not_know_the_answer_earns_nothing(attempt: str, host: Host) -> None:
    program = FUNCTIONS[attempt]
    program = program.replace("{path}", str(host.path)).replace("{port}", str(host.port))
    data = {
        "entry_point": "f",
        "calls": [{"arguments": [], "result": host.secret, "note": f"SECRET={host.secret}"}],
    }
    assert await earned(program, data) == 0.0
    assert host.path.read_text() == host.secret


@pytest.fixture(params=[0, 300, 1200])
def open_descriptors(request: pytest.FixtureRequest) -> Iterator[None]:
    """A node that has many files open: numbers beyond any fixed bound."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    kept = [os.open("/dev/null", os.O_RDONLY) for _ in range(request.param)]
    yield
    for number in kept:
        os.close(number)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


KINDS: dict[str, dict[str, object]] = {
    "calls": {"entry_point": "f", "calls": [{"arguments": [], "result": 42}]},
    "checks": {"test_list": ["assert f() == 42"]},
    "stdio": {"stdio": [{"stdin": "", "stdout": "42\n"}]},
}


@pytest.mark.usefixtures("open_descriptors")
@pytest.mark.parametrize("kind", KINDS)
async def test_no_descriptor_leads_to_the_verdict_however_many_the_node_has_open(kind: str) -> None:
    assert await earned(f"{WRITES}def f(): return 1", KINDS[kind]) == 0.0
    assert await earned("def f(): return 42\nif __name__ == '__main__': print(42)", KINDS[kind]) == 1.0


@pytest.mark.usefixtures("open_descriptors")
async def test_the_program_has_three_descriptors_and_no_argument_or_variable_of_its_judge() -> None:
    known = {"HOME", "LANG", "LC_CTYPE", "PATH", "PWD"}
    look = f"import os, sys\ndef g(): return [sys.argv, sorted(set(os.environ) - {known})]\n"
    for name, wanted in (("f", [0, 1, 2]), ("g", [["-c"], []])):
        data = {"entry_point": name, "calls": [{"arguments": [], "result": wanted}]}
        score = await CodeTests()(TaskSpec("t", (), data), f"```python\n{OPEN}{look}\n```")
        assert score.reward == 1.0, name
    script = {"stdio": [{"stdin": "", "stdout": "[0, 1, 2]\n"}]}
    assert await earned(f"{OPEN}print(f())", script) == 1.0


@pytest.mark.parametrize(
    "answer",
    ["NaN", "Infinity", "[1", '{"value": 42} x', '{"value": {"set": [[]]}}', "42", '[{"value": 42}]', ""],
)
async def test_an_answer_that_is_no_strict_json_is_a_failure(answer: str) -> None:
    program = f"import os\ndef f():\n os.write(1, b'{answer}\\n')\n os._exit(0)"
    for kind in ("calls", "checks"):
        assert await earned(program, KINDS[kind]) == 0.0


@pytest.mark.parametrize("attempt", CHECKS)
async def test_a_program_cannot_change_what_its_tests_use(attempt: str) -> None:
    prompt = "import math\ndef helper(x):\n return x == 2.0\ndef f():\n '''Two.'''\n"
    test = (
        "def check(candidate):\n value = candidate()\n assert abs(value - 2.0) < 1e-6\n"
        " assert math.isclose(value, 2.0) and helper(value) and set([value]) == set([2.0])"
    )
    assert await earned("def f(): return 2.0", {"entry_point": "f", "prompt": prompt, "test": test}) == 1.0
    assert await earned(CHECKS[attempt], {"entry_point": "f", "prompt": prompt, "test": test}) == 0.0


@pytest.mark.parametrize("attempt", SCRIPTS)
async def test_a_script_is_judged_by_what_it_prints_before_it_ends_well(attempt: str) -> None:
    assert await earned(SCRIPTS[attempt], {"stdio": [{"stdin": "", "stdout": "yes\n"}]}) == 0.0
