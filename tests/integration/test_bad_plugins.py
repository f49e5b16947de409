"""Plug-ins that raise: the run says which one and how, goes on without what it broke, and every account adds up."""

from pathlib import Path

import pytest

from astraflow.errors import PluginError
from support.broken_plugins import Data
from support.dataflow_world import World
from support.raas_node import local_node
from support.redis_content import redis_content

pytestmark = [pytest.mark.integration, pytest.mark.slow]


async def test_a_data_set_that_raises_stops_leasing_by_name_until_it_is_mended(world: World) -> None:
    Data.mended = False
    trainer, node = await world.started(dataset="support.broken_plugins:Data")
    await node.work(2)
    await world.until(lambda status: "dataset_failed" in {wait.reason for wait in status.waits})
    wait = (await world.waits())["dataset_failed"]
    for words in ("support.broken_plugins.Data.train", "index 2: OSError", "the disk with the tasks is gone"):
        assert words in wait.detail, wait
    assert (wait.stage, wait.HasField("since_time"), wait.released_by != "") == ("lease", True, True)
    # What is there is trained on meanwhile.
    assert len((await trainer.train(1, base_version=0)).items) == 4
    await world.has_account()
    Data.mended = True
    assert await node.lease(1)
    await world.until(lambda status: "dataset_failed" not in {wait.reason for wait in status.waits})


async def test_a_data_set_whose_tasks_have_one_id_is_named(world: World) -> None:
    _, node = await world.started(dataset="support.broken_plugins:Repeats")
    await node.work()
    await world.until(lambda status: "dataset_failed" in {wait.reason for wait in status.waits})
    wait = (await world.waits())["dataset_failed"]
    for words in ("support.broken_plugins.Repeats.train gave task id 'train-0' again", "an id of its own"):
        assert words in wait.detail, wait


async def test_a_filter_that_raises_drops_the_group_under_its_own_reason(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    _, node = await world.started(filters='["support.broken_plugins:Filter"]')
    await world.submit("t1")
    await node.work()
    await world.until(lambda status: bool(status.trajectories.dropped))
    await world.has_account(dropped={"filter_failed": 2})
    assert "no reward was above zero" in capsys.readouterr().out


# Plug-ins of the node, the reason of the letter, the words of its detail, the tries it took.
ON_NODES: dict[str, tuple[dict[str, object], str, tuple[str, ...], int]] = {
    "reward raises": (
        {"reward": '"support.broken_plugins:Reward"'},
        "reward_error",
        ("KeyError", "'answer' (broken_plugins.py:", "in __call__)"),
        2,
    ),
    "reward raises in a worker": (
        {"reward": '"support.broken_plugins:Reward"', "reward_limits": "{processes: 1}"},
        "reward_error",
        ("KeyError", "'answer' (broken_plugins.py:", "in __call__)"),
        2,
    ),
    "reward is no number": (
        {"reward": '"support.broken_plugins:NotANumber"'},
        "reward_error",
        ("the reward returned nan; return a finite number", "(broken_plugins.py:", "in __call__)"),
        2,
    ),
    "workflow raises": (
        {"workflow": '"support.broken_plugins:Workflow"'},
        "workflow_error",
        ("RuntimeError", "the game server said no (broken_plugins.py:", "in run)"),
        2,
    ),
    "workflow ends its process": (
        {"workflow": '"support.broken_plugins:Exits"'},
        "workflow_error",
        ("SystemExit: no game server (broken_plugins.py:", "in run)"),
        2,
    ),
}


@pytest.mark.parametrize("row", ON_NODES)
async def test_a_task_no_node_can_finish_ends_as_a_letter_that_says_why(
    world: World, tmp_path: Path, row: str
) -> None:
    raas, reason, words, tries = ON_NODES[row]
    await world.create_run(raas=raas, max_attempts=2)
    await world.trainer()
    await world.submit("t1")
    async with local_node(world.address, tmp_path):
        await world.until(lambda status: status.dead_letters == 1)
    (letter,) = (await world.dead_letters()).dead_letters
    assert (letter.task_id, letter.reason, letter.attempt) == ("t1", reason, tries)
    assert [word for word in words if word not in letter.detail] == [], letter.detail
    await world.has_account(ingested=0)


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
