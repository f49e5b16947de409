"""Daemons started with what cannot work, as processes: the status that docs/kit.md gives it, one block of words with
value and remedy, and nothing begun: no process, no address, no files of a run.
"""

import asyncio
import os
import re
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import psutil
import pytest

from astraflow_kit.lifecycle import ExitCode
from support.dataflow_world import World
from support.source_tree import REPOSITORY
from support.tls import Authority
from support.tokens import keys_file

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(300)]

NOWHERE = "127.0.0.1:1"
DAEMONS: Mapping[str, tuple[str, ...]] = {
    "dataflow": ("--redis", f"redis://{NOWHERE}"),
    "trainer": ("--join", NOWHERE),
    "raas": ("--join", NOWHERE),
    "engine": ("--model-path", "{folder}/no-model"),
}
CLAIM = re.compile("lock|run|store-.*")
"""What a daemon writes to know its folder, its store and its session in the run `run` again."""
"""A node's name in its work folder, which it keeps for the next start."""
STATUSES = {
    int(status) for status in re.findall(r"(?m)^\| (\d+) \|", (REPOSITORY / "docs" / "kit.md").read_text())
}


@dataclass(frozen=True)
class Given:
    """Files and ports that rows name."""

    folder: Path
    taken: int = 0

    @cached_property
    def authority(self) -> Authority:
        """Who issues the pairs."""
        return Authority.create(self.folder / "authority")

    def text(self, content: str) -> str:
        """A file that holds this."""
        path = self.folder / "text"
        path.write_text(content)
        return str(path)

    def pair(self, *, cert: object = None, key: object = None) -> list[str]:
        """Options for a good pair, one half of which is replaced."""
        good = self.authority.server()
        return ["--tls-cert-file", f"{cert or good.certificate}", "--tls-key-file", f"{key or good.key}"]


@dataclass(frozen=True)
class Row:
    """What is given to which daemons, and what each says; the status is 2 unless given."""

    daemons: str
    options: Callable[[Given], list[str]]
    says: tuple[str, ...]
    status: ExitCode = ExitCode.USAGE


def expired(given: Given) -> list[str]:
    pair = given.authority.server("old", hours=-48)
    return given.pair(cert=pair.certificate, key=pair.key)


ALONE = {
    "no certificate": Row(
        "dataflow trainer", lambda given: given.pair(cert="/nowhere.pem"), ("tls_cert_file", "/nowhere.pem")
    ),
    "no PEM": Row(
        "dataflow raas",
        lambda given: given.pair(cert=given.text("x")),
        ("holds no PEM certificate", "astraflow ca issue"),
    ),
    "another's key": Row(
        "dataflow trainer raas",
        lambda given: given.pair(key=given.authority.server("other").key),
        ("does not belong to tls_cert_file", "give the key"),
    ),
    "an expired certificate": Row("dataflow", expired, ("expired at", "or set the clock")),
    "no token keys": Row(
        "dataflow raas",
        lambda given: ["--token-keys-file", given.text("{}")],
        ("is no JWKS", "astraflow token keys"),
    ),
    "reachable, without TLS": Row(
        "dataflow trainer raas engine",
        lambda _: ["--host", "0.0.0.0"],
        ("'0.0.0.0' is reachable", "insecure"),
    ),
    "reachable, with tokens in the clear": Row(
        "dataflow",
        lambda given: ["--host", "0.0.0.0", "--token-keys-file", f"{keys_file(given.folder)}"],
        ("set the tls_*_file pair",),
    ),
    "no token file": Row(
        "trainer raas",
        lambda _: ["--token-file", "/nowhere/token"],
        ("/nowhere/token cannot be read", "mount it"),
    ),
    "a damaged join string": Row(
        "trainer raas", lambda given: ["--join", "", "--join-file", given.text("af1.x")], ("join string",)
    ),
    "no model": Row("engine", lambda _: [], ("no-model",)),
    "no Redis": Row("dataflow", lambda _: [], ("no usable Redis", "start one"), ExitCode.UNAVAILABLE),
    "no server": Row(
        "trainer raas",
        lambda _: ["--join-timeout-s", "0.2"],
        ("did not answer within", "start it, check --join"),
        ExitCode.UNAVAILABLE,
    ),
}
AT_A_SERVER = {
    "a run that is not there": Row(
        "trainer raas",
        lambda _: ["--run-id", "later", "--join-timeout-s", "0.2"],
        ("no run 'later' on this server, which has run", "create it, check --run-id"),
        ExitCode.UNAVAILABLE,
    ),
    "a gRPC port that is taken": Row(
        "trainer", lambda given: ["--grpc-port", f"{given.taken}"], ("process {pid} (", "another grpc_port")
    ),
    "pages at a port that is taken": Row(
        "trainer raas",
        lambda given: ["--http-port", f"{given.taken}"],
        ("process {pid} (", "another http_port"),
    ),
}


async def ended(daemon: str, options: list[str], folder: Path) -> tuple[int, str]:
    """A daemon's status and what it said, once it has ended."""
    base = [option.format(folder=folder) for option in DAEMONS[daemon]]
    place = ["--address-file", f"{folder}/address"] + (
        [] if daemon == "engine" else ["--work-dir", f"{folder}/work"]
    )
    command = [sys.executable, "-m", f"astraflow_{daemon}", *base, *place, *options]
    paths = {"PYTHONPATH": os.pathsep.join([str(REPOSITORY / "tests"), *filter(None, sys.path)])}
    process = await asyncio.create_subprocess_exec(
        *command, env=os.environ | paths, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
    )
    _, said = await process.communicate()
    return process.returncode or 0, said.decode()


async def problems_of(rows: Mapping[str, Row], folder: Path, *common: str, taken: int = 0) -> list[str]:
    """What is not as the rows say, two daemons at a time."""
    places = asyncio.Semaphore(2)

    async def problem(name: str, daemon: str) -> str:
        row, own = rows[name], folder / f"{daemon} {name}"
        own.mkdir()
        async with places:
            status, said = await ended(daemon, [*common, *row.options(Given(own, taken))], own)
        missing = [word for word in row.says if word.format(pid=os.getpid()) not in said]
        files = [path.name for path in own.glob("work/**/*") if path.is_file() and not CLAIM.match(path.name)]
        begun = files + [path.name for path in own.glob("address*")]
        good = (status, missing, "Traceback" in said, begun) == (row.status, [], False, [])
        return "" if good else f"{daemon}: {name}: status {status}, not said {missing}, begun {begun}: {said}"

    asked = (problem(name, daemon) for name, row in rows.items() for daemon in row.daemons.split())
    return [text for text in await asyncio.gather(*asked) if text]


def left_running(folder: Path) -> list[list[str]]:
    """Command lines of processes that name the folder."""
    lines = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    return [line for line in lines if any(str(folder) in word for word in line)]


def test_the_page_has_every_status() -> None:
    assert {row.status for row in (ALONE | AT_A_SERVER).values()} <= STATUSES


async def test_what_is_wrong_is_named_before_anything_begins(tmp_path: Path) -> None:
    assert await problems_of(ALONE, tmp_path) == []
    assert left_running(tmp_path) == []


@contextmanager
def a_taken_port() -> Iterator[int]:
    """A port that somebody listens at."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


async def test_what_is_wrong_at_a_server_is_named_too(world: World, tmp_path: Path) -> None:
    await world.create_run(store_uri=(tmp_path / "store").as_uri())
    with a_taken_port() as taken:
        assert await problems_of(AT_A_SERVER, tmp_path, "--join", world.address, taken=taken) == []
    assert left_running(tmp_path) == []
