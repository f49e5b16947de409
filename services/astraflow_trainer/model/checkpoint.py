"""Checkpoints of the trainer: masters, moments, schedule position, running baselines and random state, in DCP format.

Saving has two halves: `stage` copies memory on the training thread, `write` makes the copy durable from any
thread. Invariant: a directory named `step-…` is complete (everything in it was synced before the rename that
named it) and restoring it continues bit for bit; anything else is a leftover and is ignored. What storage changed since
is found by `set_aside_damaged` before anything is read. Called by the loop.
"""

import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors

from astraflow_kit import failpoints
from astraflow_kit.log import get_logger
from astraflow_kit.releases import refuse
from astraflow_trainer.model.integrity import Damaged, digests_of, require_unchanged, sealed, unsealed
from astraflow_trainer.model.optimizer import MasterOptimizer
from astraflow_trainer.ranks.reductions import OneRank, Ranks
from astraflow_weights.durable import replace_synced, sync_file, sync_folder

SCHEMA_VERSION = 4
_PREFIX = "step-"
_PARTIAL = ".partial-"
_DOOMED = ".doomed-"
_SUPERSEDED = "superseded-"
_DAMAGED = "damaged-"
_POSITION_FILE = "position.json"
_CRITIC = "critic."
_SUPERSEDED_KEPT = 2
"""Checkpoints of steps that were given up, beyond which the next checkpoint removes the oldest."""

log = get_logger(__name__)


class CheckpointError(ValueError):
    """A checkpoint does not fit this trainer; the message names the difference and the remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Where a run stands when its checkpoint is taken."""

    step: int
    """Last finished step (committed or skipped)."""
    version: int
    """Version that the weights are (to be) published as."""
    optimizer_steps: int
    """Committed steps: the position in the learning-rate schedule."""
    learning_rate: float | None = None
    """Peak that an operator set; None while the recipe's is in force."""
    baselines: Mapping[str, float] = field(default_factory=dict)
    """Running baselines of advantages after `step`, by name."""
    identity: str = ""
    """Identity of the run; empty where the server that made the run gave it none."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StagedCheckpoint:
    """A copy in memory, independent of the training that goes on."""

    position: Position
    tensors: dict[str, torch.Tensor]


class CheckpointStore:
    """Checkpoints of one policy in one directory, which all ranks share.

    `group` and `ranks` must not be used by anything else while `write` may run in another thread.
    """

    def __init__(
        self,
        directory: Path,
        *,
        keep: int,
        ranks: Ranks | None = None,
        group: dist.ProcessGroup | None = None,
        identity: str = "",
    ) -> None:
        """`identity` is the run's: what is written says whose it is."""
        if keep < 1:
            raise ValueError(f"keep {keep} must be at least 1, or nothing could be resumed")
        self._directory = directory
        self._keep = keep
        self._ranks = ranks or OneRank()
        self._group = group
        self._identity = identity
        directory.mkdir(parents=True, exist_ok=True)

    def steps(self) -> list[int]:
        """Steps with a complete checkpoint, ascending."""
        return _steps_in(self._directory)

    def positions(self) -> list[Position]:
        """Where the complete checkpoints stand, ascending by step. Raises IncompatibleError."""
        return read_positions(self._directory)

    def supersede_after(self, step: int) -> None:
        """Put checkpoints of later steps aside, under names of their own; a collective. Nothing is deleted."""
        self._as_first(lambda: self._supersede([later for later in self.steps() if later > step]))

    def stage(
        self,
        optimizer: MasterOptimizer,
        *,
        step: int,
        version: int,
        baselines: Mapping[str, float] | None = None,
        critic: MasterOptimizer | None = None,
    ) -> StagedCheckpoint:
        """Copy what a resume needs, of a `critic` too; costs one memory copy of masters and moments."""
        state = _state(optimizer, critic)
        tensors = {name: tensor.detach().to("cpu", copy=True) for name, tensor in state.items()}
        tensors[self._random_state_name()] = torch.get_rng_state()
        position = Position(
            step=step,
            version=version,
            optimizer_steps=optimizer.num_steps,
            learning_rate=optimizer.changed_learning_rate,
            baselines=dict(baselines or {}),
            identity=self._identity,
        )
        return StagedCheckpoint(position=position, tensors=tensors)

    def write(self, staged: StagedCheckpoint) -> Path:
        """Make `staged` durable and drop checkpoints beyond the newest `keep`. Blocking; a collective.

        Writing a step that exists already replaces no tensor: only a learning rate set since then is added. One
        of other weights, which were given up for an older version's, is replaced.
        """
        final = self._path(staged.position.step)
        leads = self._ranks.index == 0
        if self._agree(leads and self._holds(final, version=staged.position.version)):
            self._as_first(lambda: _update_learning_rate(final, staged.position.learning_rate))
            return final
        partial = self._directory / f"{_PARTIAL}{final.name}"
        self._as_first(lambda: shutil.rmtree(partial, ignore_errors=True))
        _save(staged.tensors, partial, group=self._group)
        failpoints.hit("trainer.checkpoint_half_written")
        self._as_first(lambda: self._commit(staged.position, partial=partial, final=final))
        self._as_first(lambda: self._drop([self._path(step) for step in self.steps()[: -self._keep]]))
        self._as_first(lambda: self._drop(self._superseded()[:-_SUPERSEDED_KEPT]))
        return final

    def restore(
        self,
        optimizer: MasterOptimizer,
        *,
        at_most: int | None = None,
        step: int | None = None,
        critic: MasterOptimizer | None = None,
    ) -> Position | None:
        """Load the newest complete checkpoint, or that of `step`, into `optimizer` and its model, and into a critic's;
        None when there is none.

        A collective. It may have been written by another number of ranks: masters and moments are spread anew,
        bit for bit. A rank takes up its own random state, or keeps the one it has where none was saved.
        Checkpoints after step `at_most` are put aside: the server forgot those steps, and they will be other ones.
        Raises CheckpointError when its schema, names or shapes differ from this trainer's.
        """
        if at_most is not None:
            self.supersede_after(at_most)
        wanted = max(self.steps(), default=-1) if step is None else step
        wanted = int(self._ranks.broadcast(str(wanted).encode()))
        if wanted < 0:
            return None
        path = self._path(wanted)
        position = _read_position(path / _POSITION_FILE)
        tensors = _state(optimizer, critic)
        random_state = torch.get_rng_state()
        _check_layout(tensors, path)
        if self._random_state_name() in _layout(path):
            tensors = {**tensors, self._random_state_name(): random_state}
        _load(tensors, path, group=self._group)
        optimizer.restored(num_steps=position.optimizer_steps, learning_rate=position.learning_rate)
        if critic is not None:
            critic.restored(num_steps=int(tensors[f"{_CRITIC}num_steps"]))
        torch.set_rng_state(random_state)
        return position

    def _path(self, step: int) -> Path:
        return self._directory / f"{_PREFIX}{step:012d}"

    def _holds(self, path: Path, *, version: int) -> bool:
        return path.exists() and _read_position(path / _POSITION_FILE).version == version

    def _random_state_name(self) -> str:
        return f"random_state.{self._ranks.index}"

    def _agree(self, flag: bool) -> bool:  # noqa: FBT001 - the flag is the whole message
        """What the first rank says: a shared file system may show a rename to others late."""
        mine = int(flag) if self._ranks.index == 0 else 0
        return bool(self._ranks.sum(torch.tensor(mine)))

    def _as_first(self, action: Callable[[], None]) -> None:
        """Run `action` on the first rank while the others wait for it."""
        if self._ranks.index == 0:
            action()
        self._ranks.sum(torch.tensor(0))

    def _commit(self, position: Position, *, partial: Path, final: Path) -> None:
        files = digests_of([path for path in partial.iterdir() if path.is_file()])
        (partial / _POSITION_FILE).write_text(_position_text(position, files))
        for path in partial.iterdir():
            sync_file(path)
        sync_folder(partial)
        if final.exists():
            self._supersede([position.step])
        partial.rename(final)
        sync_folder(self._directory)

    def _superseded(self) -> list[Path]:
        """What was put aside, oldest first."""
        return sorted(self._directory.glob(f"{_SUPERSEDED}*"))

    def _supersede(self, steps: Sequence[int]) -> None:
        for step in steps:
            aside = self._superseded()
            number = int(aside[-1].name.split("-")[1]) + 1 if aside else 1
            path = self._path(step)
            kept = path.rename(self._directory / f"{_SUPERSEDED}{number:06d}-{path.name}")
            log.warning("checkpoint.superseded", step=step, kept_as=str(kept))

    def _drop(self, paths: Sequence[Path]) -> None:
        """Renamed first: a crash in the middle of a removal must not leave a step that looks complete."""
        for path in paths:
            doomed = self._directory / f"{_DOOMED}{path.name}"
            shutil.rmtree(doomed, ignore_errors=True)
            path.rename(doomed)
        for leftover in [*self._directory.glob(f"{_DOOMED}*"), *self._directory.glob(f"{_PARTIAL}*")]:
            shutil.rmtree(leftover)


def read_positions(directory: Path) -> list[Position]:
    """Where the complete checkpoints of a folder stand, ascending by step; none where there is no folder. Raises
    IncompatibleError for one of another release.
    """
    return [
        _read_position(directory / f"{_PREFIX}{step:012d}" / _POSITION_FILE) for step in _steps_in(directory)
    ]


def _steps_in(directory: Path) -> list[int]:
    names = (path.name for path in directory.glob(f"{_PREFIX}*"))
    return sorted(int(name.removeprefix(_PREFIX)) for name in names)


def _state(optimizer: MasterOptimizer, critic: MasterOptimizer | None) -> dict[str, torch.Tensor]:
    """What a checkpoint holds by flat name, besides random states: the tensors themselves."""
    state = optimizer.state()
    if critic is not None:
        state |= {f"{_CRITIC}{name}": tensor for name, tensor in critic.state().items()}
        state[f"{_CRITIC}num_steps"] = torch.tensor(critic.num_steps)
    return state


def _save(tensors: dict[str, torch.Tensor], path: Path, *, group: dist.ProcessGroup | None) -> None:
    with _quiet():
        save_tensors(
            tensors,
            storage_writer=FileSystemWriter(path, sync_files=True),
            process_group=group,
            no_dist=group is None,
        )


def _load(tensors: dict[str, torch.Tensor], path: Path, *, group: dist.ProcessGroup | None) -> None:
    with _quiet():
        load_tensors(
            tensors,
            storage_reader=FileSystemReader(path),
            process_group=group,
            no_dist=group is None,
        )


def _layout(path: Path) -> dict[str, tuple[int, ...]]:
    metadata = FileSystemReader(path).read_metadata().state_dict_metadata
    return {
        name: tuple(entry.size)
        for name, entry in metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def _check_layout(tensors: dict[str, torch.Tensor], path: Path) -> None:
    saved = {name: shape for name, shape in _layout(path).items() if not name.startswith("random_state.")}
    mine = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if saved != mine:
        name = min(name for name in saved.keys() | mine.keys() if saved.get(name) != mine.get(name))
        raise CheckpointError(
            f"{path} holds {name} as {saved.get(name)}, this model needs {mine.get(name)}; "
            f"resume with the model and the optimizer that wrote it, or start in another data directory"
        )


def set_aside_damaged(directory: Path) -> int:
    """Read every complete checkpoint of a folder in full and rename those that are not what was written.

    Returns how many damaged ones, of this and earlier calls, are newer than all that are whole. Nothing is deleted.
    Raises IncompatibleError for one of another release.
    """
    for path in sorted(directory.glob(f"{_PREFIX}*")):
        try:
            require_unchanged(path, _read(path / _POSITION_FILE)[1])
        except Damaged as fault:
            number = len(list(directory.glob(f"{_DAMAGED}*"))) + 1
            kept = path.rename(directory / f"{_DAMAGED}{number}-{path.name}")
            sync_folder(directory)
            log.error("checkpoint.damaged", fault=str(fault), kept_as=str(kept))
    whole = max((path.name for path in directory.glob(f"{_PREFIX}*")), default="")
    return sum(path.name.split("-", 2)[2] > whole for path in directory.glob(f"{_DAMAGED}*"))


def require_whole(directory: Path, *, step: int, version: int) -> None:
    """Raise CheckpointError unless the folder has a checkpoint of the step and its version, as it was written."""
    held = {position.step: position.version for position in read_positions(directory)}
    if held.get(step) != version:
        kept = ", ".join(f"step {at} (version {of})" for at, of in held.items()) or "none"
        raise CheckpointError(
            f"{directory} has no checkpoint of step {step} with version {version}; it has {kept}. Leave "
            "--source-work-dir out to start with a fresh optimizer"
        )
    path = directory / f"{_PREFIX}{step:012d}"
    try:
        require_unchanged(path, _read(path / _POSITION_FILE)[1])
    except Damaged as fault:
        raise CheckpointError(
            f"{path} is damaged: {fault}. Leave --source-work-dir out to start with a fresh optimizer"
        ) from fault


def _read_position(path: Path) -> Position:
    return _read(path)[0]


def _read(path: Path) -> tuple[Position, dict[str, str]]:
    """Where a checkpoint stands, and the digests of its files. Raises IncompatibleError for one of another release,
    Damaged.
    """
    content = unsealed(path)
    found = content.pop("schema_version", None)
    if found != SCHEMA_VERSION:
        raise refuse(
            f"checkpoint {path}",
            format_="checkpoint",
            found=found,
            reads=[SCHEMA_VERSION],
            otherwise="start a run of its own from the newest weights, in another folder",
        )
    return Position(**{key: value for key, value in content.items() if key != "files"}), content["files"]


def _position_text(position: Position, files: Mapping[str, str]) -> str:
    return sealed({"schema_version": SCHEMA_VERSION, **asdict(position), "files": dict(files)})


def _update_learning_rate(path: Path, learning_rate: float | None) -> None:
    """Replace the position file by one with another learning rate; whole at every moment."""
    position, files = _read(path / _POSITION_FILE)
    if position.learning_rate == learning_rate:
        return
    text = _position_text(replace(position, learning_rate=learning_rate), files)
    replace_synced(path / _POSITION_FILE, text.encode())


@contextmanager
def _quiet() -> Iterator[None]:
    """DCP warns about its own use of deprecated storage types, which a user can do nothing about."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"torch\.distributed")
        yield
