"""Tasks in a shell as an environment: tools or texts, an end that is graded, and failures that cost one episode."""

import json
import shutil
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from astraflow.errors import RecipeError
from astraflow.plugins import Message, MissingCapability, Observation, TaskSpec, ToolCall
from astraflow_environment.adapters.terminal import Terminal
from astraflow_environment.terminal import sandbox
from support.sandbox import needs_bubblewrap

FILES = {
    "task.toml": "[verifier]\ntimeout_sec = 1\n",
    "instruction.md": "Write 1 into out.",
    "environment/Dockerfile": "FROM debian\nWORKDIR /srv/w\n",
    "tests/test.sh": "cat /srv/w/out > /logs/verifier/reward.txt\n",
}
DONE = Message("assistant", "Done.")


def task(**changed: str) -> TaskSpec:
    return TaskSpec(
        "t",
        (),
        {"task": "t", "files": FILES | {name.replace("__", "/"): text for name, text in changed.items()}},
    )


def calls(*commands: str) -> Message:
    made = [ToolCall(str(at), "run", json.dumps({"command": each})) for at, each in enumerate(commands)]
    return Message("assistant", "", tool_calls=tuple(made))


@asynccontextmanager
async def playing(given: TaskSpec | None = None, **settings: object) -> AsyncIterator[Terminal]:
    environment = Terminal(**settings)  # type: ignore[arg-type]
    try:
        seen = await environment.reset(given or task())
        assert [tool.name for tool in seen.tools] == ([] if settings.get("calls") == "text" else ["run"])
        yield environment
    finally:
        await environment.close()


def texts(seen: Observation) -> list[str]:
    return [message.content for message in seen.messages]


@needs_bubblewrap
async def test_the_assistant_calls_a_tool_and_is_graded_when_it_calls_none() -> None:
    async with playing() as terminal:
        seen = await terminal.step(calls("pwd; cd /tmp", "pwd; false", "echo 0.5 > /srv/w/out"))
        assert texts(seen) == ["/srv/w", "/tmp\n(exit status 1)", "(no output)"]
        assert (seen.done, seen.reward) == (False, 0.0)
        seen = await terminal.step(DONE)
        assert (seen.done, seen.reward, seen.metrics["commands"], seen.metrics["graded"]) == (True, 0.5, 3, 1)


@needs_bubblewrap
async def test_texts_are_commands_and_exit_is_the_end() -> None:
    async with playing(calls="text") as terminal:
        assert texts(await terminal.step(Message("assistant", " echo 1 > out\n"))) == ["(no output)"]
        seen = await terminal.step(Message("assistant", "exit"))
        assert (seen.done, seen.reward) == (True, 1.0)


@needs_bubblewrap
@pytest.mark.parametrize(
    ("given", "settings"),
    [(task(), {"max_turns": 1}), (task(**{"task.toml": "[agent]\ntimeout_sec = 0.2\n"}), {})],
)
async def test_the_last_turn_and_the_end_of_the_time_are_graded_too(
    given: TaskSpec, settings: Mapping[str, int]
) -> None:
    async with playing(given, **settings) as terminal:
        seen = await terminal.step(calls("echo 1 > out; sleep 0.3"))
        assert (seen.done, seen.reward) == (True, 1.0)


@needs_bubblewrap
@pytest.mark.parametrize(
    ("test", "metric"),
    [
        ("sleep 60", "grader_timeout"),
        ("exit 1", "grader_failed"),
        ("echo much > /logs/verifier/reward.txt", "grader_failed"),
    ],
)
async def test_tests_that_give_no_reward_cost_this_episode_only(test: str, metric: str) -> None:
    async with playing(task(tests__test_sh="")) as terminal:
        assert (await terminal.step(DONE)).metrics["grader_failed"] == 1
    async with playing(
        TaskSpec("t", (), {"task": "t", "files": FILES | {"tests/test.sh": test}})
    ) as terminal:
        seen = await terminal.step(DONE)
        assert (seen.done, seen.reward, seen.metrics[metric]) == (True, 0.0, 1.0)
    async with playing() as terminal:
        await terminal.step(calls("echo 1 > out"))
        assert (await terminal.step(DONE)).reward == 1.0


@needs_bubblewrap
async def test_a_sandbox_that_dies_is_an_episode_without_a_reward() -> None:
    async with playing(calls="text") as terminal:
        assert terminal._sandbox is not None
        await terminal._sandbox.close()
        seen = await terminal.step(Message("assistant", "pwd"))
        assert (seen.done, seen.reward, seen.metrics["sandbox_died"]) == (True, 0.0, 1.0)


@needs_bubblewrap
@pytest.mark.parametrize("mode", ["text", "tools"])
async def test_a_policy_that_breaks_its_shell_ends_its_episode_without_a_reward(mode: str) -> None:
    async with playing(calls=mode) as terminal:
        for command, done in (("echo 1 > out; rm /bin; exit 0;", False), ("echo hi", True)):
            said = Message("assistant", command) if mode == "text" else calls(command)
            seen = await terminal.step(said)
            assert (seen.done, seen.reward, seen.metrics["sandbox_died"]) == (done, 0.0, float(done))


@needs_bubblewrap
async def test_a_command_that_is_no_text_is_run_all_the_same() -> None:
    async with playing() as terminal:
        assert texts(await terminal.step(calls("echo '\ud800'; echo 1"))) == ["?\n1"]


@needs_bubblewrap
async def test_a_task_is_read_from_the_folder_that_the_environment_has(tmp_path: Path) -> None:
    for name, text in FILES.items():
        (tmp_path / "one" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "one" / name).write_text(text)
    named = TaskSpec("t", (), {"task": "one"})
    async with playing(named, folder=tmp_path) as terminal:
        assert texts(await terminal.step(calls("pwd"))) == ["/srv/w"]
    for given, settings, kind, words in (
        (named, {}, MissingCapability, "no folder of tasks"),
        (TaskSpec("t", (), {"task": "two"}), {"folder": tmp_path}, MissingCapability, "no task 'two' in"),
        (task(**{"task.toml": "x"}), {}, RecipeError, "task t/task.toml:1: not TOML"),
    ):
        with pytest.raises(kind, match=words):
            async with playing(given, **settings):
                pass


def test_without_bubblewrap_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox.require_sandbox.cache_clear()
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(MissingCapability, match="apt install bubblewrap"):
        Terminal()
