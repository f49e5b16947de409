"""SIGKILL at random instants of who publishes weights and of who pulls them: bit-exact afterwards, nothing torn."""

import random
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest

from astraflow_weights.mirror.mirror import Mirror
from astraflow_weights.mirror.state import MirrorFiles
from astraflow_weights.store.file import FileStore
from astraflow_weights.store.layout import PolicyKeys
from astraflow_weights.tools.verification import verify_version
from astraflow_weights.versions.inspection import parts_by_base
from support import store_census
from support.weight_models import POLICY, RUN
from support.weight_processes import check_mirror, kill_after, loading, publish, read_log, root_of

pytestmark = pytest.mark.timeout(3600)

MAX_DELAY_S = 0.4
MAX_CHANGE_S = 0.02
"""About how long a puller takes to apply one change."""
PULLED_VERSIONS = 14


def parts_without_version(store: FileStore) -> int:
    """Parts that no version or added path names yet: what a publisher or its compactor leaves that is killed
    between upload and commit.
    """
    paths = [parts for record in read_log(store).records for parts in parts_by_base(record).values()]
    named = {ref.key for parts in paths for ref in parts}
    return len({info.key for info in store.list(PolicyKeys(RUN, POLICY).parts)} - named)


def holds(store: FileStore, versions: int) -> bool:
    return len(read_log(store).records) >= versions


def kill_publishers(folder: Path, *, times: int, seed: int) -> int:
    """Kill one publisher after the other over one store; each goes on where the one before was killed, and every
    second one has published at least a version. Returns how many were killed between upload and commit.
    """
    draw, store, met = random.Random(seed), FileStore(folder / "store"), 0
    for number in range(times):
        held = partial(holds, store, len(read_log(store).records) + (number % 2 == 0))
        kill_after(folder, "publish-only", number + 1, once=held, delay_s=draw.random() * MAX_DELAY_S)
        for record in read_log(store).records:
            assert (record.step, record.model_root) == (record.version, root_of(record.version))
        met += parts_without_version(store) > 0
    before = len(read_log(store).records)
    publish(store, epoch=times + 1, versions=before + 2)
    census = store_census.take(store, run_id=RUN, policy_id=POLICY)
    assert census.steps == list(range(before + 2))
    cold = Mirror(folder / "cold")
    cold.advance(store, read_log(store), target=before + 1)
    check_mirror(cold)
    check_added_paths(store)
    return met


def check_added_paths(store: FileStore) -> None:
    """Merged deltas and snapshots that were made beside the publisher lead to the versions' bits."""
    log = read_log(store)
    for version in [record.version for record in log.records if record.added]:
        assert not verify_version(store, log, version=version, threads=4).faults


@dataclass
class Met:
    """What kills of pullers were found to have done."""

    versions: set[int] = field(default_factory=set)
    applying: int = 0
    """Kills that left a change unfinished."""


def applying(folder: Path) -> bool:
    """Whether the mirror is in the middle of a change."""
    state = MirrorFiles(folder / "mirror").read_state()
    assert state is not None
    return state.applying is not None


def kill_pullers(folder: Path, *, times: int, seed: int) -> Met:
    """Kill one puller after the other over one mirror, every second one soon after it began to apply a change, and
    engines that load from it, while another engine loads all the time.
    """
    draw, store, met = random.Random(seed), FileStore(folder / "store"), Met()
    publish(store, epoch=1, versions=PULLED_VERSIONS)
    log = read_log(store)
    Mirror(folder / "mirror").advance(store, log, target=0)
    with loading(folder):
        for number in range(times):
            if number % 2:
                aimed_s = draw.random() * MAX_CHANGE_S
                kill_after(folder, "pull", seed + number, once=lambda: applying(folder), delay_s=aimed_s)
            else:
                kill_after(folder, "pull", seed + number, delay_s=draw.random() * MAX_DELAY_S)
            met.applying += applying(folder)
            mirror = Mirror(folder / "mirror")
            assert mirror.version is not None, "what was held is lost"
            assert mirror.counts.fetched_bytes == 0, "an opening needs no store"
            check_mirror(mirror)
            met.versions.add(mirror.version)
            if number % 3 == 0:
                mirror.advance(store, log, target=draw.randrange(PULLED_VERSIONS))
                check_mirror(mirror)
                kill_after(folder, "load", 0, delay_s=draw.random() * MAX_DELAY_S / 4)
                mirror.advance(store, log, target=draw.randrange(PULLED_VERSIONS))
                check_mirror(mirror)
    return met


@pytest.mark.ci
def test_publishers_killed_at_random_instants_leave_whole_versions_only(tmp_path: Path) -> None:
    kill_publishers(tmp_path, times=5, seed=1)


@pytest.mark.ci
def test_pullers_killed_at_random_instants_leave_a_whole_version(tmp_path: Path) -> None:
    assert len(kill_pullers(tmp_path, times=6, seed=2).versions) > 1


@pytest.mark.soak
def test_fifty_killed_publishers(tmp_path: Path) -> None:
    assert kill_publishers(tmp_path, times=50, seed=3) > 0, "no kill met an upload"


@pytest.mark.soak
def test_fifty_killed_pullers_and_engines_that_load(tmp_path: Path) -> None:
    met = kill_pullers(tmp_path, times=50, seed=4)
    assert len(met.versions) > 5
    assert met.applying > 5, "too few kills met a change"
