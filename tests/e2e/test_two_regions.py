"""Two regions: the pool has one join string, no credentials, a long link and a firewall that lets it only dial out."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from astraflow_bench.wan.links import LinkPlan, Place, link_to
from astraflow_bench.wan.network import Network, missing_tools
from astraflow_launcher.run.embedded_redis import server_command
from support.cli import run
from support.development import NOISY, ROOT, SMALL, wait_for
from support.s3_server import CREDENTIALS
from support.valkey import server_binary

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.ci,
    pytest.mark.timeout(400),
    pytest.mark.skipif(bool(missing_tools("iptables")), reason=missing_tools("iptables")),
]

PLAN = LinkPlan(rate_bits_per_s=4e9, rtt_s=0.3)
LINK = link_to(PLAN, Place.REMOTE)
CENTRAL, POOL = LINK.store_address, LINK.address
PORT, STORE_PORT, REDIS_PORT = 443, 9000, 6379
STEPS = 3
STORE = f"http://{CENTRAL}:{STORE_PORT}"
OPEN_TO_THE_POOL = (PORT, STORE_PORT)
PATIENCE_S = 120.0


@dataclass
class Regions:
    """Programs in both regions; all end with the block."""

    network: Network
    folder: Path
    stack: ExitStack
    started: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, place: Place, name: str, *command: str, **variables: str) -> None:
        """Start a program that lives as long as the test; what it says is in its log."""
        output = self.stack.enter_context(self.log(name).open("wb"))
        process = self.network.start(
            place, *command, stdin=subprocess.PIPE, stdout=output, stderr=output, env=environment(**variables)
        )
        self.stack.callback(end, process)
        self.started[name] = process

    def says(self, name: str, words: str) -> None:
        """Wait until a program's log has these words; fails when it ends before."""

        def said() -> bool:
            assert self.started[name].poll() is None, self.log(name).read_text()[-3000:]
            return words in self.log(name).read_text()

        wait_for(said, what=f"{name} to say {words!r}", timeout_s=PATIENCE_S)

    def operate(self, *arguments: str, status: int = 0) -> str:
        """Run a command of an operator in the central region; what it prints."""
        command = (sys.executable, "-m", "astraflow.cli", *arguments, "--join", f"{CENTRAL}:{PORT}")
        variables = environment(
            ASTRAFLOW_CA_FILE=str(self.folder / "ca" / "ca.pem"),
            ASTRAFLOW_TOKEN_FILE=str(self.folder / "operator"),
            ASTRAFLOW_STORE_ENDPOINT_URL=STORE,
            ASTRAFLOW_STORE_CREDENTIALS_FILE=str(self.folder / "credentials"),
        )
        process = self.network.start(Place.STORE, *command, stderr=subprocess.PIPE, env=variables)
        output, errors = process.communicate(timeout=300)
        assert process.returncode == status, (output + errors).decode()[-3000:]
        return output.decode()

    def reaches(self, place: Place, address: str, port: int) -> bool:
        """Whether a connection from there can be made."""
        code = f"import socket; socket.create_connection(({address!r}, {port}), timeout=3).close()"
        process = self.network.start(place, sys.executable, "-c", code, stderr=subprocess.DEVNULL)
        process.communicate(timeout=30)
        return process.returncode == 0

    def log(self, name: str) -> Path:
        """Where a program's words are."""
        return self.folder / f"{name}.log"


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill a program and close what leads to it."""
    process.kill()
    process.communicate(timeout=20)


def environment(**variables: str) -> dict[str, str]:
    """A program's environment: no settings, no credentials but those given."""
    kept = {n: v for n, v in os.environ.items() if not n.startswith(("ASTRAFLOW_", "AWS_"))}
    paths = [*sys.path, str(ROOT / "tests" / "e2e" / "plugins")]
    return kept | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"} | variables


@pytest.fixture
def regions(tmp_path: Path) -> Iterator[Regions]:
    """Two regions with nothing in them, and the firewall of the pool."""
    with ExitStack() as stack:
        network = stack.enter_context(Network(PLAN, folder=tmp_path, lifetime_s=380))
        for rule in firewall():
            network.run(Place.REMOTE, "iptables", *rule)
        yield Regions(network, tmp_path, stack)


def firewall() -> list[tuple[str, ...]]:
    """The pool may dial the two ports of the central region, and gets only answers."""
    answers = ("-m", "conntrack", "--ctstate", "ESTABLISHED,RELATED", "-j", "ACCEPT")
    dialled = [
        ("-A", "OUTPUT", "-d", CENTRAL, "-p", "tcp", "--dport", str(port), "-j", "ACCEPT")
        for port in OPEN_TO_THE_POOL
    ]
    local = [("-A", chain, end, "lo", "-j", "ACCEPT") for chain, end in (("INPUT", "-i"), ("OUTPUT", "-o"))]
    drop = [("-P", chain, "DROP") for chain in ("INPUT", "OUTPUT", "FORWARD")]
    return [("-A", "INPUT", *answers), ("-A", "OUTPUT", *answers), *dialled, *local, *drop]


def make_identity(folder: Path) -> None:
    """The authority, the server's certificate, an operator's and a trainer's token, and the pool's join string."""
    ca, key = str(folder / "ca"), str(folder / "signing.pem")
    commands = [
        ("ca", "create", ca),
        ("ca", "issue", ca, "dataflow", "--ip", CENTRAL),
        ("token", "keys", key),
        *(
            ("token", "create", "--role", role, "--run", "*", "--key", key, "--out", str(folder / role))
            for role in ("operator", "trainer")
        ),
        (
            *("join-token", "--address", f"{CENTRAL}:{PORT}", "--ca", f"{ca}/ca.pem", "--key", key),
            *("--run", "quickstart", "--pool", "eu", "--node", "eu-*", "--out", str(folder / "join")),
        ),
    ]
    for command in commands:
        ended = run(*command)
        assert ended.status == 0, ended.errors


def start_central(regions: Regions) -> None:
    """Redis, a store, a dataflow server that grants reads, and the run."""
    folder = regions.folder
    (folder / "redis").mkdir()
    (folder / "credentials").write_text(CREDENTIALS)
    store = {
        "ASTRAFLOW_STORE_ENDPOINT_URL": STORE,
        "ASTRAFLOW_STORE_CREDENTIALS_FILE": str(folder / "credentials"),
    }
    redis = server_command(Path(server_binary()), port=REDIS_PORT, folder=folder / "redis")
    regions.start(Place.STORE, "redis", *redis)
    code = f"from support.s3_server import serve; serve(host={CENTRAL!r}, port={STORE_PORT})"
    regions.start(Place.STORE, "store", sys.executable, "-c", code)
    regions.says("redis", "Ready to accept connections")
    regions.says("store", STORE)
    regions.start(
        Place.STORE,
        "dataflow",
        *(sys.executable, "-m", "astraflow_dataflow", "--redis", f"redis://127.0.0.1:{REDIS_PORT}"),
        *("--host", CENTRAL, "--port", str(PORT), "--work-dir", str(folder / "dataflow"), "--store-grants"),
        ASTRAFLOW_TLS_CERT_FILE=str(folder / "ca" / "dataflow.pem"),
        ASTRAFLOW_TLS_KEY_FILE=str(folder / "ca" / "dataflow.key"),
        ASTRAFLOW_TOKEN_KEYS_FILE=str(folder / "signing.jwks.json"),
        **store,
    )
    regions.says("dataflow", "dataflow.ready")
    small = [*SMALL, *NOISY, "--set", f"run.steps={STEPS}"]
    regions.operate("runs", "create", "quickstart", "--store", "s3://weights/runs", *small)
    regions.start(
        Place.STORE,
        "trainer",
        *(sys.executable, "-m", "astraflow_trainer", "--join", f"{CENTRAL}:{PORT}"),
        *("--work-dir", str(folder / "trainer")),
        ASTRAFLOW_CA_FILE=str(folder / "ca" / "ca.pem"),
        ASTRAFLOW_TOKEN_FILE=str(folder / "trainer-token"),
        **store,
    )


def start_pool(regions: Regions) -> None:
    """One node with one secret."""
    regions.start(
        Place.REMOTE,
        "node",
        *(sys.executable, "-m", "astraflow_raas", "--join-file", str(regions.folder / "join")),
        *("--pool", "eu", "--region", "eu", "--work-dir", str(regions.folder / "node")),
        HOME=str(regions.folder / "nobody"),
    )


def test_a_pool_behind_a_firewall_trains_a_run_of_another_region(regions: Regions) -> None:
    make_identity(regions.folder)
    (regions.folder / "trainer").rename(regions.folder / "trainer-token")
    start_central(regions)
    start_pool(regions)
    assert "run quickstart is finished" in regions.operate("runs", "wait", "quickstart")
    status: dict[str, Any] = json.loads(regions.operate("status", "--json"))
    (policy,) = status["policies"]
    (node,) = status["nodes"]
    assert (policy["last_finished_step"], policy["version"]["version"]) == (STEPS, STEPS)
    assert (node["pool"], node["region"]) == ("eu", "eu")
    assert status["trajectories"]["trained"] == STEPS * 8, "every batch is the pool's work"
    assert status["trajectories"]["conservation_error"] == 0
    assert "store.granted" in regions.log("node").read_text(), "the node had no other access"


def test_nothing_of_the_pool_can_be_dialled_and_the_pool_dials_two_ports(regions: Regions) -> None:
    for place, address in ((Place.STORE, CENTRAL), (Place.REMOTE, POOL)):
        for port in (*OPEN_TO_THE_POOL, 8000):
            name = f"listener-{address}-{port}"
            serve = (sys.executable, "-u", "-m", "http.server", str(port), "--bind", address)
            regions.start(place, name, *serve)
            regions.says(name, "Serving HTTP")
    assert [regions.reaches(Place.REMOTE, CENTRAL, port) for port in (*OPEN_TO_THE_POOL, 8000)] == [
        True,
        True,
        False,
    ]
    assert not any(regions.reaches(Place.STORE, POOL, port) for port in (*OPEN_TO_THE_POOL, 8000))
