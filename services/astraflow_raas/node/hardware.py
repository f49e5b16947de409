"""What machine a node runs on: in words, for the list of nodes, and whether the GPUs it is to use are there.

Reads the system; called once, before joining.
"""

import os
import subprocess
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from astraflow.errors import InvalidArgumentError
from astraflow_raas.settings import SGLANG_ENGINE, NodeSettings

_LOOK_S = 10.0
_MAX_CHARS = 256
_DEVICES = Path("/dev")
_OTHER_MAKERS = ("kfd", "dxg")  # AMD's driver; any GPU below WSL. They do not say how many there are.


def describe_hardware(settings: NodeSettings) -> str:
    """What `--hardware` says, else the GPUs that the engines use, else the processor. Blocks for seconds at most."""
    found = settings.hardware
    if not found and settings.engine == SGLANG_ENGINE:
        found = _gpus(settings.engine_gpus)
    return (found or f"{len(os.sched_getaffinity(0))} × {_processor()}")[:_MAX_CHARS]


def require_gpus(numbers: Sequence[int], *, devices: Path = _DEVICES) -> None:
    """Raise InvalidArgumentError if the machine, or what a container sees of it, lacks a GPU of these numbers."""
    if not numbers or any((devices / name).exists() for name in _OTHER_MAKERS):
        return
    found = len(list(devices.glob("nvidia[0-9]*")))
    if max(numbers) >= found:
        raise InvalidArgumentError(
            f"--engine-gpus names GPU {max(numbers)}; this machine has {found or 'none'} of NVIDIA's "
            f"({devices}/nvidia*): name those it has, counted from 0, or give the container its GPUs"
        )


def _gpus(chosen: str) -> str:
    """As in `8 × NVIDIA H100 80GB HBM3`; empty where there are none that NVIDIA's tool knows."""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        answer = subprocess.run(
            [*command, f"--id={chosen}"] if chosen else command,
            capture_output=True,
            text=True,
            timeout=_LOOK_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    names = Counter(filter(None, map(str.strip, answer.stdout.splitlines())))
    return ", ".join(f"{number} × {name}" for name, number in names.items())


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "processor cores")
