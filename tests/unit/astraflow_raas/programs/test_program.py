"""What a generated program may do to its own interpreter instead of solving its task: each attempt earns 0 and leaves
nothing behind.

Every program must return a secret that only the task's tests hold. What it may try against the sandbox and the machine
is in `tests/integration/test_escapes.py`.
"""

import os
import resource
import secrets
from collections.abc import Iterator

import psutil
import pytest

from astraflow.plugins import TaskSpec
from astraflow_raas.rewards.code_tests import CodeTests
from support.sandbox import CHANGES_THE_HOST, needs_bubblewrap

pytestmark = [needs_bubblewrap, pytest.mark.slow]

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
    "printing a verdict": "print('{\"value\": true}\\nPASSED\\nnonce')\ndef f(): return 1",
    "tests on standard input": "import os\ndef f(): return os.read(0, 9999).decode()",
    "threads that stay": (
        "import threading, time\nfor _ in range(20): threading.Thread(target=time.sleep, args=(600,)).start()\n"
        "def f(): return 1"
    ),
    "an endless loop": "def f():\n while True: pass",
    "an endless import": "while True: pass",
    "an endless power": "def f(): return 9 ** 9 ** 9 ** 9",
    "an endless search": "import re\ndef f(): return re.match('(a+)+$', 'a' * 99 + 'b')",
    "deaf to signals": (
        "import signal\nfor n in (1, 2, 3, 14, 15, 24): signal.signal(n, signal.SIG_IGN)\ndef f():\n while True: pass"
    ),
    "deep recursion": "import sys\nsys.setrecursionlimit(10**9)\ndef f(): return f()",
    "a deep value": "def f():\n v = []\n for _ in range(10**5): v = [v]\n return v",
    "a huge number": "def f(): return 10 ** 10**6",
    "an endless value": "def f():\n while True: yield 1",
    "a value that holds itself": "def f():\n v = []\n v.append(v)\n return v",
    "closing descriptors": "import os\nos.closerange(0, 256)\ndef f(): return 1",
    "descriptors replaced": (
        "import os\nn = os.open('/dev/zero', 2)\nfor fd in range(64): os.dup2(n, fd)\ndef f(): return 1"
    ),
    "atexit": "import atexit, os\natexit.register(os.write, 1, b'{\"value\": true}\\n')\ndef f(): return 1",
    "__del__": "import os\nclass D:\n def __del__(self): os.write(1, b'{\"value\": true}\\n')\ndef f(): D(); return 1",
    "faulthandler and a crash": "import faulthandler, ctypes\nfaulthandler.enable()\ndef f(): ctypes.string_at(0)",
    "zip bomb": (
        "import zlib\ndef f():\n d = zlib.compress(bytes(2**26))\n return [zlib.decompress(d) for _ in range(999)]"
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
async def test_a_program_that_does_not_know_the_answer_earns_nothing(attempt: str) -> None:
    data = {"entry_point": "f", "calls": [{"arguments": [], "result": secrets.token_hex(8)}]}
    assert await earned(FUNCTIONS[attempt], data) == 0.0


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


async def test_a_program_cannot_change_what_is_shared_with_the_host() -> None:
    assert await earned(CHANGES_THE_HOST, {"stdio": [{"stdin": "", "stdout": "7\n"}]}) == 1.0


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


LOOPS = [
    "assert all(map(lambda _: f() == 42, [1, 2]))",
    "for value in iter(f, 42):\n assert False",
    "class Each:\n def __iter__(self): return self\n def __next__(self): assert f() == 42; raise StopIteration\n"
    "assert list(Each()) == []",
    "import asyncio\nclass Each:\n def __aiter__(self): return self\n async def __anext__(self):\n"
    "  assert f() == 42\n  raise StopAsyncIteration\nasync def main(): return [one async for one in Each()]\n"
    "assert asyncio.run(main()) == []",
]


@pytest.mark.parametrize(
    "signal",
    [
        "",
        "AssertionError",
        "GeneratorExit",
        "KeyboardInterrupt",
        "StopAsyncIteration",
        "StopIteration",
        "SystemExit",
    ],
)
async def test_what_ends_a_loop_or_a_test_does_not_come_from_a_program(signal: str) -> None:
    program = f"def f(): raise {signal}" if signal else "def f(): return 42"
    score = await CodeTests(reward="fraction")(TaskSpec("t", (), {"test_list": LOOPS}), program)
    assert score.reward == float(not signal)


async def test_names_of_the_interpreter_are_not_the_programs_to_define() -> None:
    program = (
        "import sys\nown = sys.modules['astraflow_raas.programs.program']\nreply = own._reply\n"
        "def replies(message):\n own._reply = reply\n"
        " reply({'value': [*message['value'], '__builtins__', '__name__']})\n"
        "own._reply = replies\ndef f(): return 42"
    )
    tests = ["assert f() == 42 and __name__ != f and abs(-1) == 1"]
    assert await earned(program, {"test_list": tests}) == 1.0


@pytest.mark.parametrize("attempt", SCRIPTS)
async def test_a_script_is_judged_by_what_it_prints_before_it_ends_well(attempt: str) -> None:
    assert await earned(SCRIPTS[attempt], {"stdio": [{"stdin": "", "stdout": "yes\n"}]}) == 0.0
