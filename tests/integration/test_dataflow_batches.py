"""Batches: bound to one step, fenced by epochs, given again as they were, released when durable."""

import asyncio
import hashlib
from dataclasses import replace

import pytest

from astraflow import errors
from astraflow.dataflow.v1.batch_service_pb2 import BATCH_STAGE_INTENT as INTENT
from astraflow.dataflow.v1.batch_service_pb2 import BATCH_STAGE_SKIPPED as SKIPPED
from astraflow.dataflow.v1.batch_service_pb2 import BATCH_STAGE_TRAINED as TRAINED
from astraflow_kit.identity.sealing import claimed_session, issue
from support.dataflow_world import World, served, until_equal


async def test_the_same_step_always_returns_the_same_batch_with_the_digest_of_its_ids(world: World) -> None:
    trainer, _, batch = await world.bound(groups=4)
    assert (await trainer.acquire(1)).batch == batch
    assert len({item.task_id for item in batch.items}) == 2
    lines = "".join(f"{item.trajectory_id}\n" for item in batch.items)
    assert batch.digest == hashlib.sha256(lines.encode()).digest()


async def test_a_newer_epoch_gets_the_same_batch(world: World) -> None:
    trainer, _, batch = await world.bound()
    await trainer.ack(batch, INTENT)
    again = await (await world.trainer()).acquire(1)
    assert (again.batch, again.stage) == (batch, INTENT)


async def test_payloads_come_back_byte_for_byte_in_the_order_asked(world: World) -> None:
    trainer, node = await world.started(dataset="Counting")
    (lease, other) = await node.lease(2)
    episodes = [node.episode(lease, 0), node.episode(lease, 1, num_response=40)]
    for episode in episodes:
        await node.push(episode)
    await node.complete(other)
    batch = (await trainer.acquire(1)).batch
    wanted = [episode.trajectories[0].header.trajectory_id for episode in reversed(episodes)]
    found = await trainer.fetch(1, *wanted)
    assert [item.trajectory_id for item in found] == wanted
    assert [item.body for item in found] == [episode.trajectories[0].body for episode in reversed(episodes)]
    assert len(await trainer.fetch(1)) == len(batch.items)


async def test_payloads_come_in_packs_of_the_bytes_asked_for(world: World) -> None:
    trainer, _, batch = await world.bound()
    alone = await trainer.fetch(1)
    size = len(alone[0].body)
    packs = await trainer.fetch(1, pack_bytes=size + 1)
    packed = [(item.trajectory_id, item.body) for pack in packs for item in pack.trajectories]
    assert packed == [(item.trajectory_id, item.body) for item in alone]
    assert [len(pack.trajectories) for pack in packs] == [2] * (len(alone) // 2) + [1] * (len(alone) % 2)
    (whole,) = await trainer.fetch(1, pack_bytes=2**24)
    assert len(whole.trajectories) == len(batch.items)
    assert (whole.trajectory_id, whole.body) == ("", b"")


async def test_groups_are_taken_in_the_order_of_their_staleness_deadline(world: World) -> None:
    trainer, node = await world.started(dataset="Counting", max_staleness=8, groups_per_step=2)
    old = await node.lease(4)
    await node.work(2)
    await trainer.train(1, base_version=0)
    await node.work(2, version=1)
    await node.complete_all(old[:2])
    batch = (await trainer.acquire(2, base_version=1)).batch
    # Two groups of version 1 arrived before two groups of version 0: the older version goes first.
    assert {item.min_version for item in batch.items} == {0}


async def test_groups_too_old_for_the_step_are_dropped_as_stale_and_free_their_payloads(world: World) -> None:
    trainer, node = await world.started(dataset="Counting", max_staleness=1)
    old = await node.lease(4)
    await node.complete_all(old[:2])
    await trainer.train(1, base_version=0)
    await node.work(2, version=1)
    await trainer.train(2, base_version=1)
    await node.complete_all(old[2:])
    reply = await trainer.acquire(3, base_version=2, wait_s=0)
    assert (reply.HasField("batch"), reply.waiting_for) == (False, "ready_groups")
    await world.has_account(dropped={"stale": 4}, ready=0)
    assert await count_keys(world, "payload:") == 8  # steps 1 and 2 are retained, the stale ones are gone


MASK = {"stale_tokens": "{correction: mask}"}
REWEIGHT = {"stale_tokens": "{correction: reweight, max_excess: 1}"}


@pytest.mark.parametrize(("correction", "last_base"), [({}, 1), (MASK, 2), (REWEIGHT, 2)])
@pytest.mark.parametrize("later", [0, 1])
async def test_where_stale_tokens_are_corrected_a_group_stays_while_it_has_what_the_correction_needs(
    world: World, correction: dict[str, object], last_base: int, later: int
) -> None:
    trainer, node = await world.started(dataset="Counting", max_staleness=1, **correction)
    slow = await node.lease(2)
    base = last_base + later
    for version in range(base):
        await node.work(2, version=version)
        await trainer.train(version + 1, base_version=version)
    await node.complete_all(slow, version=0, swapped_to=1)
    reply = await trainer.acquire(base + 1, base_version=base, wait_s=0)
    assert reply.HasField("batch") is not bool(later)
    await world.has_account(dropped={"stale": 4} if later else {})


async def count_keys(world: World, kind: str) -> int:
    """Keys of one kind in Redis."""
    keys = await world.dataflow.connection.raw("KEYS", f"af:{{run}}:{kind}*".replace("{", "[{]"))
    return len(keys)  # type: ignore[arg-type]


async def test_staleness_is_judged_against_the_version_the_step_starts_from(world: World) -> None:
    trainer, _, batch = await world.bound(groups=4)
    await trainer.ack(batch, TRAINED)
    await trainer.publish(version=1, step=1)
    assert len((await trainer.acquire(2, base_version=1)).batch.items) == 4
    staleness = (await world.status()).policies[0].staleness
    assert (staleness.p50, staleness.p99, staleness.max) == (0, 1, 1)


async def test_a_returned_batch_keeps_the_place_of_its_groups(world: World) -> None:
    trainer, _, first = await world.bound(groups=4)
    assert await trainer.nack(1) == 2
    assert await trainer.nack(1) == 0
    again = (await trainer.acquire(1)).batch
    assert again.items == first.items
    assert again.batch_id != first.batch_id
    with pytest.raises(errors.NotFoundError, match="not bound"):
        await trainer.ack(first, TRAINED)


async def test_stages_only_move_forward_and_a_trained_batch_cannot_be_given_back(world: World) -> None:
    trainer, _, batch = await world.bound()
    told = [await trainer.ack(batch, stage) for stage in (INTENT, TRAINED, TRAINED, INTENT)]
    assert told == [INTENT, TRAINED, TRAINED, TRAINED]
    with pytest.raises(errors.ConflictError):
        await trainer.ack(batch, SKIPPED)
    with pytest.raises(errors.PreconditionError):
        await trainer.nack(1)
    await world.has_account(trained=4, in_batch=0)


async def test_a_skipped_step_publishes_no_version_and_frees_the_window(world: World) -> None:
    trainer, node, batch = await world.bound(max_staleness=0)
    assert (await node.lease_reply()).waiting_for == "staleness_window"
    await trainer.ack(batch, SKIPPED)
    with pytest.raises(errors.InvalidArgumentError, match="skipped"):
        await trainer.publish(version=1, step=1)
    assert len(await node.lease(2)) == 2
    await world.has_account(dropped={"skipped": 4})


async def test_only_the_next_step_can_be_bound(world: World) -> None:
    trainer, node = await world.started(dataset="Counting")
    await node.make_ready(4)
    with pytest.raises(errors.InvalidArgumentError, match="ask for 1"):
        await trainer.acquire(2)
    with pytest.raises(errors.InvalidArgumentError, match="counted from 1"):
        await trainer.acquire(0)


async def test_a_waiting_acquire_wakes_when_the_last_group_is_complete(world: World) -> None:
    trainer, node = await world.started(dataset="Counting")
    waiting = asyncio.create_task(trainer.acquire(1, wait_s=20))
    await asyncio.sleep(0.1)
    await node.make_ready(2)
    assert (await waiting).HasField("batch")


async def test_a_trainer_too_far_ahead_of_its_versions_waits_for_publish(world: World) -> None:
    trainer, node = await world.started(dataset="Counting")
    await node.make_ready(4)
    reply = await trainer.acquire(1, base_version=2, wait_s=0)
    assert (reply.HasField("batch"), reply.waiting_for) == (False, "publish")
    assert (await world.waits())["publish"].stage == "publish"
    assert (await trainer.acquire(1, base_version=1, wait_s=0)).HasField("batch")


async def test_a_step_is_replayed_verbatim_until_it_is_durable(world: World) -> None:
    trainer, node = await world.started(dataset="Counting")
    await node.make_ready(2)
    first = await trainer.train(1, base_version=0)
    await node.make_ready(2, version=1)
    second = await trainer.train(2, base_version=1)
    assert await trainer.mark_durable(1) in (0, 4)  # the run loop releases too, and may be first
    assert await trainer.mark_durable(1) == 0
    successor = await world.trainer()
    claim = await successor.claim()
    assert (claim.last_finished_step, claim.last_durable_step, claim.version) == (2, 1, 2)
    replay = await successor.acquire(2, base_version=1)
    assert (replay.batch, replay.stage) == (second, TRAINED)
    assert len(await successor.fetch(2)) == 4
    with pytest.raises(errors.NotFoundError, match="not retained"):
        await successor.acquire(1)
    assert first.digest != second.digest
    await world.has_account(ingested=8, trained=8)


async def test_durability_moves_neither_back_nor_ahead_and_leaves_nothing_of_a_step(world: World) -> None:
    trainer, node = await world.started(dataset="Counting")
    await node.make_ready(2)
    await trainer.train(1, base_version=0)
    with pytest.raises(errors.InvalidArgumentError, match="last finished step is 1"):
        await trainer.mark_durable(2)
    await trainer.mark_durable(1)
    await trainer.mark_durable(0)
    assert (await trainer.claim()).last_durable_step == 1
    for kind in ("payload:", "group:", "batch:"):
        assert await count_keys(world, kind) == 0, kind
    assert await world.dataflow.connection.raw("HLEN", "af:{run}:owners") == 0


async def test_an_expired_batch_lease_raises_an_alarm_and_unbinds_nothing(
    redis_url: str, tmp_path: object
) -> None:
    async with served(redis_url, tmp_path, batch_lease_s=1) as world:  # type: ignore[arg-type]
        trainer, node = await world.started(dataset="Counting")
        await node.make_ready(2)
        batch = (await trainer.acquire(1)).batch

        async def late() -> frozenset[str]:
            return (await world.dataflow.store.batches.pending("run")).late_batches

        await until_equal(late, {batch.batch_id})
        assert (await trainer.acquire(1)).batch == batch
        assert not await late()


async def test_the_window_closes_at_equation_5_1_and_opens_on_publish(world: World) -> None:
    trainer, node = await world.started(dataset="Counting", max_staleness=1, groups_per_step=2)
    leases = await node.lease(16)
    assert len(leases) == 4  # (1 + 1) · 2
    await node.complete_all(leases[:2])
    assert (await node.lease_reply()).waiting_for == "staleness_window"  # 2 outstanding + 2 ready
    batch = (await trainer.acquire(1)).batch
    assert (await node.lease_reply()).waiting_for == "staleness_window"  # 2 outstanding + 2 unpublished
    await trainer.ack(batch, TRAINED)
    assert (await node.lease_reply()).waiting_for == "staleness_window"
    await trainer.publish(version=1, step=1)
    assert len(await node.lease(16)) == 2


async def test_a_claim_is_above_every_epoch_the_trainer_knows_of_and_names_redis_life(world: World) -> None:
    trainer, _ = await world.started()
    assert (await trainer.claim(known_epoch=7)).trainer_epoch == 8
    claim = await trainer.claim(known_epoch=3)
    assert claim.trainer_epoch == 9
    assert claim.data_incarnation == await world.dataflow.connection.data_incarnation()


async def test_a_trainer_claims_again_only_when_no_other_has_a_newer_epoch(world: World) -> None:
    trainer, _ = await world.started()
    held, credential = trainer.epoch, trainer.credential
    assert (await trainer.claim(held_epoch=held)).trainer_epoch == held + 1
    # The answer of that claim got lost: the same trainer may repeat it.
    trainer.credential = credential
    assert (await trainer.claim(held_epoch=held)).trainer_epoch == held + 2
    # Redis lost the claims: what the trainer holds is newer than what Redis knows.
    claimed = claimed_session(credential)
    assert claimed is not None
    key = await world.dataflow.registry.seal_key(world.run_id)
    trainer.credential = issue(replace(claimed, number=held + 5), key=key)
    assert (await trainer.claim(held_epoch=held + 5)).trainer_epoch == held + 6
    trainer.credential = credential
    with pytest.raises(errors.FencedError, match="of trainer test"):
        await trainer.claim(trainer_id="frozen", held_epoch=held)
    with pytest.raises(errors.PermissionError_, match="with the credential of that epoch"):
        await trainer.claim(held_epoch=held + 6)
    assert (await world.status()).policies[0].trainer_epoch == held + 6
