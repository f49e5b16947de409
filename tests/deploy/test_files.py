"""What `deploy/` promises without a daemon: locks, dashboards, and how every service of compose is confined."""

import json
import re
import runpy
import shutil
import subprocess
import tomllib
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from astraflow_bench.dataflow.processes import REDIS_AS_DEPLOYED
from astraflow_kit.metric_schema import SCHEMA, Kind
from support.containers import LOCKS, entries_of
from support.source_tree import REPOSITORY

COMPOSE = REPOSITORY / "deploy/compose"
GRAFANA = REPOSITORY / "deploy/grafana"
DASHBOARDS = GRAFANA / "dashboards"
IMAGE_LOCKS = sorted(lock for lock in LOCKS.glob("*.txt") if lock.stem != "torch-cuda")
CUDA = re.compile(r"^(nvidia-|cuda-|triton|torch)")
# With the names that histograms and counters are exported by.
EXPORTED = {
    f"{name}{suffix}": set(metric.labels) | ({"le"} if suffix == "_bucket" else set())
    for name, metric in SCHEMA.items()
    for suffix in (("_bucket", "_sum", "_count") if metric.kind is Kind.HISTOGRAM else ("",))
}
ADDED_BY_PROMETHEUS = {"instance", "job"}


@pytest.mark.parametrize("lock", IMAGE_LOCKS, ids=lambda lock: lock.stem)
def test_a_lock_has_hashes_our_versions_and_no_cuda(lock: Path) -> None:
    entries = entries_of(lock)
    assert [entry for entry in entries if "--hash=sha256:" not in entry] == []
    pinned = {name: rest.split()[0] for name, _, rest in (entry.partition("==") for entry in entries)}
    assert [name for name in pinned if CUDA.match(name)] == []
    lines = (line.split("#")[0].strip() for line in (REPOSITORY / "constraints.txt").read_text().splitlines())
    ours = {
        name.replace(".", "-").replace("_", "-"): version
        for name, _, version in (x.partition("==") for x in lines)
    }
    assert {name: version for name, version in pinned.items() if ours.get(name, version) != version} == {}


def test_the_locks_have_all_that_the_extras_ask_for() -> None:
    images = runpy.run_path(str(REPOSITORY / "deploy/docker/lock.py"))["IMAGES"]
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    for image, extras in images.items():
        locked = {entry.partition("==")[0] for entry in entries_of(LOCKS / f"{image}.txt")} | {"torch"}
        asked = [
            *project["dependencies"],
            *(each for extra in extras for each in project["optional-dependencies"][extra]),
        ]
        names = {re.split(r"[^A-Za-z0-9.-]", each)[0].replace(".", "-") for each in asked}
        assert names - locked == set(), f"{image}: run `make locks`"


@pytest.mark.parametrize(
    "file", ["compose/compose.yaml", "helm/astraflow/templates/valkey.yaml", "docker/Containerfile"]
)
def test_redis_has_the_settings_with_which_the_data_plane_is_measured(file: str) -> None:
    words = re.findall(r"[\w-]*\w", re.sub(r"#.*", "", (REPOSITORY / "deploy" / file).read_text()))
    name, value = REDIS_AS_DEPLOYED
    assert (name, value) in pairwise(words)


def alerts() -> list[dict[str, Any]]:
    (group,) = YAML(typ="safe").load((GRAFANA / "alerts.yaml").read_text())["groups"]
    return list(group["rules"])


def expressions() -> list[tuple[str, str]]:
    boards = [json.loads(path.read_text()) for path in sorted(DASHBOARDS.glob("*.json"))]
    panels = [
        (panel["title"], target["expr"])
        for board in boards
        for panel in board["panels"]
        for target in panel["targets"]
    ]
    return panels + [(rule["alert"], rule["expr"]) for rule in alerts()]


@pytest.mark.parametrize(("title", "expression"), expressions())
def test_a_panel_or_an_alert_asks_for_metrics_and_labels_that_exist(title: str, expression: str) -> None:
    metrics = re.findall(r"\bastraflow_\w+", expression)
    if title == "DaemonDown":  # of Prometheus' own `up`
        return
    assert metrics, title
    assert [name for name in metrics if name not in EXPORTED] == []
    known = set.union(*(EXPORTED[name] for name in metrics)) | ADDED_BY_PROMETHEUS
    asked = {
        label.strip() for group in re.findall(r"by \(([^)]*)\)", expression) for label in group.split(",")
    }
    asked |= set(re.findall(r"[{,](\w+)(?:=|!=|=~)\"", expression))
    assert asked <= known


def test_the_dashboards_and_the_page_are_what_the_tables_make() -> None:
    made = runpy.run_path(str(GRAFANA / "generate.py"))
    assert (REPOSITORY / "docs/metrics.md").read_text() == made["page"](), "run `make dashboards`"
    for name, (title, panels) in made["DASHBOARDS"].items():
        fresh = made["dashboard"](name, title, panels)
        assert json.loads((DASHBOARDS / f"{name}.json").read_text()) == fresh, "run `make dashboards`"


def test_each_alert_is_played_has_a_remedy_and_a_severity() -> None:
    cases = YAML(typ="safe").load((GRAFANA / "alerts_test.yaml").read_text())["tests"]
    played = dict.fromkeys(case["name"].partition(" of ")[0] for case in cases)
    assert list(played) == ["a healthy run", *(rule["alert"] for rule in alerts())]
    for rule in alerts():
        page, _, heading = rule["annotations"]["runbook"].partition("#")
        titles = re.findall(r"^#+ (.*)$", (REPOSITORY / page).read_text(), re.MULTILINE)
        assert not heading or heading in [
            re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles
        ]
        assert rule["labels"] in ({"severity": "critical"}, {"severity": "warning"})


@pytest.mark.ci
def test_alerts_fire_for_what_they_are_for_and_not_for_a_healthy_run() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("not installed: promtool")
    done = subprocess.run(
        [promtool, "test", "rules", "alerts_test.yaml"],
        cwd=GRAFANA,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def services() -> dict[str, dict[str, Any]]:
    """Of all files, with what YAML merges merged."""
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(COMPOSE.glob("compose*.yaml")):
        for name, service in YAML(typ="safe").load(path.read_text())["services"].items():
            found.setdefault(name, {}).update(service)
    return found


@pytest.mark.parametrize("name", sorted(services()))
def test_every_service_is_confined(name: str) -> None:
    service = services()[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert not str(service["user"]).startswith(("0", "root"))
    assert not {"privileged", "pid", "ipc", "cap_add", "devices"} & service.keys()
    assert all(str(port).startswith("${BIND}:") for port in service.get("ports", []))


def test_each_service_sees_its_own_secrets_only() -> None:
    mounted = {
        name: {volume.split(":")[0] for volume in service.get("volumes", []) if volume.startswith("secrets-")}
        for name, service in services().items()
        if name != "secrets"
    }
    assert {name: volumes for name, volumes in mounted.items() if len(volumes) > 1} == {}
    assert "secrets-authority" not in set.union(*mounted.values())


def test_every_choice_has_a_documented_default() -> None:
    text = (COMPOSE / ".env").read_text()
    defined = set(re.findall(r"^([A-Z0-9_]+)=", text, re.MULTILINE))
    used = {
        name
        for path in COMPOSE.glob("compose*.yaml")
        for name in re.findall(r"\$\{([A-Z0-9_]+)\}", path.read_text())
    }
    assert used <= defined
    assert {name for name in defined if not name.startswith("COMPOSE_")} <= used
