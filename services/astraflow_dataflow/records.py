"""The plain values that travel between store, domain and servicers.

What the contract has a message for travels as that message; here is the rest, frozen and free of Redis. Times are
milliseconds of Redis' clock unless a name says otherwise; ids are the contract's ids.
"""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from google.protobuf.timestamp_pb2 import Timestamp

from astraflow.dataflow.v1.batch_pb2 import Batch, BatchItem
from astraflow.plugins import Group
from astraflow.rollout.v1.task_pb2 import Lease

_FOR_GROUPS = frozenset({"ready_groups", "batch_needs", "selector"})
"""Waits of a trainer that nodes could end; `store/lua/batches.lua` has the same."""


class Life(Enum):
    """Life of a run, as stored."""

    ACTIVE = "active"
    FINISHING = "finishing"
    FINISHED = "finished"


class Level(Enum):
    """What acknowledgements wait for."""

    MEMORY = "memory"
    FSYNCED = "fsynced"
    REPLICATED = "replicated"


@dataclass(frozen=True, kw_only=True)
class CompleteTask:
    """A complete task before its groups are judged."""

    task_id: str
    why: str
    """Empty when all members came; else why it was closed: `dead_letter`, `expired`, `run_finished`."""
    credited: frozenset[str] | None
    """Roles that were charged for it; None when it was never leased, and then every role counts as charged."""
    group_size: int
    num_finished: int
    groups: Sequence[Group]
    """In a fixed order; their verdicts are empty."""
    items: Sequence[Batch]
    """Of each group what a batch says of it, made before any plug-in saw the group."""


@dataclass(frozen=True, kw_only=True)
class Offer:
    """What a node gets: leases, why there are not more, and whether another node might get something."""

    leases: Sequence[Lease]
    waiting_for: str
    more: bool = False


@dataclass(frozen=True, kw_only=True)
class Hedging:
    """When tasks are leased a second time: once a lease is older than `after_s`, copies being at most `max_share` of
    the leases, or one.
    """

    after_s: float
    """0: never."""
    max_share: float


NO_HEDGES = Hedging(after_s=0.0, max_share=0.0)


@dataclass(frozen=True, kw_only=True)
class Pace:
    """What a node can do: `slots` tasks at once, each of which takes `task_s`."""

    node_id: str
    slots: int
    task_s: float


@dataclass(frozen=True, kw_only=True)
class Selection:
    """What is wanted of `acquire`: `offer` asks for the ready groups, `take` binds the chosen ones, `wait` notes that a
    selector wants others, `lack` that the batch needs others and what it lacks.
    """

    mode: str
    chosen: tuple[str, ...] = ()
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class Candidates:
    """Ready groups as (id, score, serialized Batch of items), nearest deadline first; a score is the oldest version
    × 2^32 + the arrival. `outstanding` counts groups still leased.
    """

    outstanding: int
    more_come: bool
    """Whether others are outstanding, or may be leased yet."""
    lacked_s: float
    """Time since the step first lacked what its batch needs."""
    groups: tuple[tuple[str, float, bytes], ...]


@dataclass(frozen=True, kw_only=True)
class RouteCount:
    """Groups of one policy that a route took elsewhere: `verdict` is `evaluated_NAME` or `routed_NAME`."""

    verdict: str
    policy_id: str
    groups: int
    trajectories: int
    reward_sum: float


@dataclass(frozen=True, kw_only=True)
class StoredEvaluation:
    """One pass over held-out tasks, or over tasks that came with the request for it."""

    evaluation_id: str
    versions: Mapping[str, int]
    """Of each trained policy; while it waits, those that were named."""
    planned: int
    """Samples, `samples_per_task` of each task."""
    samples_per_task: int
    final: bool
    state: str
    """`waiting`, `open`, `complete`, `given_up` or `cancelled`."""
    fed: int
    done: int
    failed: int
    samples: Mapping[str, int]
    """Episodes with a trajectory of the policy."""
    rewards: Mapping[tuple[str, str], tuple[float, int]]
    """Of each (policy, role): the sum of rewards, and of how many trajectories."""
    metrics: Mapping[str, tuple[float, int]]
    """Of each episode metric: the sum, and of how many episodes."""
    complete_ms: int
    create_ms: int = 0
    requested: bool = False
    """Somebody asked for it; the others are the recipe's."""
    has_own_tasks: bool = False
    reason: str = ""
    """Why it was given up."""

    @property
    def is_scarce(self) -> bool:
        """Whether it was ended with so few episodes that their mean says nothing."""
        return self.state in ("given_up", "cancelled") and 4 * self.done < self.planned

    @property
    def task_stem(self) -> str:
        """What the ids of its tasks begin with: versions and name."""
        versions = ".".join(map(str, self.versions.values()))
        return f"{versions}:{self.evaluation_id}" if self.requested else self.evaluation_id


@dataclass(frozen=True, kw_only=True)
class ArchiveEntry:
    """Trajectories of one group whose part in the run is over, not in the archive yet."""

    entry_id: str
    """`<milliseconds>-<number>`, ascending: when they were dropped or released."""
    policy_id: str
    step: int
    """That they were bound to; else the next one of their policy."""
    reason: str
    """`trained`, or why they were dropped."""
    batch_id: str
    """Empty when they were in none."""
    items: Sequence[BatchItem]
    places: Sequence[str]
    """Where their payloads are; each begins with the id of the episode."""
    """Of each item."""


@dataclass(frozen=True, kw_only=True)
class ArchiveState:
    """Trajectories of a run on their path to the archive, and why it cannot be written to, if so."""

    waiting: int
    waiting_bytes: int
    written: int
    written_bytes: int
    given_up: int
    given_up_ms: int
    problem: str
    problem_ms: int


@dataclass(frozen=True, kw_only=True)
class TrainerReport:
    """What a trainer said that it waits for. Times are milliseconds of Redis' clock."""

    reason: str
    detail: str
    progress: float | None
    since_ms: int
    heard_ms: int
    """When it said so last."""


@dataclass(frozen=True, kw_only=True)
class PolicyState:
    """One policy inside an audit."""

    policy_id: str
    frozen: bool
    """Not trained."""
    external: bool
    """An endpoint elsewhere: it has no versions."""
    outstanding: int
    ready: int
    unpublished: int
    credit: int
    acceptance: float
    groups_per_step: int
    epoch: int
    finished_step: int
    durable_step: int
    version: int | None
    finish_ms: int
    wait: str
    wait_since_ms: int
    wait_until_ms: int
    staleness: Mapping[int, int]
    """Staleness in versions → trajectories bound so far."""
    recent: tuple[tuple[float, int], ...]
    """(reward sum, trajectories) of the last complete groups, newest first."""
    unpublished_steps: tuple[int, ...]
    last_consumed: str
    """Id of the newest entry of the consumed log at the time of the audit; empty when there is none."""
    charged: int
    """`outstanding`, counted again from the tasks that are not settled."""
    max_staleness: int
    no_credit: int
    """Trajectories dropped as `no_credit` so far."""
    settled: int
    """Trajectories of complete tasks so far."""
    trainer: str
    """Who claimed it last."""
    heard_ms: int
    """When that trainer last called; 0 when nobody holds the policy."""
    report: TrainerReport | None = None
    """What its trainer said last that it waits for; None when it waits for nothing that only it knows."""
    doubt: str = ""
    """Why its last trainer did not go on from what is here; empty when it did."""
    turn: str = ""
    """The policy whose turn it is to train; empty where all do."""
    turn_ends_step: int = 0
    """The step of that policy that ends its turn."""
    held: str = ""
    """What the barrier of the run holds its groups back for: `batch`, `training POLICY STEP`, `ended`; else empty."""
    lack: str = ""
    """What the batch needs that the ready groups do not have."""
    waited_ms: int = 0
    """For groups, in all waits of its trainers that are over."""

    def waited_until_ms(self, now_ms: int) -> int:
        """For groups so far: the wait that goes on counts as long as the trainer asks."""
        if self.wait not in _FOR_GROUPS:
            return self.waited_ms
        return self.waited_ms + max(0, min(now_ms, self.wait_until_ms) - self.wait_since_ms)

    @property
    def waits_for_turn_of(self) -> str:
        """The policy whose turn it is while this one waits for its own; else empty."""
        return "" if self.frozen or self.turn == self.policy_id else self.turn

    @property
    def lacks_version(self) -> bool:
        """Whether it cannot be asked before a version is announced."""
        return self.version is None and not self.external


@dataclass(frozen=True, kw_only=True)
class Audit:
    """One atomic snapshot of where a run's trajectories are."""

    now_ms: int
    life: Life
    counters: Mapping[str, int]
    is_whole: bool
    """Whether what is held was counted in the stored groups; else it is what the counters say."""
    held_assembling: int
    held_ready: int
    held_in_batch: int
    dead_letters: int
    queued_tasks: int
    exhausted: bool
    retries: int
    policies: tuple[PolicyState, ...]
    admitted: int
    """Training tasks that the windows and the quota have room for."""
    leases: int = 0
    max_leases: int = 0
    """The quota of the run; 0 without one."""

    @property
    def quota_left(self) -> int | None:
        """Leases that the quota has room for; None without one."""
        return max(0, self.max_leases - self.leases) if self.max_leases else None


@dataclass(frozen=True, kw_only=True)
class Recount:
    """What counters and stored groups differed by at one moment: all zeros unless there is a defect."""

    drift: Mapping[str, int]
    """Counter − stored trajectories, by place."""
    credit: Mapping[str, int]
    """Outstanding groups − those that stored tasks were charged, by policy."""


@dataclass(frozen=True, kw_only=True)
class Supply:
    """What the curator needs to know: how many tasks wait unleased, and how many (`credit`) could be leased now."""

    cursor: int
    exhausted: bool
    active: bool
    queued: int
    credit: int


@dataclass(frozen=True, kw_only=True)
class Pending:
    """What in a run only time changes."""

    life: Life
    num_open: int
    """Tasks that were leased and are not settled."""
    late_batches: frozenset[str]
    """Batches whose lease is over."""
    next_late_s: float | None
    """Time until the lease of another one is over."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """A wake-up: `topic` is `work`, `run`, `due`, `ready <policy>`, `version <policy>`, `node <id>`, or `durable` (of
    this process alone).
    """

    topic: str
    fields: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Refused:
    """Tasks that every asked node refused; `since_ms` is when the first of them, `example`, was given back."""

    count: int = 0
    example: str = ""
    since_ms: int = 0


@dataclass(frozen=True, kw_only=True)
class StepFigures:
    """What is kept of a finished step; see `store/lua/history.lua`."""

    step: int
    finish_ms: int
    names: tuple[str, ...]
    values: bytes
    """Binary32, little-endian, one for each name."""
    counts: str
    """What the server counted when it ended: name and number, a line each."""
    is_nameless: bool = False
    """It had figures under names for which there was no room."""

    @property
    def figures(self) -> dict[str, float]:
        """The values by name."""
        return dict(zip(self.names, struct.unpack(f"<{len(self.names)}f", self.values), strict=True))


@dataclass(frozen=True, kw_only=True)
class StoredTrace:
    """A task with the entries of its trace, oldest first; see `store/lua/trace.lua`."""

    task_id: str
    known: bool
    """Whether it was ever submitted."""
    state: str
    """Empty when only the id is left."""
    attempt: int
    group_size: int
    missing: int
    lane: str
    why: str
    refused_by: tuple[str, ...]
    deadline_ms: int
    """Of the running lease; 0 without one."""
    entries: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Ability:
    """What a Redis can say about what is safe."""

    name: str
    append_only: bool
    appendfsync: str
    """`always`, `everysec` or `no`; `unknown` where Redis does not tell."""
    has_waitaof: bool
    replicas: int


@dataclass(frozen=True, kw_only=True)
class Beat:
    """Positions of runs, read before a write; `is_safe` when that write, and so all before it, is."""

    incarnation: str
    positions: Mapping[str, int]
    is_safe: bool


def timestamp(milliseconds: int) -> Timestamp:
    """Return a time of Redis' clock as the contract's."""
    seconds, rest = divmod(milliseconds, 1000)
    return Timestamp(seconds=seconds, nanos=rest * 1_000_000)
