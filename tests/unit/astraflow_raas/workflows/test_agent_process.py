"""An agent's program gets its task, its calls become the episode, and whatever it does costs one attempt."""

import asyncio
import os
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from astraflow.plugins import Episode, Message, MissingCapability, Score, TaskSpec, Workflow
from astraflow_kit.plugins import mismatch
from astraflow_raas.agents.calls import AgentFlooded
from astraflow_raas.agents.program import AgentFailed
from astraflow_raas.workflows import agent_process
from astraflow_raas.workflows.agent_process import AgentProcess, AgentProcessSettings
from support.agents import ScriptedPolicy, serving_agents, trained_text
from support.marked import alive_with
from support.sandbox import needs_bubblewrap
from support.scripted_dataflow import eventually

pytestmark = needs_bubblewrap
WALLED = pytest.mark.parametrize("is_walled", [True, False])
TASK = TaskSpec("t1", (Message("user", "3 + 4?"),), {"answer": "7", "hint": "add"})
# The standard library alone: `openai` takes a second to import.
ASK = """
import json, os, sys, urllib.request

task = json.load(open(os.environ["ASTRAFLOW_TASK"]))

def ask(*messages, key=os.environ["OPENAI_API_KEY"], **fields):
    body = json.dumps({"model": "solver", "messages": messages, **fields}).encode()
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body)
    request.add_header("authorization", "Bearer " + key)
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]

def report(**result):
    json.dump(result, open(os.environ["ASTRAFLOW_RESULT"], "w"))
"""


async def judged(task: TaskSpec, completion: str, *, policies: object = None) -> Score:
    return Score(float(completion == task.data["answer"]))


async def run(
    folder: Path,
    program: str,
    *,
    policy: ScriptedPolicy | None = None,
    **settings: Any,
) -> Episode:
    """One episode of a program that may `ask` and `report`."""
    (folder / "agent.py").write_text(ASK + textwrap.dedent(program))
    policy = policy or ScriptedPolicy(lambda _: "7")
    async with serving_agents() as endpoint:
        workflow = AgentProcess(
            settings=AgentProcessSettings(**{"command": "python agent.py"} | settings),
            reward=judged,
            endpoint=endpoint,
            recipe_dir=folder,
            scratch_dir=scratch_of(folder),
        )
        return await workflow.run(TASK, {"solver": policy})


def scratch_of(folder: Path) -> Path:
    scratch = folder / "scratch"
    scratch.mkdir(exist_ok=True)
    return scratch


def test_it_is_a_workflow() -> None:
    assert mismatch(AgentProcess, protocol=Workflow) is None


async def test_what_a_program_asks_becomes_its_episode(tmp_path: Path) -> None:
    program = """
        assert task == {**task, "task_id": "t1", "data": {"hint": "add"}}, task
        assert os.listdir() == [] and os.environ["COLOUR"] == "blue"
        ask(*task["messages"])
        """
    episode = await run(tmp_path, program, hidden_data=["answer"], env={"COLOUR": "blue"})
    (trajectory,) = episode.trajectories
    assert (trained_text(trajectory), trajectory.reward) == (["7¶"], 1.0)


async def test_the_real_client_needs_no_settings(tmp_path: Path) -> None:
    program = """
        import openai
        openai.OpenAI().chat.completions.create(model="solver", messages=task["messages"])
        """
    assert (await run(tmp_path, program)).trajectories[0].reward == 1.0


async def test_an_answer_that_is_reported_is_the_one_that_is_judged(tmp_path: Path) -> None:
    program = 'ask(*task["messages"]); report(answer="8", metrics={"tries": 2})'
    episode = await run(tmp_path, program)
    assert episode.trajectories[0].reward == 0.0
    assert episode.metrics["tries"] == 2


async def test_a_reward_is_reported_where_the_recipe_allows_it(tmp_path: Path) -> None:
    program = 'ask(*task["messages"]); report(reward=0.25)'
    assert (await run(tmp_path, program, reported_reward=True)).trajectories[0].reward == 0.25
    with pytest.raises(AgentFailed, match="which the recipe does not allow"):
        await run(tmp_path, program)
    with pytest.raises(AgentFailed, match="reported no reward"):
        await run(tmp_path, 'ask(*task["messages"])', reported_reward=True)


@pytest.mark.parametrize(
    ("program", "settings", "complaint"),
    [
        ("raise ValueError('no idea')", {}, "ended with status 1; .*ValueError: no idea"),
        ("sys.exit(3)", {}, "ended with status 3, and wrote nothing"),
        ("os.kill(os.getpid(), 11)", {}, "ended with signal SIGSEGV"),
        (
            "print('busy', flush=True); import time; time.sleep(600)",
            {"timeout_s": 1.5},
            "timeout_s 1.5; .*busy",
        ),
        ("while True: print('x' * 9999)", {}, "wrote more than 16777216 bytes"),
        ("pass", {}, "ended without a call of a policy"),
        ("ask(*task['messages'], key='af-stolen')", {}, "HTTP Error 401"),
        (
            "ask(*task['messages']); report(answer=5)",
            {},
            "ASTRAFLOW_RESULT: answer: Input should be a valid string, got 5",
        ),
        (
            "ask(*task['messages']); report(reward=float('nan'))",
            {},
            "ASTRAFLOW_RESULT: reward: Input should be a finite number",
        ),
        ("", {"command": ["/bin/sh", "-c", "no-such-program"]}, "no-such-program: .*not found"),
        ("", {"cwd": "/nowhere"}, "cannot be started: .*/nowhere"),
    ],
)
async def test_whatever_goes_wrong_has_a_name(
    tmp_path: Path, program: str, settings: Mapping[str, Any], complaint: str
) -> None:
    with pytest.raises(AgentFailed, match=complaint):
        await run(tmp_path, program, **settings)


async def test_a_program_that_floods_ends_its_episode(tmp_path: Path) -> None:
    program = """
        while True:
            try:
                ask(*task["messages"])
            except urllib.error.HTTPError:
                pass
        """
    with pytest.raises(AgentFlooded, match="an episode may have 2 calls"):
        await run(tmp_path, program, max_calls=2)


STRAYS = """
import subprocess
child = "import os, time; os.setsid(); open('started', 'w'); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", child])
while not os.path.exists("started"): pass
"""


@WALLED
async def test_nothing_that_it_started_outlives_a_program(is_walled: bool, tmp_path: Path) -> None:
    settings = {"env": {"MARK": tmp_path.name}, "dangerously_without_sandbox": not is_walled}
    await run(tmp_path, STRAYS + "ask(*task['messages'])", **settings)
    assert not alive_with(tmp_path.name)


async def test_an_episode_works_below_the_folder_that_the_node_gives_and_leaves_nothing_there(
    tmp_path: Path,
) -> None:
    program = f"""
        assert os.path.abspath("../..") == {str(scratch_of(tmp_path))!r}
        open("left", "w").close()
        ask(*task["messages"])
        """
    await run(tmp_path, program)
    assert not list(scratch_of(tmp_path).iterdir())


@WALLED
async def test_an_episode_that_is_cancelled_ends_its_program(is_walled: bool, tmp_path: Path) -> None:
    policy = ScriptedPolicy(lambda _: "7")
    policy.may_answer.clear()
    settings = {"env": {"MARK": tmp_path.name}, "dangerously_without_sandbox": not is_walled}
    episode = asyncio.create_task(run(tmp_path, STRAYS + "ask(*task['messages'])", policy=policy, **settings))
    await eventually(lambda: policy.prompts, what="the program asks", patience_s=30)
    assert len(alive_with(tmp_path.name)) >= 2
    episode.cancel()
    with pytest.raises(asyncio.CancelledError):
        await episode
    assert not alive_with(tmp_path.name)


async def test_no_more_programs_run_at_once_than_allowed(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(ASK + 'ask(*task["messages"])')
    policy = ScriptedPolicy(lambda _: "7")
    policy.may_answer.clear()
    async with serving_agents() as endpoint:
        settings = AgentProcessSettings(command=("python", "agent.py"), max_processes=1)
        workflow = AgentProcess(
            settings=settings,
            reward=judged,
            endpoint=endpoint,
            recipe_dir=tmp_path,
            scratch_dir=scratch_of(tmp_path),
        )
        episodes = [asyncio.create_task(workflow.run(TASK, {"solver": policy})) for _ in range(3)]
        await eventually(lambda: policy.prompts, what="one program asks", patience_s=30)
        policy.may_answer.set()
        assert [len(episode.trajectories) for episode in await asyncio.gather(*episodes)] == [1, 1, 1]


async def test_a_program_writes_where_the_recipe_says_and_its_folder_is_in_memory(tmp_path: Path) -> None:
    for name in ("cwd", "more", "other"):
        (tmp_path / name).mkdir()
    program = f"""
        for folder in (".", {str(tmp_path / "more")!r}, "/tmp", os.path.dirname(os.environ["ASTRAFLOW_TASK"])):
            open(folder + "/written", "w").close()
        try:
            open({str(tmp_path / "other" / "written")!r}, "w")
        except OSError:
            ask(*task["messages"])
        """
    await run(tmp_path, program, cwd=tmp_path / "cwd", writable=[tmp_path / "more"])
    written = [name for name in ("cwd", "more", "other", "scratch") if os.listdir(tmp_path / name)]  # noqa: PTH208
    assert written == ["cwd", "more"]


async def test_a_program_sees_neither_other_episodes_nor_the_secrets_of_the_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (scratch_of(tmp_path) / "another").write_text("x")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    program = f"""
        import tempfile
        assert tempfile.gettempdir() == "/tmp"
        assert os.listdir({str(scratch_of(tmp_path))!r}) == [os.path.basename(os.path.dirname(os.getcwd()))]
        ask(*task["messages"])
        """
    await run(tmp_path, program)


def test_a_node_without_sandbox_says_what_to_install_or_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def require() -> None:
        raise MissingCapability("no sandbox: there is no bwrap on PATH; install it")

    monkeypatch.setattr(agent_process, "require_machine_walls", require)
    settings: Any = {"command": ("true",)}
    given: Any = {"reward": judged, "endpoint": None, "recipe_dir": Path(), "scratch_dir": Path()}
    with pytest.raises(MissingCapability, match=r"no bwrap.*install it; or set dangerously_without_sandbox"):
        AgentProcess(settings=AgentProcessSettings(**settings), **given)
    AgentProcess(settings=AgentProcessSettings(**settings, dangerously_without_sandbox=True), **given)


@pytest.mark.parametrize(
    ("command", "folder", "complaint"),
    [
        ("python agent.py", None, "start it with --allow-recipe-code"),
        ("no-such-program x", Path(), "no program 'no-such-program' on this machine; install it"),
    ],
)
def test_a_node_that_cannot_run_it_says_so_when_it_starts(
    command: str, folder: Path | None, complaint: str
) -> None:
    settings: Any = AgentProcessSettings.model_validate({"command": command})
    with pytest.raises(MissingCapability, match=complaint):
        AgentProcess(settings=settings, reward=judged, endpoint=Any, recipe_dir=folder, scratch_dir=Path())  # type: ignore[arg-type]
