"""An agent of yours, in any language and framework, as a workflow: a program is started for each episode.

Invariant: the program gets its task in a file and the policies as an OpenAI-compatible address, and nothing of it
survives the episode; however it fails, that costs one attempt of one task. Named by a recipe as
`astraflow_raas.workflows.agent_process:AgentProcess`.
"""

import asyncio
import json
import os
import shlex
import shutil
import stat
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from astraflow.agents import AgentEndpoint, AgentLimits, AgentSession
from astraflow.plugins import Episode, MissingCapability, Policy, Score, Scorer, TaskSpec
from astraflow_kit import traces
from astraflow_kit.log import get_logger
from astraflow_kit.sandbox.budget import Budget
from astraflow_kit.sandbox.folders import remove_tree
from astraflow_kit.sandbox.machine_walls import MAX_RESULT_BYTES, MachineWalls, require_machine_walls
from astraflow_raas.agents.program import AgentFailed, run_program
from astraflow_raas.settings import child_environment

log = get_logger(__name__)

_LIMITS = Budget(memory_mb=8192, disk_mb=1024, files=131_072, processes=1024, cpu_s=86_400, output_kb=16_384)
_TEMPORARY = ("TMPDIR", "TEMP", "TMP")


class AgentProcessSettings(BaseModel):
    """What a recipe says of an agent."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    command: tuple[str, ...] = Field(min_length=1)
    """The program and its arguments, as a list or one line; words that name files of the recipe become their paths."""
    env: dict[str, str] = {}
    """Variables, besides those of the node."""
    cwd: Path | None = None
    """Where it runs, and may write; unset: an empty folder, removed at the end."""
    writable: tuple[Path, ...] = ()
    """What else of the machine it may write; no budget counts that."""
    dangerously_without_sandbox: bool = False
    """Whether it may do whatever the node's user may do, to the node, too."""
    timeout_s: Annotated[float, Field(gt=0)] | None = None
    """Bound of its run; unset: that of the episode."""
    hidden_data: tuple[str, ...] = ()
    """Keys of the task's data that the agent must not see, such as the answer."""
    reported_reward: bool = False
    """Whether the agent says its reward itself; else the recipe's reward judges the answer."""
    max_processes: Annotated[int, Field(ge=1)] = 32
    """Agents that run at once on a node; other episodes wait."""
    limits: Budget = _LIMITS
    """What one agent may use of the machine."""
    max_calls: Annotated[int, Field(ge=1)] = AgentLimits.max_calls
    max_concurrent_calls: Annotated[int, Field(ge=1)] = AgentLimits.max_concurrent_calls
    max_sampled_tokens: Annotated[int, Field(ge=1)] = AgentLimits.max_sampled_tokens

    @field_validator("writable")
    @classmethod
    def _expand_home(cls, paths: tuple[Path, ...]) -> tuple[Path, ...]:
        return tuple(path.expanduser() for path in paths)

    @field_validator("command", mode="before")
    @classmethod
    def _split(cls, command: object) -> object:
        return tuple(shlex.split(command)) if isinstance(command, str) else command


class _Result(BaseModel):
    """What an agent may write to the file `ASTRAFLOW_RESULT`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    answer: str | None = None
    reward: Annotated[float, Field(allow_inf_nan=False)] | None = None
    metrics: dict[str, float] = {}


class AgentProcess:
    """Starts the recipe's program for each episode; `recipe_dir` is None where recipe code may not run. What episodes
    leave in `scratch_dir` when the node is killed, its next start removes. No program sees that or `secret_paths`.
    """

    def __init__(
        self,
        *,
        settings: AgentProcessSettings,
        reward: Scorer,
        endpoint: AgentEndpoint,
        recipe_dir: Path | None,
        scratch_dir: Path,
        secret_paths: Sequence[Path] = (),
    ) -> None:
        if recipe_dir is None:
            raise MissingCapability(
                "the recipe names a command, which this node may not run; start it with --allow-recipe-code if you "
                "trust whoever created the run"
            )
        self._settings = settings
        self._reward = reward
        self._endpoint = endpoint
        self._command = _resolved(settings, recipe_dir)
        self._scratch_dir = scratch_dir
        self._recipe_dir = recipe_dir
        self._hidden = (scratch_dir, *secret_paths)
        _require_sandbox(settings)
        self._slots = asyncio.Semaphore(settings.max_processes)
        self._limits = AgentLimits(
            max_calls=settings.max_calls,
            max_concurrent_calls=settings.max_concurrent_calls,
            max_sampled_tokens=settings.max_sampled_tokens,
        )

    async def run(self, task: TaskSpec, policies: Mapping[str, Policy]) -> Episode:
        """Return what the agent's calls became. Raises AgentFailed."""
        async with (
            self._slots,
            _own_folder(self._scratch_dir) as folder,
            self._endpoint.open(policies, limits=self._limits) as session,
        ):
            work, result = folder / "work", folder / "result.json"
            await asyncio.to_thread(_write, folder / "task.json", self._visible(task))
            await asyncio.to_thread(work.mkdir)
            await run_program(
                self._command,
                environment=self._environment(session, task=folder / "task.json", result=result),
                folder=self._settings.cwd or work,
                timeout_s=self._settings.timeout_s,
                budget=self._settings.limits,
                walls=self._walls(folder),
            )
            said = await asyncio.to_thread(_read, result)
            score = await self._earned(task, said, session=session, policies=policies)
            episode = session.episode(reward=score.reward, metrics={**score.metrics, **said.metrics})
        if not episode.metrics["agent_calls"]:
            raise AgentFailed(
                "the agent ended without a call of a policy; it gets OPENAI_BASE_URL and OPENAI_API_KEY"
            )
        return episode

    def _walls(self, own: Path) -> MachineWalls | None:
        if self._settings.dangerously_without_sandbox:
            return None
        cwd = (self._settings.cwd,) if self._settings.cwd else ()
        return MachineWalls(
            own=own,
            shown=(self._recipe_dir,),
            writable=(*cwd, *self._settings.writable),
            hidden=self._hidden,
        )

    def _visible(self, task: TaskSpec) -> Mapping[str, object]:
        data = {key: value for key, value in task.data.items() if key not in self._settings.hidden_data}
        messages = [message.as_chat() for message in task.messages]
        return {"task_id": task.task_id, "messages": messages, "data": data, "source": task.source}

    def _environment(self, session: AgentSession, *, task: Path, result: Path) -> Mapping[str, str]:
        # The Agents SDK would send traces, and with them the key, to OpenAI.
        own = {"OPENAI_AGENTS_DISABLE_TRACING": "1", **self._settings.env}
        inherited = child_environment()
        if not self._settings.dangerously_without_sandbox:
            inherited = {name: value for name, value in inherited.items() if name not in _TEMPORARY}
        base = inherited | own
        given = {
            "OPENAI_BASE_URL": session.base_url,
            "OPENAI_API_KEY": session.api_key,
            "ASTRAFLOW_TASK": str(task),
            "ASTRAFLOW_RESULT": str(result),
            "NO_PROXY": ",".join(filter(None, (base.get("NO_PROXY", ""), "127.0.0.1,localhost"))),
        }
        traceparent = traces.header()
        return base | given | ({"TRACEPARENT": traceparent} if traceparent else {})

    async def _earned(
        self, task: TaskSpec, said: _Result, *, session: AgentSession, policies: Mapping[str, Policy]
    ) -> Score:
        if self._settings.reported_reward:
            if said.reward is None:
                raise AgentFailed(
                    'the agent reported no reward; write {"reward": …} to the file ASTRAFLOW_RESULT'
                )
            return Score(said.reward)
        if said.reward is not None:
            raise AgentFailed(
                "the agent reported a reward, which the recipe does not allow; set reported_reward"
            )
        answer = session.answer if said.answer is None else said.answer
        return await self._reward(task, answer, policies=policies)


def _require_sandbox(settings: AgentProcessSettings) -> None:
    """Raises MissingCapability."""
    if settings.dangerously_without_sandbox:
        log.warning("agent.without_sandbox", message="agents may do whatever this user may do")
        return
    try:
        require_machine_walls()
    except MissingCapability as error:
        raise MissingCapability(
            f"{error}; or set dangerously_without_sandbox, with which agents may do whatever this user may do"
        ) from error


def _resolved(settings: AgentProcessSettings, recipe_dir: Path) -> tuple[str, ...]:
    """The command with paths of the recipe's files; `python` is the node's own. Raises MissingCapability."""
    # A recipe without code has no folder here.
    files = {path.name: str(path) for path in recipe_dir.glob("*") if path.is_file()}
    program, *arguments = (files.get(word, word) for word in settings.command)
    found = sys.executable if program == "python" else shutil.which(program)
    if found is None:
        raise MissingCapability(
            f"no program {program!r} on this machine; install it, or start the node where it is"
        )
    return (found, *arguments)


@asynccontextmanager
async def _own_folder(below: Path) -> AsyncIterator[Path]:
    folder = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix="agent-", dir=below))
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield folder
    finally:
        try:
            await asyncio.to_thread(_remove, folder, opened)
        except OSError as error:
            log.error("agent.folder_stays", folder=str(folder), message=f"{error}; remove it as its owner")
        finally:
            os.close(opened)


def _remove(folder: Path, opened: int) -> None:
    """Also where an agent moved it: the kernel says where it is now."""
    now = Path(f"/proc/self/fd/{opened}")
    for path in (now.readlink(), folder) if now.is_symlink() else (folder,):
        remove_tree(path)


def _write(path: Path, content: Mapping[str, object]) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")


def _read(path: Path) -> _Result:
    try:
        # An agent may have made anything of it; only a file is read, and nothing waits for a writer.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as stream:  # noqa: PTH123
            if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
                raise AgentFailed(
                    "the agent's file ASTRAFLOW_RESULT is no regular file; write JSON to that path"
                )
            return _Result.model_validate_json(stream.read(MAX_RESULT_BYTES))
    except FileNotFoundError:
        return _Result()
    except OSError as error:
        raise AgentFailed(f"the agent's file ASTRAFLOW_RESULT cannot be read: {error}") from error
    except ValidationError as error:
        wrong = error.errors(include_url=False)[0]
        where = ".".join(map(str, wrong["loc"])) or "the file"
        raise AgentFailed(f"ASTRAFLOW_RESULT: {where}: {wrong['msg']}, got {wrong['input']!r:.80}") from error
