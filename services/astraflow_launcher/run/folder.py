"""The folder of one development run: where its state, logs, metrics and results live.

Invariant: everything a run needs to be resumed is under its folder, except the warm-start cache, which runs
started without `--data-dir` share. One launcher at a time has the folder. `run.json` says which recipe the folder
belongs to; a folder of another recipe is refused. How many steps to train is no part of that, and the settings that
only trainers read may differ: they are given to the trainers, and the run keeps its recipe.
"""

import hashlib
import itertools
import json
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from astraflow.errors import ConflictError, IncompatibleError, InvalidArgumentError
from astraflow.recipe import Recipe
from astraflow.recipe.file import LoadedRecipe, parse_recipe
from astraflow.recipe_changes import trainer_changes
from astraflow_kit.folder_lock import FolderLock, lock_folder

DEFAULT_ROOT = Path(".astraflow")
_RECIPE, _TRAINER_RECIPE = "recipe.yaml", "trainer_recipe.yaml"
SCHEMA_VERSION = 2


@dataclass(frozen=True)
class RunRecord:
    """Content of run.json."""

    schema_version: int
    run_id: str
    recipe_sha256: str
    created: str
    identity: str = ""
    """The dataflow server's identity of the run; empty before the run was created there."""


@dataclass(frozen=True)
class RunFolder:
    """Paths below one run's folder; all parents exist."""

    root: Path
    cache: Path
    record: RunRecord
    resumed: bool
    lock: FolderLock
    """Held from before anything was written."""
    changes: tuple[str, ...] = ()
    """Where the recipe that it goes on with differs for trainers: `key: old → new`."""

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
        _stored_record(data_dir, loaded)
    return data_dir.absolute(), is_there


def _open(loaded: LoadedRecipe, data_dir: Path | None, moment: datetime) -> RunFolder:
    if data_dir is None:
        base = DEFAULT_ROOT / "runs" / f"{loaded.recipe.run.name}-{moment:%Y%m%d-%H%M%S}"
        root, cache = _unused(base), DEFAULT_ROOT / "cache"
    else:
        root, cache = data_dir, data_dir / "cache"
    lock = lock_folder(root, remedy="end it first, or give another --data-dir")
    try:
        changes: list[str] = []
        if resumed := (root / "run.json").exists():
            record, changes = _stored_record(root, loaded)
        else:
            record = _create(root, cache, loaded, moment)
        if changes:
            (root / _TRAINER_RECIPE).write_text(loaded.yaml_text)
    except BaseException:
        lock.release()
        raise
    return RunFolder(
        root.resolve(), cache.resolve(), record, resumed=resumed, lock=lock, changes=tuple(changes)
    )


def recipe_digest(recipe: Recipe, *, code_sha256: bytes) -> str:
    """sha256 over the resolved recipe without the number of steps it trains, and its code, as hex."""
    resolved = recipe.model_dump(mode="json")
    for section in (resolved["run"], *resolved["policies"].values()):
        # 0 is part of it: such a run has no window for training, whatever number comes later.
        if section["steps"] != 0:
            del section["steps"]
    text = json.dumps(resolved, sort_keys=True)
    return hashlib.sha256(text.encode() + b"\0" + code_sha256).hexdigest()


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
    digest = recipe_digest(loaded.recipe, code_sha256=loaded.code_sha256)
    record = RunRecord(SCHEMA_VERSION, loaded.recipe.run.name, digest, moment.isoformat())
    (root / _RECIPE).write_text(loaded.yaml_text)
    _write_record(root, record)
    return record


def _write_record(root: Path, record: RunRecord) -> None:
    draft = root / ".run.json"
    draft.write_text(json.dumps(asdict(record), indent=2) + "\n")
    draft.replace(root / "run.json")


def _read_record(path: Path) -> dict[str, Any]:
    try:
        stored = json.loads(path.read_text())
    except ValueError as error:
        raise IncompatibleError(
            f"{path} is damaged ({error}); restore it, or give another --data-dir"
        ) from error
    return stored if isinstance(stored, dict) else {}


def _stored_record(root: Path, loaded: LoadedRecipe) -> tuple[RunRecord, list[str]]:
    """The run that is there, and where `loaded` differs from its recipe for trainers. Raises ConflictError where it
    differs otherwise.
    """
    stored = _read_record(root / "run.json")
    if stored.get("schema_version") != SCHEMA_VERSION:
        raise IncompatibleError(
            f"{root} was written with schema version {stored.get('schema_version')}, this release "
            f"reads {SCHEMA_VERSION}; give a new --data-dir"
        )
    record = RunRecord(**stored)
    if record.recipe_sha256 == recipe_digest(loaded.recipe, code_sha256=loaded.code_sha256):
        return record, []
    try:
        own = parse_recipe((root / _RECIPE).read_text(), source=str(root / _RECIPE)).recipe
    except FileNotFoundError as error:
        raise ConflictError(
            f"{root} holds run {record.run_id!r} of another recipe, and its {_RECIPE} is gone; give another --data-dir"
        ) from error
    try:
        changes = trainer_changes(own, loaded.recipe)
    except ConflictError as error:
        raise ConflictError(
            f"{root} holds run {record.run_id!r} of another recipe: {error.message}; or give another --data-dir"
        ) from error
    if record.recipe_sha256 != (digest := recipe_digest(own, code_sha256=loaded.code_sha256)):
        raise ConflictError(
            f"{root} holds run {record.run_id!r} of a recipe with other code (its run.json says digest "
            f"{record.recipe_sha256[:12]}, with the code here it is {digest[:12]}); give another --data-dir, or the "
            "files that the run was started with"
        )
    return record, changes
