"""Rewards that do in a worker process what rewards do wrong; the completion says what."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from astraflow.plugins import MissingCapability, RewardLimits, Score, TaskSpec

_FAULTS = {"long": ValueError("x" * 10_000_000), "missing": MissingCapability("no browser here")}
_kept: list[bytes] = []


class Misbehaves:
    """`length` and `pid` grade, everything else goes wrong."""

    limits = RewardLimits(processes=1, timeout_s=5.0, memory_mb=512)

    def __call__(self, task: TaskSpec, completion: str) -> float | Score:
        """Do what the completion says."""
        match completion.partition(" "):
            case "pid", _, _:
                return Score(1.0, {"pid": float(os.getpid())})
            case "hang", _, path:
                Path(path).write_text(
                    str(
                        subprocess.Popen(
                            [sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True
                        ).pid
                    )
                )
                time.sleep(600)
            case "exit", _, code:
                os._exit(int(code))
            case "die", _, _:
                os.kill(os.getpid(), signal.SIGSEGV)
            case "flood", _, _:
                return float(len(bytearray(2**30)))
            case "grow", _, _:
                _kept.append(b"x" * (300 * 2**20))
                return Score(1.0, {"pid": float(os.getpid())})
            case "print", _, _:
                print("{}\n" * 1000)  # noqa: T201 - no answer to the node
            case "text", _, _:
                return "a lot"  # type: ignore[return-value]
            case "long" | "missing", _, _:
                raise _FAULTS[completion]
        return float(len(completion))


class Unmakeable:
    """Can be made by a node and not by its workers."""

    limits = RewardLimits(processes=1)

    def __init__(self, *, maker_pid: int) -> None:
        if os.getpid() != maker_pid:
            raise RuntimeError("no licence for a second process")

    def __call__(self, task: TaskSpec, completion: str) -> float:
        """Never reached."""
        raise AssertionError
