"""A Redis that lost its last second: the trainer tells it what it forgot, or goes back to what it still knows.

A real Valkey is killed and the tail of its append-only file cut to where it stood at a moment of the trainer, as
a power loss would; server and trainer are real.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from astraflow.client import RetryPolicy
from astraflow.dataflow.v1 import run_pb2, version_service_pb2
from astraflow_kit import failpoints, lifecycle
from support import dataflow_process, ledger_audit, scripted_dataflow
from support import trainer_process as trainers
from support.dataflow_world import World
from support.trainer_process import TrainerProcess, forking
from support.valkey import ValkeyServer

__all__ = ["forking"]

STEPS = 3
PATIENT = RetryPolicy(total_s=60)
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def lose_all_after(server: ValkeyServer, *, size: int) -> None:
    """Kill the server, cut its file to `size` bytes, start it again."""
    server.kill()
    assert server.log_bytes > size, "nothing to lose"
    server.truncate_log(size)
    server.start()


async def size_once_settled(server: ValkeyServer) -> int:
    """Size of the file when the server has written out what it answered."""
    await asyncio.sleep(1.5)
    return server.log_bytes


async def announced(world: World) -> list[int]:
    """Announced versions, oldest first."""
    request = version_service_pb2.ListVersionsRequest(run_id=world.run_id, policy_id=trainers.POLICY)
    response = await world.client.call(world.client.versions.ListVersions, request, retry=PATIENT)
    return [version.version for version in reversed(response.versions)]


@dataclass
class Scene:
    """A run over a Redis that will lose its tail, and its trainers."""

    redis: ValkeyServer
    world: World
    run: run_pb2.Run
    trainer: TrainerProcess
    successor: TrainerProcess
    recording: asyncio.Task[None]

    async def require_whole(self, *ledgers: Path) -> None:
        """Everything is announced, trained once and counted once."""
        assert await announced(self.world) == list(range(STEPS + 1))
        assert trainers.census_of(self.run).steps == list(range(STEPS + 1))
        assert ledger_audit.audit(*ledgers, redis_lost_data=True).last_step == STEPS
        await trainers.require_trained(self.world, steps=STEPS)


@pytest.fixture
async def scene(own_valkey: ValkeyServer, tmp_path: Path) -> AsyncIterator[Scene]:
    """Nothing is started but Redis and the server."""
    server = dataflow_process.DataflowProcess(own_valkey.url, tmp_path)
    server.start()
    both = [TrainerProcess(server.address, tmp_path, name=name) for name in ("trainer", "successor")]
    try:
        async with server.world(retry_s=60) as world:
            run = await trainers.create_run(world, folder=tmp_path, steps=STEPS, checkpoint_every_steps=STEPS)
            pushing = trainers.push_groups(world, count=STEPS * trainers.GROUPS_PER_STEP)
            recording = asyncio.create_task(pushing)
            yield Scene(own_valkey, world, run, *both, recording)
            recording.cancel()
    finally:
        for trainer in both:
            trainer.kill()
        server.kill()


@pytest.mark.parametrize(
    ("before", "after", "goes_back"),
    [
        # What happens between the two moments is lost: an announcement; the end of a step and more.
        ("trainer.committed@4", "trainer.announced@4", False),
        pytest.param("trainer.step_taken@2", "trainer.announced@3", True, marks=pytest.mark.ci),
    ],
)
async def test_what_redis_forgot_is_told_again_or_done_again(
    scene: Scene, before: str, after: str, goes_back: bool
) -> None:
    scene.trainer.start(failpoints=";".join(moment.replace("@", "=stop@") for moment in (before, after)))
    await scene.trainer.frozen()
    await scene.recording
    size = await size_once_settled(scene.redis)
    scene.trainer.go_on()
    await hits(scene.trainer, 2)
    lose_all_after(scene.redis, size=size)
    scene.trainer.go_on()
    await scene.trainer.exits_with(0)
    await scene.require_whole(scene.trainer.ledger)
    assert ("trainer.redis_lost_data" in scene.trainer.log) is goes_back


async def lose_its_claim(scene: Scene) -> None:
    """Freeze a second life of the trainer, in the first step after its claim, and lose everything from the claim on."""
    scene.trainer.start(failpoints="trainer.intent_recorded=stop@1")
    await scene.trainer.frozen()
    await scene.recording
    scene.trainer.kill()
    size = await size_once_settled(scene.redis)
    scene.trainer.start(failpoints="trainer.intent_recorded=stop@2")
    await hits(scene.trainer, 2)
    lose_all_after(scene.redis, size=size)


@pytest.mark.ci
async def test_a_trainer_whose_claim_was_lost_claims_again(scene: Scene) -> None:
    await lose_its_claim(scene)
    scene.trainer.go_on()
    await scene.trainer.exits_with(0)
    await scene.require_whole(scene.trainer.ledger)
    assert (await scene.world.status()).policies[0].trainer_epoch > 2
    assert "trainer.redis_lost_data" in scene.trainer.log


@pytest.mark.ci
async def test_a_trainer_whose_claim_was_lost_stops_when_another_has_claimed_since(scene: Scene) -> None:
    await lose_its_claim(scene)
    await scene.successor.lives()
    scene.trainer.go_on()
    await scene.trainer.exits_with(lifecycle.ExitCode.SUPERSEDED)
    await scene.require_whole(scene.successor.ledger)
    assert (await scene.world.status()).policies[0].trainer_epoch > 2


async def hits(trainer: TrainerProcess, number: int) -> None:
    """Wait until so many failpoints acted, and the last froze it."""

    def acted() -> bool:
        return sum(hit.acted for hit in failpoints.read_hits(trainer.failpoints_log)) >= number

    await scripted_dataflow.eventually(acted, what=f"{number} failpoints acted", patience_s=120)
    await trainer.frozen()
