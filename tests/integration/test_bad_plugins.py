"""Plug-ins that raise: the run says which one and how, goes on without what it broke, and every account adds up."""

from pathlib import Path

import pytest

from astraflow.dataflow.v1 import admin_service_pb2
from astraflow.errors import PluginError
from support.broken_plugins import Data
from support.dataflow_world import World, until
from support.raas_node import local_node
from support.redis_content import redis_content

pytestmark = [pytest.mark.integration, pytest.mark.slow]


async def test_a_data_set_that_raises_stops_leasing_by_name_until_it_is_mended(world: World) -> None:
    Data.mended = False
    await world.create_run(dataset="support.broken_plugins:Data")
    trainer, node = await world.trainer(), await world.node()
    for lease in await node.lease(2):
        await node.complete(lease)

    async def waits() -> list[tuple[str, str]]:
        return [(wait.reason, wait.detail) for wait in (await world.status()).waits]

    async def is_told() -> bool:
        return any(reason == "dataset_failed" for reason, _ in await waits())

    await until(is_told)
    (detail,) = [text for reason, text in await waits() if reason == "dataset_failed"]
    for words in ("support.broken_plugins.Data.train", "index 2: OSError", "the disk with the tasks is gone"):
        assert words in detail, detail
    # What is there is trained on meanwhile.
    assert len((await trainer.train(1, base_version=0)).items) == 4
    assert (await world.status()).trajectories.conservation_error == 0
    Data.mended = True
    assert await node.lease(1)


async def test_a_filter_that_raises_drops_the_group_under_its_own_reason(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    await world.create_run(filters='["support.broken_plugins:Filter"]')
    await world.trainer()
    node = await world.node()
    await world.submit("t1")
    (lease,) = await node.lease()
    assert await node.complete(lease) == ["ACCEPTED", "ACCEPTED"]

    async def is_dropped() -> bool:
        return bool((await world.status()).trajectories.dropped)

    await until(is_dropped)
    account = (await world.status()).trajectories
    assert (dict(account.dropped), account.conservation_error) == ({"filter_failed": 2}, 0)
    assert "no reward was above zero" in capsys.readouterr().out


# Plug-ins of the node, the reason of the letter, the words of its detail, the tries it took.
ON_NODES: dict[str, tuple[dict[str, object], tuple[str, ...], int]] = {
    "reward raises": (
        {"reward": '"support.broken_plugins:Reward"'},
        ("KeyError", "'answer' (broken_plugins.py:", "in __call__)"),
        2,
    ),
    "reward is no number": ({"reward": '"support.broken_plugins:NotANumber"'}, ("nan_reward", "nan"), 1),
    "workflow raises": (
        {"workflow": '"support.broken_plugins:Workflow"'},
        ("RuntimeError", "the game server said no (broken_plugins.py:", "in run)"),
        2,
    ),
}


@pytest.mark.parametrize("row", ON_NODES)
async def test_a_task_no_node_can_finish_ends_as_a_letter_that_says_why(
    world: World, tmp_path: Path, row: str
) -> None:
    raas, words, tries = ON_NODES[row]
    await world.create_run(raas=raas, max_attempts=2)
    await world.trainer()
    await world.submit("t1")

    async def is_dead() -> bool:
        return (await world.status()).dead_letters == 1

    async with local_node(world.address, tmp_path):
        await until(is_dead)
    request = admin_service_pb2.ListDeadLettersRequest(run_id="run")
    (letter,) = (await world.client.call(world.client.admin.ListDeadLetters, request)).dead_letters
    assert (letter.task_id, letter.reason, letter.attempt) == ("t1", "workflow_error", tries)
    assert [word for word in words if word not in letter.detail] == [], letter.detail
    account = (await world.status()).trajectories
    assert (account.ingested, account.conservation_error) == (0, 0)


@pytest.mark.parametrize(
    ("plugin", "words"),
    [
        ("Unmakeable", ("cannot be made with", "no licence for the data")),
        ("Nothing", ("'support.broken_plugins' has no 'Nothing'", "Did you mean")),
        ("Reward", ("support.broken_plugins:Reward", "Dataset")),
    ],
)
async def test_a_run_whose_data_set_is_none_is_not_created(
    world: World, redis_url: str, plugin: str, words: tuple[str, ...]
) -> None:
    before = redis_content(redis_url)
    with pytest.raises(PluginError) as refused:
        await world.create_run(dataset=f"support.broken_plugins:{plugin}")
    assert [word for word in words if word not in refused.value.message] == [], refused.value.message
    assert redis_content(redis_url) == before
