"""How the processes of the experiment talk: one JSON object per line, orders on stdin, what happened on stdout.

Invariant: nothing but these lines reaches stdout (logs go to stderr), and a process ends when its orders do. The
roles use `orders` and `say`; `role_processes` holds the other end.
"""

import json
import os
import sys
import threading
from collections.abc import Iterator
from typing import IO, Any

Message = dict[str, Any]
_lock = threading.Lock()
_out: list[IO[str]] = []


def take_stdout() -> None:
    """From now on stdout is stderr for everybody but `say`. First thing in a role."""
    _out.append(os.fdopen(os.dup(1), "w"))
    os.dup2(2, 1)


def orders() -> Iterator[Message]:
    """What is asked, until the other end closes."""
    for line in sys.stdin:
        yield json.loads(line)


def say(event: str, **fields: Any) -> None:
    """Tell that something happened. Any thread."""
    with _lock:
        _out[0].write(json.dumps({"event": event} | fields) + "\n")
        _out[0].flush()
