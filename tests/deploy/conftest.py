"""Fixtures of the tests in containers: one Docker with the images of this tree for all files."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from support.containers import DockerDaemon, missing_programs, storage


@pytest.fixture(scope="session")
def docker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DockerDaemon]:
    """A daemon of its own with the images of this tree."""
    if missing := missing_programs():
        pytest.skip(missing)
    with ExitStack() as stack:
        data = stack.enter_context(storage())
        try:
            daemon = stack.enter_context(DockerDaemon(tmp_path_factory.mktemp("docker"), data))
        except RuntimeError as error:
            pytest.skip(f"dockerd cannot start here: {error}")
        daemon.make_images()
        yield daemon
