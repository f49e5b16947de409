"""Tasks that are folders, in the layout of Harbor: task.toml, instruction.md, environment/, tests/test.sh, solution/.

Invariant: a folder is read as a whole and checked as a whole, with errors that name file and line; a task belongs to
one split for ever, by its name. Used by data sets of recipes and by environments that play such tasks; standard library
only.
"""

from __future__ import annotations

import hashlib
import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from posixpath import normpath
from typing import Any

from astraflow.data.task_files import RowTasks
from astraflow.errors import RecipeError
from astraflow.plugins import Message, TaskSpec

__all__ = ["FolderTasks", "TaskFolder", "parse_task", "read_task"]

DOCKERFILE, TESTS = "environment/Dockerfile", "tests/test.sh"
MAX_BYTES = 16 * 2**20
"""Of all files of a task."""
_WITHOUT_EFFECT = {
    "ARG",
    "CMD",
    "ENTRYPOINT",
    "EXPOSE",
    "FROM",
    "HEALTHCHECK",
    "LABEL",
    "MAINTAINER",
    "SHELL",
    "USER",
}
_ELSEWHERE = {"steps": "several steps", "multi_step_reward_strategy": "several steps"}
_DEFAULT_S = 600.0
_NO_WORK_FOLDERS = [
    "/bin",
    "/dev",
    "/etc",
    "/lib",
    "/lib64",
    "/logs",
    "/proc",
    "/run",
    "/sbin",
    "/sys",
    "/tests",
    "/usr",
]


@dataclass(frozen=True, kw_only=True)
class TaskFolder:
    """One task."""

    name: str
    instruction: str
    folder: str = "/app"
    """Where the shell begins."""
    files: Mapping[str, bytes]
    """What is there at the beginning, by paths within."""
    tests: Mapping[str, bytes]
    """What comes after the agent, by paths within."""
    variables: Mapping[str, str]
    agent_s: float
    grade_s: float
    solution: str = ""
    """solution/solve.sh, where there is one."""


def read_task(folder: Path, *, built: bool = False) -> TaskFolder:
    """Read a task's folder; `built` as for `parse_task`. Raises RecipeError."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    if sum(path.stat().st_size for path in paths) > MAX_BYTES:
        raise RecipeError(f"{folder}: more than {MAX_BYTES >> 20} MiB of files; a task is read as a whole")
    files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
    return parse_task(folder.name, files, where=str(folder), built=built)


def parse_task(name: str, files: Mapping[str, bytes], *, where: str, built: bool = False) -> TaskFolder:
    """The task in these files of its folder, by their paths there.

    No image is built: of its Dockerfile count COPY, ENV and WORKDIR. RUN is refused, unless the machine that plays is
    `built` as it says. Raises RecipeError with file and line.
    """
    missing = [path for path in ("task.toml", "instruction.md", TESTS) if path not in files]
    if missing:
        raise RecipeError(
            f"{where}: no {', no '.join(missing)}; a task has task.toml, instruction.md and {TESTS}"
        )
    if extra := [path for path in files if re.fullmatch(r"environment/docker-compose\.ya?ml", path)]:
        raise RecipeError(
            f"{where}/{extra[0]}: tasks of several containers are not played here; take the task out"
        )
    text = files["task.toml"].decode(errors="replace")
    settings = _settings(text, where=f"{where}/task.toml")
    if settings.get("environment", {}).get("docker_image") and not built:
        line = _line_of(text, "docker_image")
        raise RecipeError(f"{where}/task.toml:{line}: the task wants an image; {_BUILT}")
    image = _Image(f"{where}/{DOCKERFILE}", files, built=built)
    seconds = {
        section: _seconds(settings, section, text=text, where=f"{where}/task.toml")
        for section in ("agent", "verifier")
    }
    return TaskFolder(
        name=name,
        instruction=files["instruction.md"].decode(errors="replace").strip(),
        folder=image.folder,
        files=image.files,
        tests={f"/{path}": content for path, content in files.items() if path.startswith("tests/")},
        variables=image.variables,
        agent_s=seconds["agent"],
        grade_s=seconds["verifier"],
        solution=files.get("solution/solve.sh", b"").decode(errors="replace"),
    )


_BUILT = (
    "images are not built here. Play it on a machine, or in a container, that is as the image would be, and say "
    "`built: true` where the environment and the data set are named"
)


class FolderTasks(RowTasks[TaskFolder]):
    """A data set of the folders below `folder` that have a task.toml; `heldout` is a folder of others, without it one
    task in ten is held out. An environment reads the same folder: a task's data names it.
    """

    def __init__(self, *, seed: int, folder: Path, heldout: Path | None = None, built: bool = False) -> None:
        found = _tasks(folder, built=built)
        train = found if heldout else [task for task in found if not _is_held_out(task.name)]
        kept = (
            _tasks(heldout, built=built) if heldout else [task for task in found if _is_held_out(task.name)]
        )
        if not train or not kept:
            raise RecipeError(
                f"{folder.absolute()} has {len(found)} tasks, and by their names {len(kept)} are held out and "
                f"{len(train)} trained on; name a folder of tasks to hold out: --set run.dataset.with.heldout=FOLDER"
            )
        if both := sorted({task.name for task in train} & {task.name for task in kept}):
            raise RecipeError(
                f"{folder.absolute()} and {heldout}, whose tasks are held out, share {len(both)} names, {both[0]!r} "
                "among them; a task has one folder, and one name"
            )
        super().__init__(train=train, heldout=kept, seed=seed)

    def task(self, task_id: str, row: TaskFolder) -> TaskSpec:
        """Its instruction."""
        return TaskSpec(task_id, (Message("user", row.instruction),), {"task": row.name, "problem": row.name})


def _tasks(folder: Path, *, built: bool) -> Sequence[TaskFolder]:
    found = [read_task(path.parent, built=built) for path in sorted(folder.glob("*/task.toml"))]
    if not found:
        raise RecipeError(
            f"{folder.absolute()} has no folder with a task.toml; name the folder that holds tasks in Harbor's layout: "
            "--set run.dataset.with.folder=FOLDER"
        )
    return found


def _is_held_out(name: str) -> bool:
    return hashlib.blake2b(name.encode(), digest_size=1).digest()[0] < 26


def _settings(text: str, *, where: str) -> dict[str, Any]:
    try:
        settings = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        line = re.search(r"at line (\d+)", str(error))  # otherwise at the end of the document
        raise RecipeError(
            f"{where}:{line[1] if line else len(text.splitlines())}: not TOML: {error}"
        ) from error
    for name, what in _ELSEWHERE.items():
        if name in settings:
            raise RecipeError(
                f"{where}:{_line_of(text, name)}: tasks of {what} are not played here; take it out"
            )
    for name in ("agent", "verifier", "environment"):
        if not isinstance(settings.get(name, {}), Mapping):
            raise RecipeError(f"{where}:{_line_of(text, name)}: {name} is a section, [{name}]")
    return settings


def _seconds(settings: Mapping[str, Any], section: str, *, text: str, where: str) -> float:
    value = settings.get(section, {}).get("timeout_sec", _DEFAULT_S)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 86_400:
        line = _line_of(text, "timeout_sec", section=section)
        raise RecipeError(f"{where}:{line}: {section}.timeout_sec is {value!r}; give seconds, 0 to 86,400")
    return float(value)


def _line_of(text: str, key: str, *, section: str = "") -> int:
    """The line of a key, as far as a line says it: of one in a section the first behind its heading."""
    lines = text.splitlines()
    start = next((at for at, line in enumerate(lines) if section and line.strip() == f"[{section}]"), 0)
    pattern = re.compile(rf"\s*\[*\s*([\w.]*\.)?{re.escape(key)}\b")
    return next((at for at, line in enumerate(lines[start:], start=start + 1) if pattern.match(line)), 1)


class _Image:
    """What the Dockerfile of a task says of its beginning."""

    def __init__(self, where: str, files: Mapping[str, bytes], *, built: bool) -> None:
        self.folder = "/app"
        self.files: dict[str, bytes] = {}
        self.variables: dict[str, str] = {}
        self._given = {
            path.removeprefix("environment/"): content
            for path, content in files.items()
            if path.startswith("environment/") and path != DOCKERFILE
        }
        for line, words in _instructions(files.get(DOCKERFILE, b"").decode(errors="replace")):
            name, _, rest = words.partition(" ")
            try:
                self._do(name.upper(), rest.strip(), built=built)
            except ValueError as error:
                raise RecipeError(f"{where}:{line}: {error}") from error
        path = PurePosixPath(self.folder)
        if path == PurePosixPath("/") or any(path.is_relative_to(each) for each in _NO_WORK_FOLDERS):
            raise RecipeError(
                f"{where}: WORKDIR is {self.folder}; the tests are given that folder and no other, so choose one of "
                "its own, such as /app"
            )

    def _do(self, name: str, rest: str, *, built: bool) -> None:
        if name == "WORKDIR":
            self.folder = normpath(PurePosixPath(self.folder, rest.strip("\"'")))
        elif name == "ENV":
            pairs = [word.partition("=") for word in shlex.split(rest)]
            single = rest.partition(" ")
            self.variables |= (
                {key: value for key, _, value in pairs}
                if "=" in single[0]
                else {single[0]: single[2].strip()}
            )
        elif name in ("COPY", "ADD"):
            self._copy([word for word in shlex.split(rest) if not word.startswith("--")], flags=rest)
        elif name == "RUN":
            if not built:
                raise ValueError(f"RUN {rest[:60]}: {_BUILT}")
        elif name not in _WITHOUT_EFFECT:
            raise ValueError(
                f"{name} is no instruction that is understood here: COPY, ENV, WORKDIR and RUN are"
            )

    def _copy(self, words: Sequence[str], *, flags: str) -> None:
        if "--from" in flags or len(words) < 2:
            raise ValueError(
                "COPY names files of environment/ and where they go; from other images nothing is copied"
            )
        *sources, target = words
        place = PurePosixPath(self.folder, target)
        for source in sources:
            name = source.removeprefix("./").rstrip("/")
            whole = {path: path for path in self._given} if name in (".", "") else {}
            below = whole or {
                path: path[len(name) + 1 :] for path in self._given if path.startswith(f"{name}/")
            }
            if below:
                self.files |= {str(place / rest): self._given[path] for path, rest in below.items()}
            elif name in self._given:
                into = (
                    place / PurePosixPath(name).name
                    if target.endswith(("/", ".")) or len(sources) > 1
                    else place
                )
                self.files[str(into)] = self._given[name]
            else:
                raise ValueError(f"COPY {source}: environment/ has no such file")


def _instructions(text: str) -> Iterator[tuple[int, str]]:
    """The instructions of a Dockerfile with the line where each begins."""
    begun, parts = 0, list[str]()
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        begun = begun if parts else number
        parts.append(line.strip().removesuffix("\\").strip())
        if not line.rstrip().endswith("\\"):
            yield begun, " ".join(parts)
            parts = []
    if parts:
        yield begun, " ".join(parts)
