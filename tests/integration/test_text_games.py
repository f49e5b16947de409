"""TextWorld and ALFWorld, real games in worker processes of an environment of their own (`make text-games-env`)."""

import asyncio
import gzip
import json
import os
from pathlib import Path

import pytest

from astraflow.client import AsyncClient
from astraflow.plugins import Message, MissingCapability, TaskSpec
from astraflow_raas.environments.remote import RemoteEnvironment
from support.environments import served_environment
from support.source_tree import REPOSITORY

VENV = REPOSITORY / ".venv-env"
GAMES = os.environ.get("ALFWORLD_GAMES", "")

pytestmark = [
    pytest.mark.ci,
    pytest.mark.skipif(not (VENV / "bin" / "tw-make").exists(), reason="run `make text-games-env`"),
]
ADAPTER = "astraflow_environment.adapters.text_games"


async def test_a_game_made_by_tw_make_is_won_by_its_walkthrough(tmp_path: Path) -> None:
    game = tmp_path / "game.z8"
    options = ("--quest-length", "3", "--seed", "7", "--output", str(game))
    making = await asyncio.create_subprocess_exec(VENV / "bin" / "tw-make", "custom", *options)
    assert await making.wait() == 0
    walkthrough = json.loads(game.with_suffix(".json").read_text())["metadata"]["walkthrough"]
    use, python = f"{ADAPTER}:TextWorld", VENV / "bin" / "python"
    async with (
        served_environment(tmp_path, use=use, python=python, games=str(tmp_path)) as service,
        AsyncClient(service.address) as client,
    ):
        play = RemoteEnvironment(client, name="TextWorld", turn_timeout_s=60.0)
        seen = await play.reset(TaskSpec("t1", (), {"game": "game.z8"}))
        assert "Commands: " in seen.messages[0].content
        played = [await play.step(Message("assistant", f"> {command}")) for command in walkthrough]
        assert (played[-1].done, played[-1].metrics["won"]) == (True, 1.0)
        assert sum(each.reward for each in played) == pytest.approx(1.0)
        await play.close()
        other = RemoteEnvironment(client, name="TextWorld", turn_timeout_s=60.0)
        with pytest.raises(MissingCapability, match=r"no game '\.\./secret\.z8' below"):
            await other.reset(TaskSpec("t2", (), {"game": "../secret.z8"}))


@pytest.mark.skipif(not GAMES, reason="set ALFWORLD_GAMES to a JSON lines file of games")
async def test_an_alfworld_game_is_won_by_its_walkthrough(tmp_path: Path) -> None:
    with gzip.open(GAMES, "rt") as lines:
        row = json.loads(lines.readline())
    use, python = f"{ADAPTER}:AlfWorld", VENV / "bin" / "python"
    async with (
        served_environment(tmp_path, use=use, python=python, games=GAMES) as service,
        AsyncClient(service.address) as client,
    ):
        play = RemoteEnvironment(client, name="AlfWorld", turn_timeout_s=60.0)
        assert row["task"] in (await play.reset(TaskSpec("t1", (), {"game": row["id"]}))).messages[0].content
        played = [await play.step(Message("assistant", command)) for command in row["walkthrough"]]
        assert [each.reward for each in played] == [0.0] * (len(played) - 1) + [1.0]
        await play.close()
