"""Whether the dataflow server, the store and the checkpoints of a policy can tell of one past.

The server's state is in Redis, which may come back older or empty; the store's log and the trainer's checkpoints then
know more. `compare` is pure: it says whether that is what Redis may lose when it dies, which the trainer makes up for
by rule, or more, which only a person may accept. Trainers ask before they go on, collectors before they delete.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

LOSS_WINDOW_S = 3.0
"""Redis may lose what it answered in so many seconds before it died: `appendfsync everysec` on a busy disk."""


@dataclass(frozen=True, kw_only=True)
class ServerStanding:
    """What the dataflow server knows of a policy."""

    identity: str
    """Of the run; empty where an older release created it."""
    finished_step: int
    version: int | None
    """Newest announced one."""
    durable_step: int = 0
    """Counts only beside checkpoints."""


class StoredVersion(Protocol):
    """A version of the log, oldest first and numbered without gaps."""

    @property
    def version(self) -> int:
        """Its number."""

    @property
    def step(self) -> int:
        """The step that made it."""

    @property
    def created_time_s(self) -> float:
        """When its manifest was written, by its trainer's clock."""


@dataclass(frozen=True, kw_only=True)
class Known:
    """What store and checkpoints know of it. Empty identities are unknown."""

    store_identity: str = ""
    versions: Sequence[StoredVersion] = ()
    checkpoint_identity: str = ""
    checkpoint_steps: tuple[int, ...] = ()
    """Ascending."""
    checkpoint_version: int | None = None
    """Version of the newest checkpoint."""

    @property
    def identity(self) -> str:
        """The run they belong to; empty when neither says."""
        return self.store_identity or self.checkpoint_identity

    @property
    def step(self) -> int:
        """The highest step that either knows."""
        return max(self.versions[-1].step if self.versions else 0, *self.checkpoint_steps, 0)


@dataclass(frozen=True, kw_only=True)
class Doubt:
    """Why nobody may go on, with both values and the remedies; `step` is where a person may let it go on."""

    message: str
    step: int | None


def compare(server: ServerStanding, known: Known) -> Doubt | None:
    """What contradicts, beyond what Redis may lose; None when the lower side catches up by rule."""
    newest = known.versions[-1].version if known.versions else -1
    announced = -1 if server.version is None else server.version
    if known.store_identity and known.checkpoint_identity not in ("", known.store_identity):
        return Doubt(message=_foreign_checkpoints(known), step=None)
    if known.identity and server.identity not in ("", known.identity):
        why = f"the dataflow server has a run of the same name, but of identity {server.identity}, not "
        return _beyond(
            f"{why}{known.identity}: its Redis is not the one that this run was trained with", server, known
        )
    if newest < max(announced, -1 if known.checkpoint_version is None else known.checkpoint_version):
        return Doubt(message=_short_store(server, known, newest=newest), step=None)
    lost_s = _lost_s(server, known.versions)
    if lost_s > LOSS_WINDOW_S:
        why = f"the dataflow server's Redis is older than the store: it lost {lost_s:.0f} s or more of what it answered"
        return _beyond(f"{why}, and may lose {LOSS_WINDOW_S:g} s", server, known)
    if _is_older_than_checkpoints(server, known.checkpoint_steps):
        return _beyond("the dataflow server's Redis is older than the checkpoints", server, known)
    return None


def _is_older_than_checkpoints(server: ServerStanding, steps: tuple[int, ...]) -> bool:
    """Whether what happened between two checkpoints is lost, or there is none to go back to from the newest."""
    if not steps or steps[-1] <= server.finished_step:
        return False
    resumable = max((step for step in steps if step <= server.finished_step), default=0)
    lacks_an_interval = len(steps) > 1 and server.finished_step < steps[-2]
    return lacks_an_interval or resumable < server.durable_step


def _lost_s(server: ServerStanding, versions: Sequence[StoredVersion]) -> float:
    """How long Redis had known the first step that it lost, at least; 0 when it lost none, or that cannot be said.

    A version is written after its step was answered, and the one before it was announced by then. So the last but
    one that the server does not know was announced after the first lost one was written.
    """
    unknown = [item for item in versions if server.version is None or item.version > server.version]
    lost = [item for item in unknown if item.step > server.finished_step]
    return unknown[-2].created_time_s - lost[0].created_time_s if lost and len(unknown) > 1 else 0.0


def _beyond(why: str, server: ServerStanding, known: Known) -> Doubt:
    step = known.checkpoint_steps[-1] if known.checkpoint_steps else None
    goes_on = step if step is not None else 0 if known.step == 0 else None
    accept = (
        "start with the --work-dir that has its checkpoints"
        if goes_on is None
        else f"accept the loss with --accept-data-loss: training goes on after step {goes_on}, from the checkpoint"
    )
    message = (
        f"{why}. The server knows steps up to {server.finished_step} and {_version(server.version)}; the store "
        f"{_version(known.versions[-1].version if known.versions else None)} of step "
        f"{known.versions[-1].step if known.versions else 0}; the newest checkpoint is "
        f"{'none' if step is None else f'of step {step}'}. Nothing was changed or deleted. Restore the Redis that has "
        f"step {known.step}, or {accept}"
    )
    return Doubt(message=message, step=goes_on)


def _short_store(server: ServerStanding, known: Known, *, newest: int) -> str:
    checkpoint = "none" if known.checkpoint_version is None else f"of {_version(known.checkpoint_version)}"
    return (
        f"the store has {_version(newest if newest >= 0 else None)}, but the dataflow server knows "
        f"{_version(server.version)} and the newest checkpoint is {checkpoint}: it is another store, is not mounted, "
        "or lost objects. Nothing was changed or deleted. Mount or restore the store that has them"
    )


def _foreign_checkpoints(known: Known) -> str:
    return (
        f"the checkpoints are of the run of identity {known.checkpoint_identity}, the store has that of "
        f"{known.store_identity}. Nothing was changed or deleted. Start with the --work-dir of this run"
    )


def _version(version: int | None) -> str:
    return "no version" if version is None else f"versions up to {version}"
