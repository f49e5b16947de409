"""Tasks in a shell, by scripted policies: in Harbor's layout with tools, and the generated ones of the small size."""

import json
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import pytest

from astraflow.errors import PluginError
from support.agents import whole_text
from support.recipes import played, recipe_code
from support.sandbox import needs_bubblewrap

recipe = recipe_code("terminal")
USE = "astraflow_environment.adapters.terminal:Terminal"
HERE = f"raas.workflow.with.environment={{{{use: '{USE}', with: {{}}}}}}"
"""The environment in this process, with these settings."""


def written(folder: Path, names: list[str]) -> Path:
    """Tasks of the small size as folders."""
    for number, name in enumerate(names):
        for path, text in recipe.folder("ant", "bee", 20 + number).items():
            (folder / name / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / name / path).write_text(text)
    return folder


def tool_calls(commands: list[str]) -> Callable[[str], str]:
    """Calls the tool with one command a turn, then none."""
    said = [
        f"<tool_call>{json.dumps({'name': 'run', 'arguments': {'command': each}})}</tool_call>"
        for each in commands
    ]
    turns = iter([*said, "It is done."])
    return lambda _: next(turns)


@needs_bubblewrap
async def test_solutions_of_a_folder_earn_1_by_its_own_tests_and_what_leaves_the_task_undone_0(
    tmp_path: Path,
) -> None:
    tasks, kept = written(tmp_path / "train", ["one", "two"]), written(tmp_path / "kept", ["three"])
    folders = f"{{folder: '{tasks}', heldout: '{kept}'}}"
    data = f"run.dataset.with={folders}"
    async with played("terminal", data, HERE.format(folders), scratch=tmp_path) as terminal:
        trained = terminal.dataset.train(0)
        assert trained is not None
        solution = (tasks / trained.data["task"] / "solution" / "solve.sh").read_text().splitlines()
        assert (await terminal.episode(trained, agent=tool_calls(solution))).trajectories[0].reward == 1.0
        task = terminal.dataset.heldout(0)
        assert task is not None
        assert (task.data["task"], task.messages[0].content) == ("three", "Copy ant to bee.")
        solution = (kept / "three" / "solution" / "solve.sh").read_text().splitlines()
        for commands, reward in ((solution, 1.0), (["echo 99 > bee"], 0.0), ([], 0.0)):
            episode = await terminal.episode(task, agent=tool_calls(commands))
            (trajectory,) = episode.trajectories
            assert (trajectory.policy, trajectory.reward, trajectory.finish_reason) == (
                "agent",
                reward,
                "done",
            )
            assert episode.metrics["environment.commands"] == len(commands)
            assert "<tool run>" in whole_text(trajectory)


@needs_bubblewrap
async def test_at_small_size_who_looks_earns_1_and_who_guesses_does_not(tmp_path: Path) -> None:
    room = "raas.workflow.with.max_tokens=1024"  # a scripted policy has a token a character
    async with played("terminal/small.yaml", room, scratch=tmp_path) as terminal:
        task = terminal.dataset.heldout(0)
        assert task is not None
        look, write = task.data["files"]["solution/solve.sh"].splitlines()
        for said, reward in (
            ((look, write, "exit"), 1.0),
            (("echo 1 > x", "exit"), 0.0),
            ((write, "pwd") * 2, 1.0),
        ):
            turns = iter(said)
            episode = await terminal.episode(task, agent=lambda _, turns=turns: next(turns))
            assert episode.trajectories[0].reward == reward


def test_no_names_that_are_held_out_are_trained_on_or_demonstrated() -> None:
    copies = recipe.Copies(seed=1)
    trained = {copies.train(index).messages[0].content for index in range(1000)}
    shown = {each.messages[0].content for each in islice(recipe.demonstrations(1), 2000)}
    held_out = {copies.heldout(index).messages[0].content for index in range(500)}
    assert not held_out & (trained | shown)


def test_half_of_the_demonstrations_look_first() -> None:
    first = [each.completion for each in islice(recipe.demonstrations(1), 1000) if len(each.messages) == 1]
    looks = sum(said.startswith("cat ") for said in first)
    assert 0.4 < looks / len(first) < 0.6


@needs_bubblewrap
async def test_a_missing_folder_and_a_malformed_task_are_named(tmp_path: Path) -> None:
    tasks = written(tmp_path / "tasks", ["one"])
    (tasks / "one" / "task.toml").write_text("[agent]\ntimeout_sec = 'x'\n")
    for folder, words in (
        (tmp_path / "none", "run.dataset.with.folder=FOLDER"),
        (tasks, "one/task.toml:2: agent.timeout"),
    ):
        here = HERE.format(f"{{folder: '{folder}'}}")
        with pytest.raises(PluginError) as caught:
            async with played("terminal", f"run.dataset.with.folder={folder}", here, scratch=tmp_path):
                pass
        assert words in caught.value.message
