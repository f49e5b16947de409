"""The delay of the long link: compiles and runs `delay_relay.c`.

Invariant: the relay ends with its block, and with this process. `network` and tests use it.
"""

import json
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from astraflow.errors import PreconditionError, UnavailableError
from astraflow_bench.wan.links import Link, LinkPlan

_SOURCE = Path(__file__).with_name("delay_relay.c")
_COMPILE_S = 120.0
_END_S = 20.0


def compiled_relay(folder: Path) -> Path:
    """Compile into `folder`. Raises PreconditionError without a compiler, UnavailableError when it fails."""
    compiler = shutil.which("cc")
    if compiler is None:
        raise PreconditionError(
            "the relay of the long link is written in C and no cc was found; apt-get install gcc libc6-dev"
        )
    binary = folder / "delay_relay"
    command = [compiler, "-O2", "-std=gnu11", "-pthread", "-o", str(binary), str(_SOURCE)]
    done = subprocess.run(command, capture_output=True, timeout=_COMPILE_S, check=False)
    if done.returncode:
        raise UnavailableError(
            f"{compiler} cannot compile {_SOURCE.name}: {done.stderr.decode(errors='replace')[-1000:]}; "
            "install gcc and libc6-dev"
        )
    return binary


class Relay:
    """One running relay. Use as a context manager."""

    def __init__(self, command: Sequence[str], *, left: int, right: int, link: Link, plan: LinkPlan) -> None:
        """Between the namespaces of the processes `left` and `right`."""
        arguments = (str(left), str(right), link.device, str(link.delay_us), str(plan.ring_bytes))
        self._command = [*command, *arguments]
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "Relay":
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(self._command, stdin=pipe, stdout=pipe)
        if self._line() != b"ready\n":
            self.__exit__()
            raise UnavailableError("the delay relay did not start; its message is above")
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.communicate(timeout=_END_S)

    def counters(self) -> dict[str, Any]:
        """Bytes and packets carried each way, packets refused, and how late the latest was since the last call."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")
        self._process.stdin.flush()
        counters: dict[str, Any] = json.loads(self._line())
        return counters

    def _line(self) -> bytes:
        assert self._process is not None
        assert self._process.stdout is not None
        return self._process.stdout.readline()
