"""A task in a shell: tasks in the layout of Harbor, played in bubblewrap and graded by their own tests.

Invariant: the tests run in a sandbox of their own, into which only the work folder of the policy's is carried; what a
policy does costs its own episode at most. Named by a recipe, or served, as
`astraflow_environment.adapters.terminal:Terminal`.
"""

import asyncio
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast

from astraflow.data.task_folders import TaskFolder, parse_task, read_task
from astraflow.plugins import Message, MissingCapability, Observation, TaskSpec
from astraflow_environment.terminal.sandbox import (
    CarryFailed,
    SandboxDied,
    ShellSandbox,
    require_sandbox,
)
from astraflow_environment.tools import Tools
from astraflow_kit.sandbox.budget import Budget

_ENDS = ("", "exit", "exit 0", "logout")
_MARGIN_S = 15.0


class Terminal(Tools):
    """The tool `run` runs a command in the task's shell; the episode is done, and graded, when the assistant calls no
    tool, after `max_turns`, and when the task's time for agents is over.

    With `calls="text"` each answer is a command, `exit` or an empty one the end: for models that know no tools. The
    reward is what tests/test.sh writes. Metrics: `commands`, `late` (commands that did not end in time), `graded`,
    `grader_timeout`, `grader_failed` (it wrote no reward), `carry_failed` (the work folder could not be brought to
    the tests), `sandbox_died`.
    """

    def __init__(
        self,
        *,
        folder: Path | None = None,
        heldout: Path | None = None,
        built: bool = False,
        calls: Literal["tools", "text"] = "tools",
        max_turns: int = 50,
        command_s: float = 60.0,
        grade_s: float = 300.0,
        max_output_chars: int = 8000,
        limits: Budget | None = None,
    ) -> None:
        """`folder` holds the tasks that a task's data names; it, `heldout` and `built` are as for the data set.
        `turn_timeout_s` of the workflow must exceed `command_s` + `grade_s` + 30, in which the work folder
        is carried. Raises MissingCapability without a
        sandbox.
        """
        require_sandbox()
        super().__init__(
            functions=cast("Sequence[str]", [self.run]),  # a subclass may give functions themselves
            timeout_s=command_s + _MARGIN_S,
            max_output_chars=max_output_chars * 2,
        )
        self._folders = [each for each in (folder, heldout) if each]
        self._built, self._reads_text = built, calls == "text"
        self._max_turns, self._command_s, self._grade_s = max_turns, command_s, grade_s
        self._kept = max_output_chars
        self._limits = limits or Budget()
        self._one = asyncio.Lock()
        self._task: TaskFolder | None = None
        self._sandbox: ShellSandbox | None = None
        self._died: SandboxDied | None = None
        self._turns, self._until_s = 0, math.inf
        self._counts = dict.fromkeys(
            ("commands", "late", "graded", "grader_timeout", "grader_failed", "carry_failed", "sandbox_died"),
            0,
        )

    async def reset(self, task: TaskSpec) -> Observation:
        """Start a sandbox with the task's files. Raises RecipeError for a malformed task, MissingCapability where this
        machine lacks it.
        """
        self._task = found = await asyncio.to_thread(self._found, task.data)
        self._sandbox = await ShellSandbox.start(
            found.files, folder=found.folder, variables=found.variables, limits=self._limits
        )
        self._until_s = asyncio.get_running_loop().time() + found.agent_s
        seen = await super().reset(task)
        return Observation() if self._reads_text else seen

    async def run(self, command: str) -> str:
        """Run a command in the shell, and return what it prints. Folder, variables and background programs stay."""
        assert self._sandbox is not None
        left_s = self._until_s - asyncio.get_running_loop().time()
        seconds = max(0.1, min(self._command_s, left_s))
        async with self._one:  # calls of one turn come side by side, and there is one shell
            try:
                found = await self._sandbox.run(command, seconds=seconds, limit=self._kept)
            except SandboxDied as died:
                self._died = died  # a tool's failure would be shown to the assistant, and the episode go on
                raise
        self._counts["commands"] += 1
        self._counts["late"] += found.late
        if found.late:
            return f"{found.output}\n(no end within {seconds:g} s; the shell was started anew)".lstrip()
        if found.ended:
            return f"{found.output}\n(the shell ended; the next command has a new one)".lstrip()
        failed = f"\n(exit status {found.status})" if found.status else ""
        return f"{found.output.rstrip()}{failed}".lstrip("\n") or "(no output)"

    async def step(self, action: Message) -> Observation:
        """Run what the assistant says, or grade."""
        self._turns += 1
        try:
            seen = await self._said(action) if self._reads_text else await super().step(action)
            if self._died is not None:
                raise self._died
            late = asyncio.get_running_loop().time() >= self._until_s
            if not seen.done and not late and self._turns < self._max_turns:
                return Observation(messages=seen.messages, metrics=self._metrics())
            reward = await self._graded()
        except SandboxDied:
            self._counts["sandbox_died"] = 1
            reward = 0.0
        except CarryFailed:
            self._counts["carry_failed"] = 1
            reward = 0.0
        return Observation(reward=reward, done=True, metrics=self._metrics())

    async def close(self) -> None:
        """Kill the sandbox."""
        await super().close()
        if self._sandbox is not None:
            await self._sandbox.close()

    async def _said(self, action: Message) -> Observation:
        command = action.content.strip()
        if command in _ENDS:
            return Observation(done=True)
        return Observation(messages=(Message("user", await self.run(command)),))

    async def _graded(self) -> float:
        assert self._task is not None
        assert self._sandbox is not None
        seconds = min(self._task.grade_s, self._grade_s)
        found = await self._sandbox.grade(self._task.tests, seconds=seconds, limit=self._kept)
        reward = _number(found.reward)
        self._counts["graded"] = 1
        self._counts["grader_timeout"] = int(found.late)
        self._counts["grader_failed"] = int(reward is None and not found.late)
        return reward if reward is not None and not found.late else 0.0

    def _found(self, data: Mapping[str, Any]) -> TaskFolder:
        if "files" in data:
            files = {path: str(text).encode() for path, text in data["files"].items()}
            return parse_task(data["task"], files, where=f"task {data['task']}", built=self._built)
        if not self._folders:
            raise MissingCapability(
                'this environment has no folder of tasks; give it one: --with \'{"folder": "FOLDER"}\''
            )
        places = [folder / Path(data["task"]).name for folder in self._folders]
        found = next((place for place in places if (place / "task.toml").is_file()), None)
        if found is None:
            where = " or ".join(str(folder.absolute()) for folder in self._folders)
            raise MissingCapability(
                f"no task {data['task']!r} in {where} on this machine; give `folder`, and `heldout` where it has one, "
                "as for the data set"
            )
        return read_task(found, built=self._built)

    def _metrics(self) -> dict[str, float]:
        return {name: float(count) for name, count in self._counts.items()}


def _number(text: str | None) -> float | None:
    try:
        number = float(text or "")
    except ValueError:
        return None
    return number if math.isfinite(number) else None
