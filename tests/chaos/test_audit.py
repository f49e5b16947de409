"""The audit finds each kind of damage: what it passes is worth something only because of what it refuses."""

import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis

from astraflow_dataflow.store.keys import Keys
from support.audit import audit
from support.development import POLICY, RUN_ID, RunFiles, dev, finish, wait_for
from support.valkey import ValkeyServer

pytestmark = [pytest.mark.e2e, pytest.mark.ci, pytest.mark.timeout(240)]

KEYS = Keys(RUN_ID)
STEPS, TRAJECTORIES_PER_STEP = 3, 8
Damage = Callable[[RunFiles], None]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped after a few steps, with groups ready for the next one."""
    folder = tmp_path_factory.mktemp("ended")
    with dev(folder, "--steps", "1000") as launcher:
        wait_for(lambda: RunFiles(folder).steps_done() >= STEPS, what=f"step {STEPS}")
        launcher.send_signal(signal.SIGINT)
        finish(launcher, folder)
    return folder


def _in_redis(damage: Callable[[Any], object]) -> Damage:
    """Damage done by a client of the run's Redis."""

    def done(files: RunFiles) -> None:
        with ValkeyServer(files.data_dir / "redis") as server, redis.Redis(port=server.port) as client:
            damage(client)

    return done


def _lose_a_payload(client: Any) -> None:
    client.unlink(next(client.scan_iter(match=f"*{KEYS.of('payload', '*', '*').partition('}')[2]}")))


def _lose_a_group(client: Any) -> str:
    [group, *_] = client.zrange(KEYS.of("ready", POLICY), 0, -1)
    client.zrem(KEYS.of("ready", POLICY), group)
    return str(group.decode())


def _lose_a_group_and_count_it_nowhere(client: Any) -> None:
    group = client.hgetall(KEYS.of("group", _lose_a_group(client)))
    client.hdel(KEYS.of("owners"), *group[b"ids"].split(b"\n"))
    for counter in ("ingested", "ready"):
        client.hincrby(KEYS.of("counters"), counter, -int(group[b"n"]))


def _forget_a_step(client: Any) -> None:
    [first, *_] = client.xrange(KEYS.of("consumed", POLICY))
    client.xdel(KEYS.of("consumed", POLICY), first[0])


def _train_twice(files: RunFiles) -> None:
    path = files.data_dir / "work" / f"trainer-{POLICY}" / "ledger.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[2]["trajectory_ids"][0] = lines[0]["trajectory_ids"][0]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def _tear_a_part(files: RunFiles) -> None:
    part = next((files.data_dir / "store").rglob("*.afwd"))
    data = bytearray(part.read_bytes())
    data[len(data) // 2] ^= 1
    part.chmod(0o644)
    part.write_bytes(data)


def test_a_run_without_faults_passes(ended: Path) -> None:
    found = audit(ended)
    assert found.violations == []
    assert found.figures["steps"] >= STEPS
    assert found.figures["trained"] == found.figures["steps"] * TRAJECTORIES_PER_STEP
    assert found.figures["held"] > 0


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_in_redis(_lose_a_payload), "without a payload"),
        (_in_redis(_lose_a_group), "conservation error"),
        (_in_redis(_lose_a_group_and_count_it_nowhere), "dropped after they were kept"),
        (_in_redis(_forget_a_step), "committed steps are not 1, 2, 3"),
        (_train_twice, "trained twice"),
        (_tear_a_part, "the store"),
    ],
)
def test_damage_is_named(ended: Path, tmp_path: Path, damage: Damage, words: str) -> None:
    shutil.copytree(ended, tmp_path / "copy")
    damage(RunFiles(tmp_path / "copy"))
    assert any(words in violation for violation in audit(tmp_path / "copy").violations)
