"""An installation of the charts in podman, with secrets made as docs/deploy/kubernetes.md makes them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from astraflow.client import Client
from astraflow.connecting.connection import Connection
from astraflow.dataflow.v1 import admin_service_pb2 as admin
from astraflow.errors import AstraflowError
from astraflow.join import JoinString, format_join
from astraflow_launcher.issuing.authority import create_authority, issue_certificate
from astraflow_launcher.issuing.keys import create_keys
from astraflow_launcher.issuing.tokens import Grant, issue_token, read_authorities
from support.charts import Manifest, of_kind, rendered
from support.development import wait_for
from support.play_kube import Podman

SERVER = "main-astraflow-dataflow"
RUN = "run"
PATIENCE_S = 240.0


@dataclass
class Installation:
    """Releases that are played, and what an operator holds."""

    podman: Podman
    folder: Path
    """Where the authority and the key that signs tokens are; empty at first."""
    releases: dict[str, list[str]] = field(default_factory=dict)
    """Pods of each release."""
    hooks: dict[str, list[Manifest]] = field(default_factory=dict)
    """What each release has helm run after its installation."""

    def make_secrets(self) -> None:
        """The Secrets `tls`, `tokens` and `redis`."""
        create_authority(self.folder, days=2)
        issued = issue_certificate(self.folder, "server", dns=[SERVER], days=1)
        public_keys = create_keys(self._key)
        tokens = {f"{role}.token": self.token(role).encode() for role in ("trainer", "operator", "viewer")}
        tls = {"tls.crt": issued.certificate.read_bytes(), "tls.key": issued.key.read_bytes()}
        password = b"0123456789abcdef"
        acl = f"user default on #{hashlib.sha256(password).hexdigest()} ~* &* +@all\n".encode()
        self.podman.keep_secret("tls", {**tls, "ca.crt": self._authority.read_bytes()})
        self.podman.keep_secret("tokens", {**tokens, "token-keys.json": public_keys.read_bytes()})
        self.podman.keep_secret("redis", {"password": password, "users.acl": acl})

    def make_join(self, pool: str) -> str:
        """A Secret with a join string for one pool; its name."""
        join = JoinString(
            address=f"{SERVER}:7070",
            ca=read_authorities(self._authority),
            token=self.token("rollout", pool=pool, nodes=(f"{pool}-*",)),
        )
        self.podman.keep_secret(f"join-{pool}", {"join": format_join(join).encode()})
        return f"join-{pool}"

    def token(self, role: str, *, pool: str = "*", nodes: Sequence[str] = ()) -> str:
        """A token for the run, signed by the installation's key; nodes of Kubernetes are called as their pods."""
        grant = Grant(role=role, runs=("*",), pools=(pool,), nodes=nodes)
        return issue_token(grant, ttl=timedelta(hours=1), key=self._key)

    def install(self, release: str, chart: str, values: Mapping[str, Any]) -> None:
        """`helm install`, without what it runs afterwards."""
        manifests = rendered(chart, release=release, **values)
        self.hooks[release] = [manifest for manifest in manifests if _is_hook(manifest)]
        self.releases[release] = self.podman.play(
            [manifest for manifest in manifests if not _is_hook(manifest)]
        )

    def run_hook(self, release: str, kind: str) -> tuple[int, str]:
        """Run what helm runs after an installation, or for `helm test`; its exit status and what it said."""
        (pod,) = self.podman.play(of_kind(self.hooks[release], kind))
        (container,) = self.podman.containers(pod)
        status = int(self.podman.run("wait", container).strip())
        return status, self.podman.logs(pod)

    def uninstall(self, release: str, *, grace_s: int) -> None:
        """`helm uninstall`."""
        self.podman.remove(self.releases.pop(release), grace_s=grace_s)

    def status(self) -> admin.StatusResponse:
        """What a viewer is shown, over the network of the pods."""
        connection = Connection(
            f"{self.podman.address(SERVER)}:7070",
            ca=self._authority.read_bytes(),
            server_name=SERVER,
            token=lambda: self.token("viewer"),
        )
        with Client(connection) as client:
            return client.call(client.admin.Status, admin.StatusRequest(run_id=RUN))

    def step(self) -> int:
        """The last step trained; 0 before the run is there."""
        try:
            return max(policy.last_finished_step for policy in self.status().policies)
        except (AstraflowError, ValueError):
            return 0

    def reaches(self, step: int) -> None:
        """Wait until so many steps are trained."""
        wait_for(lambda: self.step() >= step, what=f"step {step}", timeout_s=PATIENCE_S, period_s=0.5)

    def logs(self) -> str:
        """The end of what every pod said."""
        pods = [pod for pods in self.releases.values() for pod in pods]
        return "\n".join(f"== {pod}\n{self.podman.logs(pod)}" for pod in pods)

    @property
    def _authority(self) -> Path:
        return self.folder / "ca.pem"

    @property
    def _key(self) -> Path:
        return self.folder / "signing.pem"


def _is_hook(manifest: Manifest) -> bool:
    return "helm.sh/hook" in manifest["metadata"].get("annotations", {})
