"""Rendered charts in real containers, by podman: what stands in for a cluster on one machine without Kubernetes.

`podman play kube` knows Pods, ConfigMaps and claims. The others are mapped: a Deployment, StatefulSet or Job becomes
one Pod of its name, a Service a name of that pod on the network, the keys that a pod mounts of a Secret a folder of
files. What only a kubelet or a controller acts on is left out: probes (tests ask the probe port themselves), accounts,
budgets and policies; so is the volume at /dev/shm, which podman gives each pod itself. All of it ends with
the block.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, Self

from support.charts import Manifest, of_kind, pod_templates, selects

PODMAN = "/usr/bin/podman"
PROGRAMS = (
    PODMAN,
    "/usr/bin/catatonit",
    "/usr/sbin/runc",
    "/usr/lib/podman/netavark",
    "/usr/lib/podman/aardvark-dns",
)
_NETWORK = "cluster"
_PLAYED_AS_THEY_ARE = ("ConfigMap", "PersistentVolumeClaim")
# Probes are a kubelet's; podman would publish the ports on this machine.
_LEFT_OUT = ("startupProbe", "livenessProbe", "readinessProbe", "ports")
# No systemd, and limits and a score that a machine in a container may give.
_CONFIGURATION = """[containers]
default_ulimits = ["nofile=16384:16384", "nproc=16384:16384"]
oom_score_adj = 0
[engine]
cgroup_manager = "cgroupfs"
runtime = "runc"
events_logger = "file"
[network]
network_backend = "netavark"
"""


def missing_podman() -> str:
    """What this machine lacks, as a sentence; empty when it has all."""
    lacking = [program for program in PROGRAMS if not Path(program).exists()]
    if os.geteuid() != 0:
        return "podman's networks need root"
    return f"not installed: {', '.join(lacking)}" if lacking else ""


def played(manifests: Sequence[Manifest], *, secrets: Path) -> Iterator[tuple[Manifest, list[str]]]:
    """What podman is given for these manifests, and the names by which each pod is found; `secrets` has a folder for
    each Secret.
    """
    for manifest in manifests:
        if manifest["kind"] in _PLAYED_AS_THEY_ARE:
            yield manifest, []
    for manifest in manifests:
        for template in pod_templates(manifest):
            labels, name = template["metadata"]["labels"], manifest["metadata"]["name"]
            services = [
                service["metadata"]["name"]
                for service in of_kind(manifests, "Service")
                if selects({"matchLabels": service["spec"]["selector"]}, labels)
            ]
            pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": labels}}
            spec = _spec_for_podman(name, template["spec"], secrets=secrets)
            yield {**pod, "spec": spec}, [service for service in services if service != name]


def _spec_for_podman(pod: str, given: Manifest, *, secrets: Path) -> Manifest:
    spec = deepcopy(given)
    own = {volume["name"]: f"{pod}-{volume['name']}" for volume in spec["volumes"]}
    for container in spec["containers"]:
        for left_out in _LEFT_OUT:
            container.pop(left_out, None)
        mounts = [mount for mount in container["volumeMounts"] if mount["mountPath"] != "/dev/shm"]
        container["volumeMounts"] = [{**mount, "name": own[mount["name"]]} for mount in mounts]
    mounted = {mount["name"] for container in spec["containers"] for mount in container["volumeMounts"]}
    # podman shares volumes of one name between pods.
    named = [{**volume, "name": own[volume["name"]]} for volume in spec["volumes"]]
    spec["volumes"] = [_volume(volume, secrets) for volume in named if volume["name"] in mounted]
    return spec


def _volume(volume: Manifest, secrets: Path) -> Manifest:
    if "secret" not in volume:
        return volume
    source = secrets / volume["secret"]["secretName"]
    keys = [item["key"] for item in volume["secret"].get("items", [])] or [
        path.name for path in source.iterdir()
    ]
    mounted = secrets / f"mounted-{volume['name']}"
    mounted.mkdir(exist_ok=True)
    for key in keys:
        (mounted / key).write_bytes((source / key).read_bytes())
    return {"name": volume["name"], "hostPath": {"path": str(mounted), "type": "Directory"}}


class Podman:
    """A podman with its own images, volumes and network; what it is given is in `folder`. Use as a context manager."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        configuration = folder / "containers.conf"
        configuration.write_text(_CONFIGURATION)
        self._environment = {**os.environ, "CONTAINERS_CONF": str(configuration)}
        self._num_played = 0
        self.secrets = folder / "secrets"
        self.secrets.mkdir(exist_ok=True)
        # podman refuses a run root of more than 50 characters, and pytest's folders are longer under xdist. Images
        # below them would also go, file by file, into the bundle of a test that fails.
        self._storage = tempfile.TemporaryDirectory(prefix="af-", ignore_cleanup_errors=True)

    def __enter__(self) -> Self:
        self.run("network", "create", _NETWORK)
        return self

    def __exit__(self, *_: object) -> None:
        self.run("pod", "rm", "--all", "--force", "--time", "2", check=False)
        self.run("network", "rm", "--force", _NETWORK, check=False)
        self.run("volume", "rm", "--all", "--force", check=False)
        self.run("rmi", "--all", "--force", check=False)
        self._storage.cleanup()

    def run(self, *words: str, check: bool = True, timeout_s: float = 300) -> str:
        """`podman WORDS…`; what it printed. Raises RuntimeError with what it said, unless `check` is off."""
        own = [
            "--root",
            f"{self._storage.name}/root",
            "--runroot",
            f"{self._storage.name}/run",
            "--network-config-dir",
            str(self.folder / "networks"),
        ]
        done = subprocess.run(
            [PODMAN, *own, *words],
            env=self._environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_s,
        )
        if check and done.returncode:
            raise RuntimeError(
                f"podman {' '.join(words)} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
            )
        return done.stdout if words[0] != "logs" else done.stdout + done.stderr

    def load(self, archive: Path) -> None:
        """Take images from an archive of Docker's."""
        self.run("load", "--input", str(archive), timeout_s=600)

    def play(self, manifests: Sequence[Manifest]) -> list[str]:
        """Start what manifests ask for; the names of its pods."""
        names = []
        for document, aliases in played(manifests, secrets=self.secrets):
            self._num_played += 1
            path = self.folder / f"{self._num_played}.json"
            path.write_text(json.dumps(document))
            network = ",".join(f"alias={alias}" for alias in aliases)
            options = ["--network", f"{_NETWORK}:{network}" if network else _NETWORK]
            self.run("play", "kube", *options, str(path))
            if document["kind"] == "Pod":
                names.append(document["metadata"]["name"])
        return names

    def remove(self, pods: Sequence[str], *, grace_s: int) -> None:
        """End pods as `helm uninstall` does: SIGTERM, and time for their drain."""
        self.run("pod", "stop", "--time", str(grace_s), *pods)
        self.run("pod", "rm", "--force", *pods)

    def containers(self, pod: str) -> list[str]:
        """Names of a pod's containers, its first process aside."""
        found = self.run(
            "ps", "--all", "--filter", f"pod={pod}", "--format", "{{.Names}} {{.IsInfra}}"
        ).splitlines()
        return [line.split()[0] for line in found if not line.endswith("true")]

    def inspect(self, container: str) -> Mapping[str, Any]:
        """What podman knows of a container."""
        found: list[dict[str, Any]] = json.loads(self.run("container", "inspect", container))
        return found[0]

    def address(self, pod: str) -> str:
        """Address of a pod on the network."""
        (infra,) = self.run(
            "ps", "--filter", f"pod={pod}", "--filter", "name=infra", "--format", "{{.Names}}"
        ).split()
        address: str = self.inspect(infra)["NetworkSettings"]["Networks"][_NETWORK]["IPAddress"]
        return address

    def probe(self, pod: str, page: str) -> int:
        """What a kubelet would be answered: the status of a page of the probe listener; 0 when nobody answers."""
        try:
            with urllib.request.urlopen(f"http://{self.address(pod)}:7072{page}", timeout=5) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return int(error.code)
        except OSError:
            return 0

    def keep_secret(self, name: str, content: Mapping[str, bytes]) -> None:
        """`kubectl create secret`; keys that exist are replaced."""
        (self.secrets / name).mkdir(exist_ok=True)
        for key, value in content.items():
            (self.secrets / name / key).write_bytes(value)

    def logs(self, pod: str) -> str:
        """The end of what a pod's containers said."""
        return "\n".join(self.run("logs", "--tail", "12", name, check=False) for name in self.containers(pod))
