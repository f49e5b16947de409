"""The folder of one development run: where its state, logs, metrics and results live.

Invariant: everything a run needs to be resumed is under its folder, except the warm-start cache, which runs
started without `--data-dir` share. One launcher at a time has the folder. `run.json` says which recipe the folder
belongs to, as its author wrote it; a folder of another recipe is refused. How many steps to train is no part of that,
and the settings that only trainers read may differ: they are given to the trainers, and the run keeps its recipe. It
keeps the defaults that it was created with, too.
"""

import itertools
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from astraflow import __version__
from astraflow.errors import ConflictError, IncompatibleError, InvalidArgumentError
from astraflow.recipe.file import LoadedRecipe
from astraflow.recipe_changes import (
    Resumed,
    code_differences,
    file_digests,
    read_recipe_of,
    resume,
    trainer_changes,
)
from astraflow_kit.folder_lock import FolderLock, lock_folder
from astraflow_kit.releases import refuse

DEFAULT_ROOT = Path(".astraflow")
_RECIPE, _TRAINER_RECIPE = "recipe.yaml", "trainer_recipe.yaml"
SCHEMA_VERSION = 3
_READABLE = (2, SCHEMA_VERSION)


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """Content of run.json."""

    schema_version: int = SCHEMA_VERSION
    run_id: str
    created: str
    identity: str = ""
    """The dataflow server's identity of the run; empty before the run was created there."""
    release: str = "0.1.0"
    """The release that created the run."""
    written: str = ""
    """The recipe as its author wrote it, as `LoadedRecipe.written`; empty of releases that did not keep it."""
    code: Mapping[str, str] | None = None
    """sha256 of each file of its code, by path; None of releases that did not keep them."""


class _Found(NamedTuple):
    """A run that is there."""

    record: RunRecord
    resumed: Resumed
    changes: tuple[str, ...]


@dataclass(frozen=True)
class RunFolder:
    """Paths below one run's folder; all parents exist."""

    root: Path
    cache: Path
    record: RunRecord
    resumed: bool
    lock: FolderLock
    """Held from before anything was written."""
    loaded: LoadedRecipe
    """The recipe that the run goes on with."""
    changes: tuple[str, ...] = ()
    """Where that differs for trainers from the one that it was created with: `key: old → new`."""
    notes: tuple[str, ...] = ()
    """What this release changed about defaults since the run was created."""

    @property
    def recipe_yaml(self) -> str:
        """The resolved recipe the run was created with."""
        return (self.root / _RECIPE).read_text()

    @property
    def trainer_recipe(self) -> Path | None:
        """The recipe that trainers go on with, where it differs from the run's."""
        return self.root / _TRAINER_RECIPE if self.changes else None

    @property
    def redis(self) -> Path:
        """The embedded Redis's data."""
        return self._folder("redis")

    @property
    def store(self) -> Path:
        """The `file://` weight store; its first writer makes it, and nobody makes it again."""
        return self.root / "store"

    @property
    def addresses(self) -> Path:
        """Address files of the daemons."""
        return self._folder("addresses")

    @property
    def metrics(self) -> Path:
        """JSON lines: one per finished step, evaluation and sampled status."""
        return self.root / "metrics.jsonl"

    @property
    def summary(self) -> Path:
        """The final summary as JSON."""
        return self.root / "summary.json"

    @property
    def samples(self) -> Path:
        """JSON lines: each held-out task of the last evaluation, with the result of each sample."""
        return self.root / "samples.jsonl"

    @property
    def curves(self) -> Path:
        """The curves as PNG."""
        return self.root / "curves.png"

    def log(self, name: str) -> Path:
        """The log file of one process."""
        return self._folder("logs") / f"{name}.log"

    def work(self, name: str) -> Path:
        """The private folder of one daemon (a node's mirror, a trainer's checkpoints)."""
        return self._folder("work") / name

    def remember(self, identity: str) -> None:
        """Keep the identity that the server gave the run."""
        _write_record(self.root, replace(self.record, identity=identity))

    def checkpointed_step(self) -> int:
        """The newest step of any checkpoint in the folder; 0 when there is none."""
        found = self.root.glob("work/trainer-*/checkpoints/step-*")
        return max((int(path.name.removeprefix("step-")) for path in found), default=0)

    def has_trained(self) -> bool:
        """Whether a trainer of this folder took a step."""
        ledgers = self.root.glob("work/trainer-*/ledger.jsonl")
        return self.checkpointed_step() > 0 or any(path.stat().st_size for path in ledgers)

    def _folder(self, name: str) -> Path:
        path = self.root / name
        path.mkdir(parents=True, exist_ok=True)
        return path


def open_run_folder(loaded: LoadedRecipe, *, data_dir: Path | None, now: datetime | None = None) -> RunFolder:
    """Return the folder of a new run, or of the run that `data_dir` already holds; it is locked.

    Raises ConflictError when `data_dir` is in use or holds a run of another recipe, IncompatibleError when another
    release wrote it or it is damaged, InvalidArgumentError when it cannot be written.
    """
    try:
        return _open(loaded, data_dir, now or datetime.now(tz=UTC))
    except OSError as error:
        raise InvalidArgumentError(
            f"{error.filename or data_dir} cannot be used for the run: {error.strerror or error}; give a --data-dir "
            "that can be written"
        ) from error


def planned_folder(loaded: LoadedRecipe, *, data_dir: Path | None) -> tuple[Path, bool]:
    """Return where a run would be, and whether it is there; writes nothing. Raises as `open_run_folder` does."""
    if data_dir is None:
        return (DEFAULT_ROOT / "runs" / f"{loaded.recipe.run.name}-TIME").absolute(), False
    is_there = (data_dir / "run.json").exists()
    if is_there:
        _found(data_dir, loaded)
    return data_dir.absolute(), is_there


def _open(loaded: LoadedRecipe, data_dir: Path | None, moment: datetime) -> RunFolder:
    if data_dir is None:
        base = DEFAULT_ROOT / "runs" / f"{loaded.recipe.run.name}-{moment:%Y%m%d-%H%M%S}"
        root, cache = _unused(base), DEFAULT_ROOT / "cache"
    else:
        root, cache = data_dir, data_dir / "cache"
    lock = lock_folder(root, remedy="end it first, or give another --data-dir")
    try:
        if is_there := (root / "run.json").exists():
            found = _found(root, loaded)
        else:
            found = _Found(_create(root, cache, loaded, moment), Resumed(loaded, ()), ())
        if found.changes:
            (root / _TRAINER_RECIPE).write_text(found.resumed.loaded.yaml_text)
    except BaseException:
        lock.release()
        raise
    return RunFolder(
        root.resolve(),
        cache.resolve(),
        found.record,
        resumed=is_there,
        lock=lock,
        loaded=found.resumed.loaded,
        changes=found.changes,
        notes=found.resumed.notes,
    )


def _unused(base: Path) -> Path:
    """Make a folder that nobody else has."""
    for number in itertools.count(1):
        candidate = base if number == 1 else base.with_name(f"{base.name}-{number}")
        with suppress(FileExistsError):
            candidate.mkdir(parents=True)
            break
    return candidate


def _create(root: Path, cache: Path, loaded: LoadedRecipe, moment: datetime) -> RunRecord:
    cache.mkdir(parents=True, exist_ok=True)
    record = RunRecord(
        run_id=loaded.recipe.run.name,
        created=moment.isoformat(),
        release=__version__,
        written=loaded.written,
        code=file_digests(loaded.code),
    )
    (root / _RECIPE).write_text(loaded.yaml_text)
    _write_record(root, record)
    return record


def _write_record(root: Path, record: RunRecord) -> None:
    draft = root / ".run.json"
    draft.write_text(json.dumps(asdict(record), indent=2) + "\n")
    draft.replace(root / "run.json")


def _read_record(root: Path) -> RunRecord:
    path = root / "run.json"
    try:
        stored = json.loads(path.read_text())
        version = stored.get("schema_version")
    except (ValueError, AttributeError) as error:
        raise IncompatibleError(
            f"{path} is damaged ({error}); restore it, or give another --data-dir"
        ) from error
    if version not in _READABLE:
        raise refuse(
            str(root), format_="data_dir", found=version, reads=_READABLE, otherwise="give a new --data-dir"
        )
    known = {each.name for each in fields(RunRecord)} & stored.keys() - {"schema_version"}
    return RunRecord(**{name: stored[name] for name in known})


def _found(root: Path, loaded: LoadedRecipe) -> _Found:
    """The run that is there, and how it goes on with `loaded`. Raises ConflictError where that is another one."""
    record = _read_record(root)
    where = f"{root} holds run {record.run_id!r}"
    try:
        text = (root / _RECIPE).read_text()
    except FileNotFoundError as error:
        raise ConflictError(
            f"{where} of another recipe, and its {_RECIPE} is gone; give another --data-dir"
        ) from error
    own = read_recipe_of(text, source=str(root / _RECIPE), release=f"astraflow {record.release}")
    resumed = resume(loaded, run=own, written=record.written)
    try:
        changes = trainer_changes(own.recipe, resumed.loaded.recipe)
    except ConflictError as error:
        raise ConflictError(
            f"{where} of another recipe: {error.message}; or give another --data-dir"
        ) from error
    # Earlier releases kept no digests of files: then the server, which has the files, says which differ.
    if record.code is not None and (
        differing := code_differences(file_digests(loaded.code), run=record.code)
    ):
        raise ConflictError(
            f"{where} of the same recipe with other files beside it ({differing}); give the files that the run was "
            "started with, or another --data-dir"
        )
    return _Found(record, resumed, tuple(changes))
