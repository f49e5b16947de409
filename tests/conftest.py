"""What every test shares: one thread per process, hypothesis profiles, xdist placement, no leftovers.

No fixture here is asked for by name; shared fakes and servers live in `tests/support/`.
"""

import logging
import os
import signal
from collections.abc import Iterator

import hypothesis
import psutil
import pytest
import structlog
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from support.failure_bundles import (
    pytest_runtest_makereport,
    pytest_runtest_setup,
    pytest_terminal_summary,
)

__all__ = ["pytest_runtest_makereport", "pytest_runtest_setup", "pytest_terminal_summary"]

# Before anything imports torch or tokenizers: two cores are shared by xdist's workers and their daemons.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# No test downloads a model.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# What a shell runs in its background ignores SIGINT, and processes that tests start and interrupt would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A slow machine must not fail a property, hence no deadline.
hypothesis.settings.register_profile("test", deadline=None, max_examples=50, derandomize=True)
hypothesis.settings.register_profile("soak", deadline=None, max_examples=5_000)
hypothesis.settings.load_profile("test")


class OneEndToEndTestAtATime(LoadScopeScheduling):  # type: ignore[misc]  # xdist ships no types
    """Hands whole files to xdist's workers, and whatever runs the whole loop to one: two runs at once would starve.

    All tests in containers are among those, so that there is one Docker daemon and one build of the images; both
    files over a radosgw share one. The rpcs of the fuzzer go to whoever is free: in soak each takes minutes.
    """

    def _split_scope(self, nodeid: str) -> str:
        whole_loops = (
            "tests/e2e/",
            "tests/chaos/",
            "tests/deploy/test_compose",
            "tests/deploy/test_play_kube",
        )
        parts_of_it = (
            "tests/chaos/test_collection_kills",
            "tests/chaos/test_weight_kills",
            "tests/e2e/test_dashboard_in_chromium",
        )
        over_radosgw = ("tests/integration/test_object_store_contract", "tests/integration/test_store_grants")
        if nodeid.startswith("tests/integration/test_hostile_requests"):
            return nodeid
        if nodeid.startswith(over_radosgw):
            return "radosgw"
        is_whole = nodeid.startswith(whole_loops) and not nodeid.startswith(parts_of_it)
        return "tests/e2e" if is_whole else nodeid.partition("::")[0]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> OneEndToEndTestAtATime:
    """Used for `-n` whatever `--dist` says; files run in the order in which they were collected."""
    config.option.loadscopereorder = False
    return OneEndToEndTestAtATime(config, log)


@pytest.fixture(autouse=True)
def logging_is_as_it_was() -> Iterator[None]:
    """What a test configures is undone: another test may read what is printed when nothing is configured."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    if structlog.is_configured():
        structlog.reset_defaults()
        root.handlers[:] = handlers
        root.setLevel(level)


@pytest.fixture(scope="session", autouse=True)
def no_process_is_left_running() -> Iterator[None]:
    """Fail the session's last test when a test started a process and left it."""
    yield
    left = [child for child in psutil.Process().children(recursive=True) if is_a_leftover(child)]
    assert not left, f"tests left processes running: {[' '.join(child.cmdline()) for child in left]}"


def is_a_leftover(process: psutil.Process) -> bool:
    """Whether `process` lives and is not multiprocessing's own tracker, which ends with its parent."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE and "resource_tracker" not in " ".join(
            process.cmdline()
        )
    except psutil.NoSuchProcess:
        return False
