"""Tasks in a shell, served to nodes: tests that do not end cost one episode, and no worker."""

from pathlib import Path

import pytest

from astraflow.client import AsyncClient
from astraflow.plugins import Message, TaskSpec
from astraflow_raas.environments.remote import RemoteEnvironment
from support.environments import served_environment
from support.recipes import recipe_code
from support.sandbox import needs_bubblewrap

pytestmark = [pytest.mark.integration, needs_bubblewrap]
USE = "astraflow_environment.adapters.terminal:Terminal"


async def test_a_served_shell_grades_by_the_tasks_tests_and_outlives_those_that_do_not_end(
    tmp_path: Path,
) -> None:
    files = recipe_code("terminal").folder("ant", "bee", 47)
    right = [*files["solution/solve.sh"].splitlines(), "exit"]
    endless = {**files, "tests/test.sh": "sleep 600"}
    async with (
        served_environment(tmp_path, "--workers", "1", use=USE, calls="text", grade_s=1) as service,
        AsyncClient(service.address) as client,
    ):
        for given, reward, late in ((files, 1.0, 0.0), (endless, 0.0, 1.0), (files, 1.0, 0.0)):
            shell = RemoteEnvironment(client, name="Terminal", turn_timeout_s=20.0)
            await shell.reset(TaskSpec("t", (), {"task": "t", "files": given}))
            seen = [await shell.step(Message("assistant", command)) for command in right]
            assert seen[0].messages[0].content == "47"
            assert (seen[-1].done, seen[-1].reward, seen[-1].metrics["grader_timeout"]) == (
                True,
                reward,
                late,
            )
            await shell.close()
        assert "worker.ended" not in service.log.read_text()
