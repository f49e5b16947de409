"""Fixtures of the tests in containers: one Docker with the images of this tree for all files."""

from collections.abc import Iterator

import pytest

from support.containers import DockerDaemon, missing_programs


@pytest.fixture(scope="session")
def docker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DockerDaemon]:
    """A daemon of its own with the images of this tree."""
    if missing := missing_programs():
        pytest.skip(missing)
    try:
        daemon = DockerDaemon(tmp_path_factory.mktemp("docker")).__enter__()
    except RuntimeError as error:
        pytest.skip(f"dockerd cannot start here: {error}")
    try:
        daemon.make_images()
        yield daemon
    finally:
        daemon.__exit__()
