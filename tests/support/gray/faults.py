"""The table of gray failures: what is done to which part of a running loop, and what must be seen of it.

Every fault is healed after a while; what must hold then is the same for all: the loop trains on, and nothing was lost,
doubled or torn. `support.gray.life` lives them; tests/chaos/test_gray_failures.py asserts, and writes the table.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from support.damage import flip_a_byte
from support.gray.ground import Ground

DAEMONS = ("dataflow", "valkey", "trainer", "node", "engine", "launcher")
NO_SERVER = ("server_silent", "server_unreachable")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One row of the table."""

    name: str
    loop: str
    """Faults of one loop meet the same run, one after the other."""
    done: Callable[[Ground], AbstractContextManager[None]]
    lasts_s: float = 3.0
    """At least; it is not healed before it was noticed."""
    why: tuple[str, ...] = ()
    """One of these must be said by `astraflow why` while it lasts; none when nothing needs saying."""
    lines: tuple[str, ...] = ()
    """One of these must be said by the launcher's lines."""
    goes_on: bool = False
    """Steps are taken while it lasts."""
    restarts: tuple[str, ...] = ()
    """Roles whose process may be replaced."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment of the loop that meets it."""
    arguments: tuple[str, ...] = ()
    """Of `astraflow dev` in that loop."""
    in_ci: bool = False


def _frozen(role: str, seconds: float, *, loop: str, in_ci: bool = False, **seen: Any) -> Fault:
    return Fault(
        name=f"SIGSTOP {seconds:g} s: {role}",
        loop=loop,
        done=lambda ground: ground.frozen(role),
        lasts_s=seconds,
        in_ci=in_ci,
        **seen,
    )


def _dropped(role: str, ways: Mapping[str, bool], ground: Ground) -> AbstractContextManager[None]:
    return ground.dropped(role, **ways)


def _clocks(hours: float, *roles: str, in_ci: bool) -> Fault:
    return Fault(
        name=f"clock {hours:+g} h: {', '.join(roles) or 'everybody'}",
        loop="in turn" if in_ci else "clocks",
        done=lambda ground: ground.clocks_ahead(hours, *roles),
        goes_on=True,
        in_ci=in_ci,
    )


_SILENT = ("has answered nothing for",)
_SEEN: dict[str, dict[str, Any]] = {
    "dataflow": {"why": NO_SERVER, "lines": _SILENT},
    "valkey": {"why": ("redis_silent",), "lines": _SILENT},
    "trainer": {"lines": _SILENT},
    "node": {"why": ("no_node",), "lines": _SILENT},
    "engine": {"why": ("engine_hung",)},
    "launcher": {"goes_on": True},
}
"""What is seen of a daemon that stands still for 30 s; after 45 s the launcher replaces it (docs/hangs.md)."""
_BETWEEN_S = 15
"""Longer than nodes wait for a word of their server (`server_silence_s` + 2 s)."""
_WAYS_OF_PACKETS: Mapping[str, Mapping[str, bool]] = {
    "requests dropped": {"answers": False},
    "answers dropped": {"requests": False},
    "dropped both ways": {},
}
_DROPPED_IN_CI = (
    ("dataflow", "answers dropped"),
    ("dataflow", "dropped both ways"),
    ("valkey", "dropped both ways"),
)
_SILENCE_HERE_S = 25
"""What the launcher waits in the loop that CI has, before it replaces a process."""
_OTHERWISE_IN_CI = ("dataflow", "valkey", "node")
"""Whose silence ci meets in other rows: 15 s, packets that vanish, for good."""
FAULTS = (
    *(_frozen(role, 5, loop="in turn", in_ci=role not in _OTHERWISE_IN_CI) for role in DAEMONS),
    # In ci in place of 5 s: the same silence, and what follows it.
    _frozen("dataflow", _BETWEEN_S, loop="in turn", in_ci=True, **_SEEN["dataflow"]),
    Fault(
        name="SIGSTOP for good: node",
        loop="in turn",
        done=lambda ground: ground.replaced("node"),
        lasts_s=0.0,
        restarts=("node", "engine"),
        arguments=("--max-silence-s", str(_SILENCE_HERE_S)),
        in_ci=True,
        **_SEEN["node"],
    ),
    *(_frozen(role, 30, loop="30 s", restarts=("engine",), **_SEEN[role]) for role in DAEMONS),
    *(
        _frozen(role, seconds, loop=f"{seconds} s: {role}", restarts=tuple(DAEMONS[:-1]), **_SEEN[role])
        for seconds in (90, 180)
        for role in DAEMONS
    ),
    Fault(
        name="Redis paused: writes wait",
        loop="in turn",
        done=Ground.redis_writes_paused,
        why=("redis_silent",),
        lines=("redis_silent",),
    ),
    Fault(
        name="Redis full",
        loop="in turn",
        done=lambda ground: ground.redis_configured(maxmemory=1),
        why=("redis_full",),
        lines=("redis_full",),
    ),
    Fault(
        name="Redis read-only",
        loop="in turn",
        done=Ground.redis_read_only,
        why=("redis_read_only",),
        lines=("redis_read_only",),
    ),
    Fault(
        name="Redis' disk full",
        loop="in turn",
        done=lambda ground: ground.disk_full("redis"),
        why=("redis_disk_full",),
        lines=("redis_disk_full",),
    ),
    Fault(
        name="store full",
        loop="in turn",
        done=lambda ground: ground.disk_full("store"),
        why=("store_full",),
        lines=("store_full",),
        in_ci=True,
    ),
    Fault(
        name="store read-only",
        loop="in turn",
        done=Ground.store_read_only,
        why=("store_read_only",),
        lines=("store_read_only",),
        in_ci=True,
    ),
    Fault(
        name="store unmounted",
        loop="in turn",
        done=Ground.store_unmounted,
        why=("store_missing",),
        lines=("store_missing",),
        in_ci=True,
    ),
    Fault(
        name="store: new parts damaged",
        loop="in turn",
        done=Ground.store_parts_damaged,
        why=("weight_fault",),
    ),
    Fault(
        name="training thread hangs",
        loop="training thread",
        done=lambda ground: ground.reached("trainer.micro_batch"),
        why=("trainer_hung",),
        lines=("trainer_hung",),
        restarts=("trainer",),
        variables={
            "ASTRAFLOW_FAILPOINTS": "trainer.micro_batch=sleep:100000@20",
            "ASTRAFLOW_TRAINING_STALL_S": "20",
        },
    ),
    *(
        Fault(
            name=f"{owner}: {what}",
            loop="in turn",
            done=partial(_dropped, role, ways),
            why=said,
            lines=said,
            in_ci=(role, what) in _DROPPED_IN_CI,
        )
        for owner, role, said in (
            ("server's port", "dataflow", NO_SERVER),
            ("Redis' port", "valkey", ("redis_silent",)),
        )
        for what, ways in _WAYS_OF_PACKETS.items()
    ),
    *(
        _clocks(hours, *roles, in_ci=not roles)
        for hours in (3, -3)
        for roles in ((), *((role,) for role in DAEMONS))
    ),
    Fault(
        name="data dir shared by a second launch",
        loop="in turn",
        done=Ground.second_launch,
        lasts_s=0.0,
        lines=("in use by process",),  # in ci: tests/e2e/test_dev_locks.py
    ),
)


@dataclass(frozen=True, kw_only=True)
class Damage:
    """One row of the table: a file that is damaged while nothing runs, and then the same command again."""

    name: str
    loop: str
    file: str
    """Pattern below the data dir; of several files the newest is meant."""
    done: Callable[[Path], object]
    said: tuple[str, ...] = ()
    """One of these must be said by the launcher, or stand in a log; none when it is mended or not needed."""
    refused: bool = False
    """The launch ends with an error and leaves store and checkpoints as they are; it goes on with the file restored."""


def _cut_in_half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


_WAYS: dict[str, Callable[[Path], object]] = {"flipped": flip_a_byte, "cut in half": _cut_in_half}
_FILES: dict[str, tuple[str, dict[str, Any]]] = {
    "store: newest log entry": ("store/*/*/seq/*.pb", {}),
    "store: newest part": ("store/*/*/parts/*.afwd", {}),
    "store: latest": ("store/*/*/latest", {}),
    "store: identity": (
        "store/*/*/identity",
        {"said": ("of identity", "instead of 32 hex digits"), "refused": True},
    ),
    "node: mirror's weights": (
        "work/node-1/mirror/**/model.safetensors",
        {"said": ("weights.tiles_repaired", "weights.mirror_")},
    ),
    "node: mirror's state": ("work/node-1/mirror/**/state.json", {}),
    "node: incarnation": ("work/node-1/*/incarnation", {}),
    "launcher: metrics": ("metrics.jsonl", {}),
    "launcher: tokens": ("secrets/operator.token", {}),
    "launcher: addresses": ("addresses/dataflow.json", {}),
}
"""Other files that a launch finds: their pattern, and what is expected where they are not made anew or mended."""
_CHECKPOINT = "work/trainer-solver/checkpoints/step-*"
_CHECKPOINT_FILES = {"tensors": "*.distcp", "metadata": ".metadata", "position": "position.json"}
DAMAGES = (
    *(
        Damage(name=f"{what} {way}", loop=f"resume: {what.partition(':')[0]}", file=file, done=done, **seen)
        for what, (file, seen) in _FILES.items()
        for way, done in _WAYS.items()
    ),
    Damage(
        name="launcher: run.json cut in half",
        loop="resume: launcher",
        file="run.json",
        done=_cut_in_half,
        said=("is damaged",),
        refused=True,
    ),
    Damage(
        name="launcher: run.json flipped",
        loop="resume: launcher",
        file="run.json",
        done=flip_a_byte,
        said=("of a recipe with other code",),  # its digest
        refused=True,
    ),
    *(
        Damage(
            name=f"checkpoint: {what} {way}",
            loop="resume: checkpoint",
            file=f"{_CHECKPOINT}/{file}",
            done=done,
            said=("checkpoint.damaged",),
        )
        for what, file in _CHECKPOINT_FILES.items()
        for way, done in _WAYS.items()
    ),
    Damage(
        name="Redis: log cut in half",
        loop="resume: Redis",
        file="redis/appendonlydir/*.incr.aof",
        done=_cut_in_half,
        # A short log may have lost the run itself.
        said=("Redis is older than the", "the dataflow server has no such run"),
        refused=True,
    ),
    *(
        Damage(
            name=f"Redis: base {way}",
            loop="resume: Redis",
            file="redis/appendonlydir/*.base.rdb",
            done=done,
            said=("times as it started",),
            refused=True,
        )
        for way, done in _WAYS.items()
    ),
)
