"""A Docker of our own with the project's images in it, for tests of `deploy/`: no registry is asked.

The base comes from debootstrap, packages from a wheelhouse that is resolved with the image's own Python. Needs root and
what `.ci/run` installs; `missing_programs` says what lacks. All of it ends with the block.

`python -m support.containers FOLDER` makes the images for a daemon that uses the folder later, as `.ci/run` does beside
its other steps.
"""

from __future__ import annotations

import fcntl
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

import psutil

from support.source_tree import REPOSITORY

# By path: another `docker` on PATH may belong to somebody else's daemon.
DOCKER, COMPOSE = "/usr/bin/docker", "/usr/bin/docker-compose"
PROGRAMS = (DOCKER, COMPOSE, "/usr/sbin/dockerd", "/usr/sbin/debootstrap", "/sbin/ip")
_BRIDGE_NAME = "af-tests"
"""Not `docker0`, which another daemon of this machine may have."""
BASE, BUILD_BASE = "ci/base:bookworm", "ci/build:bookworm"
IMAGES = ("valkey", "dataflow", "tools", "trainer", "raas")
LOCKS = REPOSITORY / "deploy/docker/locks"
PREPARED = "CI_IMAGES"
"""The variable that names a folder in which the images are being made, or are."""
_COMMAND_S = 600.0


def missing_programs() -> str:
    """What this machine lacks, as a sentence; empty when it has all."""
    lacking = [program for program in PROGRAMS if not Path(program).exists()]
    if os.geteuid() != 0:
        return "a Docker daemon needs root"
    return f"not installed: {', '.join(lacking)}" if lacking else ""


class DockerDaemon:
    """One dockerd with its own data, socket and bridge. Use as a context manager."""

    def __init__(self, folder: Path, data: Path) -> None:
        self.folder = folder
        self.data = data
        """What dockerd keeps."""
        self.socket = folder / "docker.sock"
        self.address = ""
        """This machine, as containers reach it."""
        self.environment = {**os.environ, "DOCKER_HOST": f"unix://{self.socket}", "DOCKER_BUILDKIT": "1"}
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        command = ["/usr/sbin/dockerd", "--storage-driver", "overlay2", "--oom-score-adjust", "0"]
        command += ["--data-root", str(self.data), "--exec-root", str(self.folder / "exec")]
        command += ["--pidfile", str(self.folder / "pid"), "--host", f"unix://{self.socket}"]
        command += ["--bridge", _BRIDGE_NAME, "--default-address-pool", "base=172.31.80.0/20,size=24"]
        command += ["--shutdown-timeout", "5"]
        _run(["ip", "link", "delete", _BRIDGE_NAME], check=False)  # of a session that was killed
        self.address = _unused_address()
        _run(["ip", "link", "add", _BRIDGE_NAME, "type", "bridge"])
        _run(["ip", "address", "add", f"{self.address}/24", "dev", _BRIDGE_NAME])
        _run(["ip", "link", "set", _BRIDGE_NAME, "up"])
        with (self.folder / "dockerd.log").open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        deadline_s = time.monotonic() + 60
        while self.run("version", check=False).returncode:
            if self._process.poll() is not None or time.monotonic() > deadline_s:
                said = (self.folder / "dockerd.log").read_text()[-2000:]
                self.__exit__()
                raise RuntimeError(f"dockerd did not start:\n{said}")
            time.sleep(0.2)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait(timeout=20)
        _run(["ip", "link", "delete", _BRIDGE_NAME])
        for namespace in (self.folder / "exec" / "netns").glob("*"):
            # dockerd leaves it mounted, and pytest could not remove the folder.
            _run(["umount", str(namespace)], check=False)

    def run(
        self, *words: str, check: bool = True, timeout_s: float = _COMMAND_S
    ) -> subprocess.CompletedProcess[str]:
        """`docker WORDS…`. Raises RuntimeError with what it said, unless `check` is off."""
        return _run([DOCKER, *words], environment=self.environment, check=check, timeout_s=timeout_s)

    def inspect(self, *names: str) -> list[dict[str, Any]]:
        """What Docker knows of containers or images."""
        found: list[dict[str, Any]] = json.loads(self.run("inspect", *names).stdout)
        return found

    def kill(self, container: str) -> None:
        """SIGKILL its first process from outside: `docker kill` would suppress the restart policy."""
        os.kill(self.inspect(container)[0]["State"]["Pid"], signal.SIGKILL)

    def make_images(self, images: Sequence[str] = IMAGES) -> None:
        """Base, wheelhouse and images; nothing when all images are there."""
        if not self.run("image", "inspect", *map(image_name, images), check=False).returncode:
            return
        if self.run("image", "inspect", BUILD_BASE, check=False).returncode:
            self._make_bases()
        wheels = self.folder / "wheels"
        if not wheels.exists():
            self._fill(wheels)
        with served(wheels, host=self.address) as address:
            arguments = {"BASE": BASE, "BUILD_BASE": BUILD_BASE, "PIP_NO_INDEX": "1"}
            arguments |= {"PIP_FIND_LINKS": address, "PIP_TRUSTED_HOST": self.address}
            options = [
                word for name, value in arguments.items() for word in ("--build-arg", f"{name}={value}")
            ]
            for image in images:
                containerfile = str(REPOSITORY / "deploy/docker/Containerfile")
                command = [
                    "build",
                    "--file",
                    containerfile,
                    "--target",
                    image,
                    "--tag",
                    image_name(image),
                ]
                self.run(*command, *options, str(REPOSITORY))

    def _make_bases(self) -> None:
        """A minimal Debian with Python, and the same with a compiler for what is thrown away."""
        site = _run(["apt-get", "indextargets", "--format", "$(SITE)"]).stdout.split()[0]
        root = self.folder / "root"
        packages = "--include=python3,ca-certificates"
        _run(["debootstrap", "--variant=minbase", packages, "bookworm", str(root), site])
        self._import(root, BASE)
        shutil.copy("/etc/resolv.conf", root / "etc/resolv.conf")
        install = (
            "apt-get -qq update && apt-get -qq install -y --no-install-recommends gcc libc6-dev python3-venv"
        )
        _run(
            [
                "chroot",
                str(root),
                "sh",
                "-c",
                f"DEBIAN_FRONTEND=noninteractive; export DEBIAN_FRONTEND; {install}",
            ]
        )
        self._import(root, BUILD_BASE)
        shutil.rmtree(root)

    def _import(self, root: Path, image: str) -> None:
        with subprocess.Popen(["tar", "-C", str(root), "-c", "."], stdout=subprocess.PIPE) as archive:
            command = [DOCKER, "import", "-", image]
            subprocess.run(
                command, stdin=archive.stdout, env=self.environment, check=True, capture_output=True
            )

    def _fill(self, wheels: Path) -> None:
        """The wheels of all locks, chosen by the image's Python and fetched in four parts at a time; torch from where
        this environment had it from.
        """
        wheels.mkdir()
        lines = {
            entry for lock in LOCKS.glob("*.txt") if lock.stem != "torch-cuda" for entry in entries_of(lock)
        }
        for part in range(4):
            (wheels / f"part-{part}.txt").write_text("\n".join(sorted(lines)[part::4]))
        fetch = (
            "python3 -m venv /v && for part in 0 1 2 3; do /v/bin/pip download --quiet --require-hashes --no-deps "
            '-d /wheels -r /wheels/part-$part.txt & all="$all $!"; done; for pid in $all; do wait $pid || exit 1; done'
        )
        command = ["run", "--rm", "--network", "host", "--env", "PIP_CERT=/etc/ssl/certs/ca-certificates.crt"]
        for folder in ("/etc/ssl/certs", "/usr/share/ca-certificates", "/usr/local/share/ca-certificates"):
            command += ["--volume", f"{folder}:{folder}:ro"]
        self.run(*command, "--volume", f"{wheels}:/wheels", BUILD_BASE, "sh", "-c", fetch)
        torch = re.search(r"^torch==\S+", (LOCKS / "torch-cuda.txt").read_text(), re.MULTILINE)
        assert torch
        _run(["pip", "download", "--quiet", "--no-deps", "--dest", str(wheels), torch[0]])


def image_name(image: str) -> str:
    """The name of an image of this tree."""
    return f"astraflow/{image}:ci"


@contextmanager
def storage() -> Iterator[Path]:
    """Where a daemon of the tests keeps its data: what `.ci/run` had prepared, once that has ended, or an empty folder.

    Not below pytest's folder: the bundle of a test that fails would take images file by file.
    """
    with tempfile.TemporaryDirectory(prefix="af-", ignore_cleanup_errors=True) as empty:
        prepared = Path(os.environ.get(PREPARED) or empty)
        try:
            with _alone_in(prepared):
                yield prepared / "docker"
        finally:
            shutil.rmtree(prepared, ignore_errors=True)


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Wait until nobody else makes or uses what a folder holds."""
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def prepare(folder: Path) -> None:
    """Make the images of this tree for the daemon that uses the folder next. SIGTERM ends it in order."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with (
        _alone_in(folder),
        tempfile.TemporaryDirectory(prefix="af-") as own,
        DockerDaemon(Path(own), folder / "docker") as daemon,
    ):
        daemon.make_images()


class Compose:
    """`deploy/compose` as a user starts it, on a daemon of ours. Used as a context manager, it ends with `down`."""

    folder = REPOSITORY / "deploy/compose"

    def __init__(self, docker: DockerDaemon, choices: Mapping[str, str]) -> None:
        self.docker = docker
        self.choices = choices
        self._environment = {**docker.environment, **choices}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.run("down", "--volumes", "--timeout", "5", check=False)

    def run(self, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """`docker-compose WORDS…` in the folder."""
        return _run([COMPOSE, *words], environment=self._environment, folder=self.folder, check=check)

    def up(self, *words: str) -> None:
        """`up` with the images there are. Raises RuntimeError with what the containers said last."""
        done = self.run("up", "--detach", "--no-build", *words, check=False)
        if done.returncode:
            said = self.run("logs", "--no-color", "--tail", "20", check=False).stdout
            raise RuntimeError(f"{done.stderr[-2000:]}\n{said[-8000:]}")

    def containers(self, service: str) -> list[str]:
        """Ids of a service's containers, ended ones too."""
        return self.run("ps", "--all", "--quiet", service).stdout.split()

    def secret(self, owner: str, name: str) -> Path:
        """A file in a volume of secrets, as this machine's root sees it."""
        volume = f"{self.choices['COMPOSE_PROJECT_NAME']}_secrets-{owner}"
        return self.docker.data / "volumes" / volume / "_data" / name


class served:
    """A folder over HTTP for as long as the block; its value is the address."""

    def __init__(self, folder: Path, *, host: str) -> None:
        self._server = ThreadingHTTPServer((host, 0), functools.partial(_Quiet, directory=str(folder)))
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> str:
        self._thread.start()
        host, port = self._server.server_address[:2]
        return f"http://{host!s}:{port}/"

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Says nothing."""


def _unused_address() -> str:
    """The first address of a network that no link has, not even an idle one: answers would take its route."""
    taken = {each.address.rpartition(".")[0] for link in psutil.net_if_addrs().values() for each in link}
    return next(f"172.31.{number}.1" for number in range(79, 0, -1) if f"172.31.{number}" not in taken)


def entries_of(lock: Path) -> list[str]:
    """The packages of a lock, each with its hashes."""
    content = "\n".join(line for line in lock.read_text().splitlines() if not line.startswith("#"))
    return re.split(r"\n(?=\S)", content.strip())


def _run(
    command: Sequence[str],
    *,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
    check: bool = True,
    timeout_s: float = _COMMAND_S,
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, check=False, timeout=timeout_s
    )
    if check and done.returncode:
        raise RuntimeError(
            f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        )
    return done


if __name__ == "__main__":
    prepare(Path(sys.argv[1]))
