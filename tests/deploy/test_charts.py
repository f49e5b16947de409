"""The charts: what they make of values is what Kubernetes takes, is locked down, and reaches nothing but what the
architecture says; wrong values are refused in a sentence.
"""

from __future__ import annotations

import importlib
import json
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import typer

from support.charts import (
    CENTRAL,
    CHARTS,
    EXAMPLES,
    KUBERNETES,
    POOL,
    TOOLS,
    Manifest,
    Pod,
    helm,
    may_be_reached,
    may_reach_address,
    may_send,
    merged,
    of_kind,
    pods_of,
    render,
    rendered,
    selects,
)

pytestmark = pytest.mark.ci

WITH_GPUS = {"gpu": {"count": 8, "type": "H100"}}
SEVERAL_RANKS = {"pods": 2, "storage": {"accessMode": "ReadWriteMany"}, **WITH_GPUS}
SETS: dict[str, tuple[str, Manifest]] = {
    "central": ("astraflow", CENTRAL),
    "central, all switches": (
        "astraflow",
        merged(
            CENTRAL,
            {
                "dataflow": {"expose": {"enabled": True}},
                "metrics": {"enabled": True, "labels": {"release": "prometheus"}},
                "scaler": {"enabled": True, "clientCaSecret": "keda"},
                "store": {"credentialsSecret": "store"},
                "image": {"pullSecrets": ["pull"], "digests": {"dataflow": f"sha256:{'0' * 64}"}},
                "priorityClassName": "high",
                "podAnnotations": {"team": "rl"},
                "identity": {"serverName": "af.example", "audience": "team"},
            },
        ),
    ),
    "central, own Redis and ranks": (
        "astraflow",
        merged(
            CENTRAL,
            {
                "redis": {"bring": False, "url": "rediss://redis.example:6379/0"},
                "trainer": {"defaults": SEVERAL_RANKS},
                "metrics": {"enabled": True},
            },
        ),
    ),
    "central, JobSet": (
        "astraflow",
        merged(CENTRAL, {"trainer": {"kind": "jobset", "defaults": SEVERAL_RANKS}}),
    ),
    "pool": ("astraflow-pool", POOL),
    "pool, all switches": (
        "astraflow-pool",
        merged(
            POOL,
            {
                **WITH_GPUS,
                "engine": {
                    "kind": "sglang",
                    "tpSize": 4,
                    "serve": "solver=2",
                    "extraArgs": ["--mem-fraction-static=0.8"],
                },
                "region": "eu-west-1",
                "hardware": "8 x H100",
                "pricePerHour": 30.5,
                "run": {"id": "run", "allowRecipeCode": True},
                "store": {"endpointUrl": "https://s3.example", "region": "eu", "credentialsSecret": "store"},
                "metrics": {"enabled": True, "tlsSecret": "tls", "viewerSecret": "viewer"},
                "autoscaling": {
                    "enabled": True,
                    "scalerAddress": "af.example:7073",
                    "authSecret": "keda",
                    "tasksPerNode": 16,
                },
            },
        ),
    ),
}
POOLS = ("single-gpu-node-pool", "spot-pool", "two-regions-eu", "two-regions-us")
NAMES = [*SETS, *sorted(path.stem for path in EXAMPLES.glob("*.yaml"))]
LONG_RUNNING = ("Deployment", "StatefulSet", "JobSet")
CUSTOM = {
    "ScaledObject": {
        "scaleTargetRef",
        "minReplicaCount",
        "maxReplicaCount",
        "pollingInterval",
        "advanced",
        "triggers",
    },
    "TriggerAuthentication": {"secretTargetRef"},
    "ServiceMonitor": {"selector", "endpoints"},
    "PodMonitor": {"selector", "podMetricsEndpoints"},
    "JobSet": {"failurePolicy", "network", "replicatedJobs"},
}
"""Fields of the spec of kinds that Kubernetes itself does not have; see their operators' references."""


@pytest.fixture(scope="module", params=NAMES)
def manifests(request: pytest.FixtureRequest) -> list[Manifest]:
    """What helm makes of one set of values."""
    name = request.param
    if name in SETS:
        chart, values = SETS[name]
        return rendered(chart, **values)
    chart = "astraflow-pool" if name in POOLS else "astraflow"
    return rendered(chart, EXAMPLES / f"{name}.yaml")


@pytest.mark.parametrize("chart", ["astraflow", "astraflow-pool"])
def test_helm_finds_nothing_to_complain_of(chart: str, tmp_path: Path) -> None:
    values = tmp_path / "values.json"
    values.write_text(json.dumps(CENTRAL if chart == "astraflow" else POOL))
    answer = helm("lint", "--strict", str(CHARTS / chart), f"--values={values}")
    assert answer.returncode == 0, answer.stdout + answer.stderr


@pytest.mark.parametrize("version", ["1.28", KUBERNETES, "1.37"])
def test_kubernetes_takes_every_manifest(manifests: list[Manifest], version: str, tmp_path: Path) -> None:
    validator = TOOLS / "kubernetes-validate"
    if not validator.exists():
        pytest.skip("kubernetes-validate is not installed: `make helm-tools`")
    files = list(_known_to_kubernetes(manifests, tmp_path))
    command = [validator, "--kubernetes-version", version, "--strict", *files]
    answer = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert answer.returncode == 0, answer.stdout + answer.stderr


def _known_to_kubernetes(manifests: list[Manifest], folder: Path) -> Iterator[Path]:
    """A file for each manifest; of a JobSet, its jobs."""
    for number, manifest in enumerate(manifests):
        assert set(manifest.get("spec", {})) <= CUSTOM.get(manifest["kind"], set(manifest.get("spec", {})))
        for job in manifest["spec"]["replicatedJobs"] if manifest["kind"] == "JobSet" else ():
            named = {"metadata": {"name": job["name"], **job["template"]["metadata"]}}
            path = folder / f"{number}-job.json"
            path.write_text(json.dumps({"apiVersion": "batch/v1", "kind": "Job", **job["template"], **named}))
            yield path
        if manifest["kind"] not in CUSTOM:
            path = folder / f"{number}.json"
            path.write_text(json.dumps(manifest))
            yield path


def _each(pod: Pod, holds: Callable[[Manifest], bool]) -> bool:
    return all(holds(container) for container in pod.containers)


def _bounded(container: Manifest) -> bool:
    resources = container["resources"]
    return bool(
        resources["requests"]["cpu"] and resources["requests"]["memory"] and resources["limits"]["memory"]
    )


POLICY: dict[str, Callable[[Pod], bool]] = {
    "a user other than root": lambda pod: (
        pod.spec["securityContext"]["runAsNonRoot"] and pod.spec["securityContext"]["runAsUser"] == 10001
    ),
    "the runtime's seccomp profile": lambda pod: (
        pod.spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    ),
    "a root that is only read": lambda pod: _each(
        pod, lambda one: one["securityContext"]["readOnlyRootFilesystem"]
    ),
    "no capabilities": lambda pod: _each(
        pod, lambda one: one["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    ),
    "no way to more rights": lambda pod: _each(
        pod, lambda one: one["securityContext"]["allowPrivilegeEscalation"] is False
    ),
    "no token of Kubernetes": lambda pod: pod.spec["automountServiceAccountToken"] is False,
    "no variables of other services": lambda pod: pod.spec["enableServiceLinks"] is False,
    "an image by version or digest": lambda pod: _each(
        pod, lambda one: bool(re.search(r"(:(?!latest)[\w.-]+|@sha256:[0-9a-f]{64})$", one["image"]))
    ),
    "requests and a limit of memory": lambda pod: _each(pod, _bounded),
    "no way to the host": lambda pod: (
        not {"hostNetwork", "hostPID", "hostIPC"} & pod.spec.keys()
        and not any("hostPath" in volume for volume in pod.spec.get("volumes", []))
    ),
    "all three probes, where it runs on": lambda pod: (
        not pod.owner.startswith(LONG_RUNNING)
        or _each(pod, lambda one: {"startupProbe", "livenessProbe", "readinessProbe"} <= one.keys())
    ),
    "a writable place for everything that is mounted as one": lambda pod: (
        {mount["name"] for one in pod.containers for mount in one["volumeMounts"]}
        == {volume["name"] for volume in pod.spec["volumes"]}
    ),
}


@pytest.mark.parametrize("rule", POLICY)
def test_every_pod_has(manifests: list[Manifest], rule: str) -> None:
    pods = list(pods_of(manifests))
    assert pods
    assert [pod.owner for pod in pods if not POLICY[rule](pod)] == []


def test_every_pod_is_selected_by_a_policy_for_both_ways(manifests: list[Manifest]) -> None:
    policies = [policy["spec"] for policy in of_kind(manifests, "NetworkPolicy")]
    both = [spec for spec in policies if set(spec["policyTypes"]) == {"Ingress", "Egress"}]
    pods = list(pods_of(manifests))
    assert [
        pod.owner for pod in pods if not any(selects(spec["podSelector"], pod.labels) for spec in both)
    ] == []


def test_a_service_and_a_budget_select_pods_that_exist(manifests: list[Manifest]) -> None:
    pods = [pod.labels for pod in pods_of(manifests)]
    selectors = [{"matchLabels": service["spec"]["selector"]} for service in of_kind(manifests, "Service")]
    selectors += [budget["spec"]["selector"] for budget in of_kind(manifests, "PodDisruptionBudget")]
    selectors += [
        one["spec"]["selector"]
        for kind in ("ServiceMonitor", "PodMonitor")
        for one in of_kind(manifests, kind)
    ]
    assert [each for each in selectors if not any(selects(each, labels) for labels in pods)] == []


def test_each_pod_has_time_for_its_drain(manifests: list[Manifest]) -> None:
    for pod in pods_of(manifests):
        drains = [_option(one, "--drain-timeout-s") for one in pod.containers]
        assert all(
            float(drain) + 5 <= pod.spec["terminationGracePeriodSeconds"] for drain in drains if drain
        ), pod.owner


def _option(container: Manifest, name: str) -> str:
    given = dict(str(argument).partition("=")[::2] for argument in container.get("args", []))
    return given.get(name, "")


def test_daemons_know_their_options_and_variables(manifests: list[Manifest]) -> None:
    for pod in pods_of(manifests):
        for container in pod.containers:
            arguments = [str(argument) for argument in container.get("args", [])]
            daemon = "trainer" if "astraflow_trainer" in arguments else (arguments or [""])[0]
            if daemon in ("dataflow", "raas", "trainer"):
                given = {argument.partition("=")[0] for argument in arguments if argument.startswith("--")}
                unknown = given - _options_of(daemon) - TORCHRUN
                variables = {each["name"] for each in container.get("env", [])} - {"POD_INDEX"}
                unknown |= {name for name in variables if _as_option(name) not in _options_of(daemon)}
                assert not unknown, f"{pod.owner} gives {daemon} {unknown}"


TORCHRUN = {"--nnodes", "--node-rank", "--nproc-per-node", "--master-addr", "--master-port", "--max-restarts"}


def _options_of(daemon: str) -> set[str]:
    app = importlib.import_module(f"astraflow_{daemon}.__main__").app
    return {name for parameter in typer.main.get_command(app).params for name in parameter.opts}


def _as_option(variable: str) -> str:
    return "--" + variable.removeprefix("ASTRAFLOW_").lower().replace("_", "-")


def test_the_arrows_are_those_of_the_architecture() -> None:
    values = merged(CENTRAL, {"trainer": {"policies": [{"name": "solver"}, {"name": "verifier"}]}})
    central, pool = rendered("astraflow", **values), rendered("astraflow-pool", release="eu", **POOL)
    policies = of_kind([*central, *pool], "NetworkPolicy")
    pods = {pod.labels["app.kubernetes.io/component"]: pod for pod in pods_of([*central, *pool])}
    ports = (7070, 7071, 7072, 7073, 6379, 29500, 443)
    arrows = {
        (source, target, port)
        for source, sender in pods.items()
        for target, receiver in pods.items()
        for port in ports
        if may_send(policies, sender, receiver, port)
    }
    callers = ("trainer-solver", "trainer-verifier", "raas", "create-run", "test")
    ranks = {(name, name, port) for name in ("trainer-solver", "trainer-verifier") for port in ports}
    assert arrows == {(name, "dataflow", 7070) for name in callers} | {("dataflow", "valkey", 6379)} | ranks
    outside = {name for name, pod in pods.items() if may_reach_address(policies, pod, "198.51.100.7", 443)}
    assert outside == {*callers, "dataflow"}
    assert not any(
        may_be_reached(policies, pod, "198.51.100.7", port) for pod in pods.values() for port in ports
    )


def test_an_exposed_server_is_reached_at_its_grpc_port_alone() -> None:
    chart, values = SETS["central, all switches"]
    manifests = rendered(chart, **values)
    (dataflow,) = (pod for pod in pods_of(manifests) if pod.owner.startswith("Deployment"))
    policies = of_kind(manifests, "NetworkPolicy")
    reached = [
        port for port in (7070, 7071, 7072, 7073) if may_be_reached(policies, dataflow, "198.51.100.7", port)
    ]
    assert reached == [7070]


REFUSED: dict[str, tuple[str, Manifest, str]] = {
    "no registry": ("astraflow", {"image": {"registry": ""}}, "image.registry is not set: build and push"),
    "no tokens": (
        "astraflow",
        {"identity": {"tokensSecret": ""}},
        "identity.tokensSecret is not set: make keys",
    ),
    "no certificate": ("astraflow", {"identity": {"tlsSecret": ""}}, "identity.tlsSecret is not set"),
    "two Redis": (
        "astraflow",
        {"redis": {"url": "redis://r:6379/0"}},
        "redis.bring = true contradict each other",
    ),
    "no Redis": ("astraflow", {"redis": {"bring": False}}, "redis.bring = false needs redis.url"),
    "no password": ("astraflow", {"redis": {"passwordSecret": ""}}, "no default password exists"),
    "a password in the address": (
        "astraflow",
        {"redis": {"bring": False, "url": "redis://:pw@r:6379/0"}},
        "url",
    ),
    "two stores": ("astraflow", {"store": {"claim": {"bring": True}}}, "one place holds the weights"),
    "no store": ("astraflow", {"store": {"uri": ""}}, "store.uri is not set: name a bucket"),
    "a volume across regions": (
        "astraflow",
        {"store": {"uri": "", "claim": {"bring": True}}, "dataflow": {"expose": {"enabled": True}}},
        "nodes of other regions cannot mount",
    ),
    "one server": ("astraflow", {"dataflow": {"replicas": 1}}, "replicas"),
    "a short grace": (
        "astraflow",
        {"trainer": {"drainSeconds": 300}},
        "below trainer.drainSeconds + 5 = 305",
    ),
    "no policy": ("astraflow", {"trainer": {"policies": []}}, "trainer.policies is empty"),
    "a policy twice": ("astraflow", {"trainer": {"policies": [{"name": "a"}, {"name": "A"}]}}, "twice"),
    "no GPU type": (
        "astraflow",
        {"trainer": {"defaults": {"gpu": {"count": 1}}}},
        "names no type: set gpu.type",
    ),
    "ranks without a shared folder": ("astraflow", {"trainer": {"defaults": {"pods": 2}}}, "ReadWriteMany"),
    "a scaler for anybody": ("astraflow", {"scaler": {"enabled": True}}, "mutual TLS only"),
    "the tag latest": ("astraflow", {"image": {"tag": "latest"}}, "image.tag"),
    "an unknown value": ("astraflow", {"dataflow": {"replica": 3}}, "replica is not allowed"),
    "a wrong type": ("astraflow", {"dataflow": {"replicas": "three"}}, "replicas"),
    "no join string": ("astraflow-pool", {"join": {"secret": ""}}, "join-token --node 'main-astraflow-*'"),
    "no name of the pool": ("astraflow-pool", {"pool": ""}, "pool is not set: name the pool"),
    "no GPU type of a pool": ("astraflow-pool", {"gpu": {"count": 8}}, "gpu.count = 8 and no GPU type"),
    "SGLang without GPUs": ("astraflow-pool", {"engine": {"kind": "sglang"}}, "sglang with gpu.count = 0"),
    "a copy over a part of the GPUs": (
        "astraflow-pool",
        {**WITH_GPUS, "engine": {"kind": "sglang", "tpSize": 3}},
        "gpu.count = 8 is no multiple of engine.tpSize = 3",
    ),
    "a short grace of a pool": ("astraflow-pool", {"drainSeconds": 900}, "in the middle of its drain"),
    "scaling to nothing": ("astraflow-pool", {"autoscaling": {"minReplicas": 0}}, "minReplicas"),
    "scaling by nobody": (
        "astraflow-pool",
        {"autoscaling": {"enabled": True}},
        "autoscaling.scalerAddress is not set",
    ),
    "metrics for anybody": ("astraflow-pool", {"metrics": {"enabled": True}}, "pages listen to no stranger"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused_in_a_sentence(what: str) -> None:
    chart, changes, sentence = REFUSED[what]
    answer = render(chart, **merged(CENTRAL if chart == "astraflow" else POOL, changes))
    assert answer.returncode != 0
    assert sentence in answer.stderr
