"""`docker compose up` for real: containers train the quickstart over S3, are killed, scaled, taken down and resumed.

One stack for the whole file, in the order of its tests; the store is a radosgw beside the containers.
"""

from __future__ import annotations

import json
import shutil
import ssl
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from astraflow.client import Client
from astraflow.connecting.connection import Connection
from astraflow.dataflow.v1 import admin_service_pb2 as admin
from astraflow.errors import AstraflowError
from astraflow_bench.wan import radosgw
from astraflow_bench.wan.radosgw import RadosGateway
from astraflow_kit.ports import free_port
from astraflow_weights.store import open_store
from support.containers import BASE, IMAGES, Compose, DockerDaemon, image_name
from support.development import wait_for
from support.source_tree import REPOSITORY

pytestmark = [pytest.mark.ci, pytest.mark.e2e, pytest.mark.timeout(1500)]

LONG_RUNNING = ("valkey", "dataflow", "trainer", "raas")
MIB = 10**6
PATIENCE_S = 600.0
"""A guard against waiting for ever; on a machine with nothing else to do a wait takes a tenth of it."""
PROMETHEUS_IMAGE = "ci/prometheus"
# Debian's, laid out as the published image is.
PROMETHEUS_CONTAINERFILE = f"""
FROM {BASE}
COPY prometheus /bin/prometheus
RUN install -d -o 65534 -g 65534 /prometheus
WORKDIR /prometheus
ENTRYPOINT ["/bin/prometheus"]
"""
# The recipe in small, but for a warm start after which there is something to learn from.
CREATE = """
services:
  create-run:
    command: [runs, create, quickstart, --store, "s3://weights/runs", --set, dataflow.group_size=8, --set,
              dataflow.groups_per_step=4, --set, dataflow.evaluation.num_samples=8, --set,
              policies.solver.model.warm_start.steps=200]
"""


@pytest.fixture(scope="module")
def gateway(docker: DockerDaemon, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RadosGateway]:
    """An S3 store beside the containers, which reach it over Docker's bridge."""
    if missing := radosgw.missing_programs():
        pytest.skip(missing)
    with RadosGateway(tmp_path_factory.mktemp("radosgw"), host="0.0.0.0") as store:
        yield store


@pytest.fixture(scope="module")
def stack(
    docker: DockerDaemon, gateway: RadosGateway, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Compose]:
    """`up`, with more steps than the tests wait for."""
    folder = tmp_path_factory.mktemp("compose")
    (folder / "create.yaml").write_text(CREATE)
    credentials = folder / "s3-credentials"
    credentials.write_text(gateway.credentials_file.read_text())
    credentials.chmod(0o644)
    choices = {
        "COMPOSE_PROJECT_NAME": "ci",
        "COMPOSE_FILE": f"compose.yaml:compose.s3.yaml:{folder / 'create.yaml'}",
        "TAG": "ci",
        "STEPS": "2000",
        "S3_ENDPOINT": f"http://{docker.address}:{gateway.port}",
        "S3_CREDENTIALS": str(credentials),
        "GRPC_PORT": str(free_port()),
        "HTTP_PORT": str(free_port()),
        "PROMETHEUS_PORT": str(free_port()),
        "PROMETHEUS_IMAGE": PROMETHEUS_IMAGE,
    }
    with Compose(docker, choices) as compose:
        compose.up()
        yield compose


@pytest.fixture
def prometheus(stack: Compose, tmp_path: Path) -> Iterator[str]:
    """Address of the Prometheus of the profile `observe`."""
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("not installed: prometheus")
    shutil.copy(program, tmp_path)
    (tmp_path / "Dockerfile").write_text(PROMETHEUS_CONTAINERFILE)
    stack.docker.run("build", "--tag", PROMETHEUS_IMAGE, str(tmp_path))
    stack.up("prometheus")
    yield f"http://127.0.0.1:{stack.choices['PROMETHEUS_PORT']}"
    stack.run("--profile", "observe", "rm", "--force", "--stop", "prometheus")


def status(stack: Compose) -> admin.StatusResponse:
    """What the operator is shown, through the published port."""
    connection = Connection(
        f"127.0.0.1:{stack.choices['GRPC_PORT']}",
        ca=stack.secret("operator", "ca.crt").read_bytes(),
        token=stack.secret("operator", "token"),
    )
    with Client(connection) as client:
        return client.call(client.admin.Status, admin.StatusRequest())


def step(stack: Compose) -> int:
    """The last step trained; 0 while the server is away."""
    try:
        (policy,) = status(stack).policies
    except AstraflowError:
        return 0
    return policy.last_finished_step


def reaches(stack: Compose, wanted: int) -> None:
    """Wait until so many steps are trained."""
    wait_for(lambda: step(stack) >= wanted, what=f"step {wanted}", timeout_s=PATIENCE_S, period_s=2.0)


def page(stack: Compose, service: str, path: str) -> str:
    """A page of a container over its own network, as Prometheus reads it."""
    context = ssl.create_default_context(cafile=str(stack.secret("observe", "ca.crt")))
    context.check_hostname = False  # by address, which no certificate names
    (container,) = stack.docker.inspect(stack.containers(service)[0])
    (network,) = container["NetworkSettings"]["Networks"].values()
    token = stack.secret("observe", "token").read_text().strip()
    request = urllib.request.Request(
        f"https://{network['IPAddress']}:7071{path}", headers={"Authorization": f"Bearer {token}"}
    )
    with urllib.request.urlopen(request, timeout=10, context=context) as answer:
        return str(answer.read().decode())


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_is_small_labelled_and_confined(docker: DockerDaemon, image: str) -> None:
    built, base = docker.inspect(image_name(image), BASE)
    config = built["Config"]
    assert config["User"] == "10001:10001"
    assert config["Labels"]["org.opencontainers.image.licenses"] == "Apache-2.0"
    assert ("Healthcheck" in config) is (image != "tools")
    budget = {"trainer": 1500, "raas": 1500}.get(image, 250)
    assert (built["Size"] - base["Size"]) / MIB < budget
    if image == "valkey":
        return
    confined = [
        "run",
        "--rm",
        "--read-only",
        "--cap-drop",
        "ALL",
        "--network",
        "none",
        "--entrypoint",
        "python",
    ]
    sbom = "print(open('/opt/astraflow/sbom.cdx.json').read())"
    components = json.loads(docker.run(*confined, image_name(image), "-c", sbom).stdout)["components"]
    packages = [component["name"] for component in components]
    assert "astraflow" in packages
    assert ("torch" in packages) is (image in ("trainer", "raas"))
    assert [name for name in packages if name.startswith("nvidia")] == []
    tools = "import shutil; print([shutil.which(tool) for tool in ('cc', 'gcc', 'pip')])"
    assert docker.run(*confined, image_name(image), "-c", tools).stdout.strip() == "[None, None, None]"


def test_it_trains_the_quickstart_over_s3(stack: Compose, gateway: RadosGateway) -> None:
    reaches(stack, 5)
    store = open_store("s3://weights/runs", settings=gateway.settings())

    def parts() -> int:
        return sum("/parts/" in found.key for found in store.list(""))

    # A snapshot and deltas: the newest are on their way, and a step without signal made none.
    wait_for(lambda: parts() >= 2, what="what was learned", timeout_s=PATIENCE_S, period_s=2.0)


def test_nodes_have_no_credentials_of_the_store(stack: Compose) -> None:
    (node,) = stack.docker.inspect(*stack.containers("raas"))
    assert "/run/s3-credentials" not in {mount["Destination"] for mount in node["Mounts"]}
    assert not [setting for setting in node["Config"]["Env"] if "STORE" in setting]


def test_every_container_runs_read_only_without_capabilities_as_nobody(stack: Compose) -> None:
    containers = stack.docker.inspect(*(each for name in LONG_RUNNING for each in stack.containers(name)))
    for container in containers:
        host = container["HostConfig"]
        assert host["ReadonlyRootfs"] is True
        assert host["CapDrop"] == ["ALL"]
        assert host["SecurityOpt"] == ["no-new-privileges:true"]
        assert container["Config"]["User"] == "10001:10001"
        first = psutil.Process(container["State"]["Pid"])
        assert (
            first.uids().real,
            "CapEff:\t0000000000000000" in Path(f"/proc/{first.pid}/status").read_text(),
        ) == (
            10001,
            True,
        )


def test_only_the_documented_ports_are_open_on_this_machine(stack: Compose) -> None:
    published = {
        (binding["HostIp"], binding["HostPort"])
        for name in LONG_RUNNING
        for container in stack.docker.inspect(*stack.containers(name))
        for bindings in container["HostConfig"]["PortBindings"].values()
        for binding in bindings
    }
    assert published == {("127.0.0.1", stack.choices["GRPC_PORT"]), ("127.0.0.1", stack.choices["HTTP_PORT"])}


@pytest.mark.parametrize(
    ("service", "metric"),
    [
        ("dataflow", "astraflow_dataflow_steps_total{"),
        ("raas", "astraflow_raas_episodes_total{"),
        ("trainer", "astraflow_trainer_publish_blocked_seconds_count{"),
    ],
)
def test_metrics_are_read_over_tls_with_a_viewers_token(stack: Compose, service: str, metric: str) -> None:
    assert metric in page(stack, service, "/metrics")


def test_prometheus_scrapes_every_daemon_and_knows_every_panel(prometheus: str) -> None:
    def asked(expression: str) -> list[dict[str, Any]]:
        query = urllib.parse.urlencode({"query": expression})
        try:
            with urllib.request.urlopen(f"{prometheus}/api/v1/query?{query}", timeout=10) as answer:
                found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
        except ConnectionError:
            return []
        return found

    def scraped() -> set[str]:
        return {series["metric"]["job"] for series in asked("up == 1")}

    daemons = {"dataflow", "raas", "trainer"}
    wait_for(lambda: scraped() == daemons, what="a scrape of each", timeout_s=PATIENCE_S, period_s=1.0)
    with urllib.request.urlopen(f"{prometheus}/api/v1/rules", timeout=10) as answer:
        (group,) = json.load(answer)["data"]["groups"]
    assert {rule["health"] for rule in group["rules"]} <= {"ok", "unknown"}  # not asked yet
    for path in (REPOSITORY / "deploy/grafana/dashboards").glob("*.json"):
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel["targets"]:
                asked(target["expr"].replace("$__rate_interval", "1m"))  # what does not parse is a 400


@pytest.mark.parametrize("service", LONG_RUNNING)
def test_a_killed_container_comes_back_and_the_run_goes_on(stack: Compose, service: str) -> None:
    (container,) = stack.containers(service)

    def restarts() -> int:
        return int(stack.docker.inspect(container)[0]["RestartCount"])

    before = restarts()
    stack.docker.kill(container)
    wait_for(lambda: restarts() > before, what="a restart", timeout_s=PATIENCE_S, period_s=0.5)
    wait_for(lambda: step(stack) > 0, what="the server", timeout_s=PATIENCE_S, period_s=0.5)
    reaches(stack, step(stack) + 3)


def test_a_second_node_contributes(stack: Compose) -> None:
    stack.up("--scale", "raas=2", "raas")

    def who_sampled() -> set[str]:
        return {node.node_id for node in status(stack).nodes if node.trajectories}

    wait_for(
        lambda: who_sampled() >= {"node-1", "node-2"}, what="two nodes", timeout_s=PATIENCE_S, period_s=2.0
    )


def test_down_and_up_resumes(stack: Compose) -> None:
    before = step(stack)
    stack.run("stop", "--timeout", "120", "trainer", "raas")
    stopped = stack.docker.inspect(*(stack.containers(name)[0] for name in ("trainer", "raas")))
    assert [each["State"]["ExitCode"] for each in stopped] == [
        0,
        0,
    ]  # SIGTERM was passed on, and they drained
    stack.run("down")
    stack.up()
    reaches(stack, before + 2)
