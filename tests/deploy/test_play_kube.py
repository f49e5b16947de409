"""The charts in containers: the central part and two pools train over TLS with tokens, and a pool goes while the run
goes on.

One installation for the whole file, in the order of its tests.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.charts import need_helm
from support.containers import IMAGES, DockerDaemon, image_name
from support.development import wait_for
from support.installation import RUN, SERVER, Installation
from support.play_kube import Podman, missing_podman

pytestmark = [pytest.mark.ci, pytest.mark.e2e, pytest.mark.timeout(1500)]

HERE = {"registry": "localhost", "tag": "ci", "pullPolicy": "Never"}
CENTRAL = {
    "image": HERE,
    "identity": {"tlsSecret": "tls", "tokensSecret": "tokens"},
    "redis": {"passwordSecret": "redis"},
    "store": {"claim": {"bring": True}},
    "run": {
        "id": RUN,
        "recipe": "quickstart",
        "allowRecipeCode": True,
        "overrides": [
            "run.steps=10000",
            "policies.solver.model.warm_start.steps=200",
            "dataflow.group_size=8",
            "dataflow.groups_per_step=4",
            "dataflow.evaluation.num_samples=8",
            "dataflow.evaluation.final_samples=8",
        ],
    },
    "trainer": {"policies": [{"name": "solver"}]},
}
POD = {"main": SERVER, "one": "one-astraflow", "two": "two-astraflow"}
DRAIN_S = 20


@pytest.fixture(scope="module")
def podman(docker: DockerDaemon, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Podman]:
    """A podman with the images of this tree."""
    if missing := missing_podman():
        pytest.skip(missing)
    folder = tmp_path_factory.mktemp("podman")
    with Podman(folder) as podman:
        archive = folder / "images.tar"
        docker.run("save", "--output", str(archive), *map(image_name, IMAGES))
        podman.load(archive)
        archive.unlink()
        yield podman


@pytest.fixture(scope="module")
def installation(podman: Podman, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    """The central part and two pools."""
    need_helm()
    installed = Installation(podman, tmp_path_factory.mktemp("authority"))
    installed.make_secrets()
    try:
        installed.install("main", "astraflow", CENTRAL)
        status, said = installed.run_hook("main", "Job")
        assert status == 0, said
        for pool in ("one", "two"):
            installed.install(pool, "astraflow-pool", pool_values(pool, joins=installed.make_join(pool)))
        yield installed
    finally:
        print(installed.logs())  # noqa: T201 - pytest shows it where a test failed


def pool_values(pool: str, *, joins: str) -> dict[str, Any]:
    """A pool of one node with the CPU engine."""
    return {
        "image": HERE,
        "pool": pool,
        "join": {"secret": joins},
        "run": {"id": RUN, "allowRecipeCode": True},
        "store": {"claim": "main-astraflow-weights"},
        "drainSeconds": DRAIN_S,
        "terminationGracePeriodSeconds": DRAIN_S + 10,
    }


def test_podman_runs_below_a_folder_with_a_long_name(tmp_path: Path) -> None:
    if missing := missing_podman():
        pytest.skip(missing)
    (folder := tmp_path / ("x" * 50)).mkdir()
    with Podman(folder) as podman:
        assert "cluster" in podman.run("network", "ls")


def test_two_pools_train_over_tls_with_tokens(installation: Installation) -> None:
    installation.reaches(5)
    wait_for(lambda: newest_version(installation) >= 1, what="a version of what was learned", timeout_s=240)
    wait_for(lambda: connected(installation) == {"one", "two"}, what="both pools", timeout_s=60)


def test_a_kubelet_finds_every_pod_ready(installation: Installation) -> None:
    for pod in POD.values():
        pages = [installation.podman.probe(pod, page) for page in ("/healthz", "/startedz", "/readyz")]
        assert pages == [200, 200, 200], pod


def test_pods_are_as_confined_as_the_chart_says(installation: Installation) -> None:
    for pod in [name for pods in installation.releases.values() for name in pods]:
        for container in installation.podman.containers(pod):
            found = installation.podman.inspect(container)
            assert found["Config"]["User"].startswith("10001"), container
            assert found["HostConfig"]["ReadonlyRootfs"], container
            assert not found["EffectiveCaps"], container


def test_helm_test_asks_for_the_run(installation: Installation) -> None:
    status, said = installation.run_hook("main", "Pod")
    assert (status, "solver" in said) == (0, True), said


def test_a_pool_is_uninstalled_and_the_run_goes_on(installation: Installation) -> None:
    installation.uninstall("two", grace_s=DRAIN_S + 10)
    step = installation.step()
    installation.reaches(step + 3)
    wait_for(lambda: connected(installation) == {"one"}, what="the pool's departure", timeout_s=60)
    status = installation.status()
    assert status.trajectories.conservation_error == 0
    assert not status.dead_letters


def newest_version(installation: Installation) -> int:
    """The newest version that was announced; a step without a signal publishes none."""
    return max(policy.version.version for policy in installation.status().policies)


def connected(installation: Installation) -> set[str]:
    """Pools with a node that works."""
    return {node.pool for node in installation.status().nodes if node.connected}
