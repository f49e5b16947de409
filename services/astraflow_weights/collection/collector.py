"""Collects the parts that nobody needs any more, in rounds: mark, tombstone, grace, decide, sweep.

Invariant: a part is deleted only after everything that could have come to need it since it was marked has been
asked for again: the log, the added paths, upload intents, pull leases and the roots. Between two steps nothing is
held that matters: a collector that dies is followed up by the next one, and any number may work at once.
`step` never waits; the compactor calls it beside training, `astraflow weights gc` in a loop.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass
from enum import Enum

from astraflow_kit.clock import Clock, SystemClock
from astraflow_kit.log import get_logger
from astraflow_weights.collection.retention import Retention, Roots, retained
from astraflow_weights.collection.rounds import OpenRound, Rounds
from astraflow_weights.errors import Edge, StateInDoubt
from astraflow_weights.settings import CollectionSettings
from astraflow_weights.store import ObjectStore
from astraflow_weights.store.layout import PolicyKeys
from astraflow_weights.versions.collection_records import Sweep, stored_leases
from astraflow_weights.versions.history import VersionRecord
from astraflow_weights.versions.identity import read_identity
from astraflow_weights.versions.intents import FoundIntents, find_intents
from astraflow_weights.versions.log import VersionLog, path_key
from astraflow_weights.versions.manifest import PartRef
from astraflow_weights.versions.standing import Known, compare

log = get_logger(__name__)

# Clocks of pullers and collectors may differ by so much; nothing but a repeated fetch depends on it.
_LEASE_SLACK_S = 60.0
_POLL_S = 30.0


class Stage(Enum):
    """What a step did, or waits for."""

    NOTHING = "nothing to collect"
    LOOK_AGAIN = "parts that nothing names are looked at again before they are marked"
    BEGUN = "a round began"
    GRACE = "the grace of a round has not passed"
    WRITERS = "a writer that may need parts of the round is at work"
    SWEPT = "a round was swept"


@dataclass(frozen=True, kw_only=True)
class Share:
    """Parts that are there for one reason."""

    why: str
    paths: int
    parts: int
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class Survey:
    """What the store holds, by what it is kept for; `garbage` maps names to sizes."""

    horizon: int
    kept: tuple[Share, ...]
    garbage: Mapping[bytes, int]
    unnamed: Mapping[bytes, int]
    """Parts that nothing names: a writer may be about to."""
    lost: tuple[int, ...]
    unreadable: tuple[int, ...]
    """Versions that should stay and whose entries nobody can read: while there are any, what nothing names is kept."""
    broken_paths: int
    """Added paths that name parts which are gone; a round deletes them."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """Outcome of a step; `wait_s` says when the next one may find something new."""

    stage: Stage
    number: int = -1
    wait_s: float = 0.0
    num_parts: int = 0
    size_bytes: int = 0


@dataclass(kw_only=True)
class _Watch:
    """An open round as this process follows it: since when, and which intents must end first."""

    sha256: bytes
    since_s: float
    intents: frozenset[str]


@dataclass(kw_only=True)
class _Suspects:
    """Parts that nothing named, and the intents that were open then or before: only these can come to name them."""

    names: frozenset[bytes]
    intents: frozenset[str]


class Collector:
    """One owner per object: not thread-safe.

    collector = Collector(store, run_id="r1", policy_id="solver", roots=lambda: Roots(pinned=...))
    while collector.step().stage is not Stage.NOTHING: ...
    """

    def __init__(
        self,
        store: ObjectStore,
        *,
        run_id: str,
        policy_id: str,
        roots: Callable[[], Roots],
        settings: CollectionSettings | None = None,
        clock: Clock | None = None,
        log: VersionLog | None = None,
    ) -> None:
        """`roots` is asked before every mark and every sweep; while it raises, or its server contradicts the log,
        nothing is collected. What `log` has read is not read again; it is the collector's from now on.
        """
        self._store = store
        self._roots = roots
        self._settings = settings or CollectionSettings()
        self._clock = clock or SystemClock()
        self._keys = PolicyKeys(run_id, policy_id)
        self._log = log or VersionLog(store, run_id=run_id, policy_id=policy_id)
        self._rounds = Rounds(store, keys=self._keys, clock=self._clock)
        self._watch: _Watch | None = None
        self._suspects: _Suspects | None = None

    def step(self, *, stopping: Callable[[], bool] = lambda: False) -> Step:
        """Take a round as far as it goes now. Raises as store, log and `roots` do; call again."""
        # First: whoever writes an intent after this has read every tombstone that is there now.
        found = self._rounds.open()
        return self._begin() if found is None else self._follow(found, stopping=stopping)

    def look(self) -> Survey:
        """`survey`, noting parts that nothing names: the next step collects them if nobody has come to name them."""
        survey = self.survey()
        self._suspects = self._suspected(survey)
        return survey

    def survey(self) -> Survey:
        """What a round would mark now, and what is kept why. Changes nothing."""
        self._log.refresh()
        present = self._present()
        retention = self._retention(present)
        leased = self._leased()
        kept = {name: why for name, why in retention.parts.items() if name in present}
        kept |= {name: "being pulled" for name in leased if name in present and name not in kept}
        named = self._named()
        return Survey(
            horizon=retention.horizon,
            kept=_shares(kept, present=present, paths=retention.paths),
            garbage={name: size for name, size in present.items() if name in named and name not in kept},
            unnamed={name: size for name, size in present.items() if name not in named and name not in kept},
            lost=retention.lost,
            unreadable=retention.unreadable,
            broken_paths=len(self._paths_without(present.keys())),
        )

    def _begin(self) -> Step:
        """Mark, and begin a round when there is something to collect."""
        before = self._intents()
        survey = self._survey_and_tidy(before)
        strays = self._confirmed(survey, before)
        self._suspects = self._suspected(survey)
        garbage = {**survey.garbage, **strays}
        if not garbage and not survey.broken_paths:
            stage = Stage.LOOK_AGAIN if survey.unnamed and not survey.unreadable else Stage.NOTHING
            return Step(stage=stage, wait_s=_POLL_S if self._suspects else self._settings.grace_s)
        self._rounds.begin(frozenset(garbage))
        self._watch = None
        size_bytes = sum(garbage.values())
        log.info("collection.begun", parts=len(garbage), size_bytes=size_bytes, horizon=survey.horizon)
        return Step(
            stage=Stage.BEGUN,
            wait_s=self._settings.grace_s,
            num_parts=len(garbage),
            size_bytes=size_bytes,
        )

    def _survey_and_tidy(self, before: FoundIntents) -> Survey:
        survey = self.survey()
        for key in before.over:
            self._store.delete(key)
        self._rounds.forget()
        return survey

    def _confirmed(self, survey: Survey, before: FoundIntents) -> dict[bytes, int]:
        """Parts that nothing named when last looked at, and nothing names although all who might have has ended."""
        suspects = self._suspects
        if suspects is None or survey.unreadable:
            return {}
        suspects.intents &= before.live
        if suspects.intents:
            return {}
        return {name: size for name, size in survey.unnamed.items() if name in suspects.names}

    def _suspected(self, survey: Survey) -> _Suspects | None:
        """What to look at again. While earlier suspects are not settled they stay, so that each is in time."""
        if self._suspects is not None and self._suspects.intents:
            return self._suspects
        if not survey.unnamed or survey.unreadable:
            return None
        return _Suspects(names=frozenset(survey.unnamed), intents=self._intents().live)

    def _follow(self, found: OpenRound, *, stopping: Callable[[], bool]) -> Step:
        """Decide and sweep the open round once its time has come."""
        number = found.tombstone.number
        self._log.refresh()
        live = self._intents().live
        now_s = self._clock.monotonic_s()
        if self._watch is None or self._watch.sha256 != found.sha256:
            self._watch = _Watch(sha256=found.sha256, since_s=now_s, intents=live)
        watch = self._watch
        watch.intents &= live
        waited_s = max(now_s - watch.since_s, self._clock.wall_time_s() - found.tombstone.created_time_s)
        if waited_s < self._settings.grace_s:
            wait_s = self._settings.grace_s - waited_s
            return Step(stage=Stage.GRACE, number=number, wait_s=wait_s)
        if watch.intents:
            return Step(stage=Stage.WRITERS, number=number, wait_s=_POLL_S)
        return self._sweep(found, stopping=stopping)

    def _sweep(self, found: OpenRound, *, stopping: Callable[[], bool]) -> Step:
        # Every intent of before the tombstone has ended: what they made visible is read now.
        self._log.refresh()
        present = self._present()
        sweep = self._rounds.decide(self._decision(found, present))
        num_parts = self._rounds.carry_out(found, sweep, stopping=stopping)
        self._watch = None
        deleted = (found.tombstone.parts - sweep.kept_parts) & present.keys()
        size_bytes = sum(present[name] for name in deleted)
        log.info("collection.swept", round=sweep.number, parts=num_parts, size_bytes=size_bytes)
        return Step(stage=Stage.SWEPT, number=sweep.number, num_parts=len(deleted), size_bytes=size_bytes)

    def _decision(self, found: OpenRound, present: Mapping[bytes, int]) -> Sweep:
        parts = found.tombstone.parts
        leased, retention = self._leased(), self._retention(present)
        kept = parts & (retention.parts.keys() | leased)
        if retention.unreadable:
            # What the entries that nobody can read name cannot be told from what nothing names.
            kept |= parts - self._named()
        deleted = parts - kept
        gone = frozenset(
            Edge(version=record.version, base_version=base)
            for record in self._log.records
            for base, refs in _manifest_paths(record)
            if any(ref.sha256 in deleted for ref in refs)
        )
        return Sweep(
            number=found.tombstone.number,
            kept_parts=kept,
            paths=gone,
            added_paths=tuple(self._paths_without(present.keys() - deleted)),
            tombstone_sha256=found.sha256,
            created_time_s=self._clock.wall_time_s(),
        )

    def _paths_without(self, there: Set[bytes]) -> list[str]:
        """Keys of added paths with a part that is not there: about to go, or of a writer that had been given up."""
        return sorted(
            path_key(self._keys, path)
            for record in self._log.records
            for path in record.added
            if any(ref.sha256 not in there for ref in path.parts)
        )

    def _retention(self, present: Mapping[bytes, int]) -> Retention:
        roots = self._roots()
        self._require_agreement(roots)
        return retained(
            self._log,
            roots,
            keep_snapshots=self._settings.keep_snapshots,
            present=present,
            doomed=self._rounds.names(),
        )

    def _require_agreement(self, roots: Roots) -> None:
        """A server whose Redis came back older or empty has forgotten pins: nothing is deleted on its word."""
        if roots.standing is None:
            return
        log = self._log.copy()
        log.refresh_entries()  # what was announced since it was read is no contradiction
        known = Known(store_identity=read_identity(self._store, self._keys), versions=log.records)
        if (doubt := compare(roots.standing, known)) is not None:
            raise StateInDoubt(f"nothing is collected: {doubt.message}")

    def _present(self) -> dict[bytes, int]:
        """Size of every part in the store by sha256."""
        prefix, found = self._keys.parts, {}
        for info in self._store.list(prefix):
            name = info.key.removeprefix(prefix).removesuffix(".afwd")
            # What does not have a part's name was not put there by us.
            if len(name) == 64 and info.key == self._keys.part(name):
                found[bytes.fromhex(name)] = info.size_bytes
        return found

    def _named(self) -> set[bytes]:
        """Parts that a manifest or an added path names, collected or not."""
        named: set[bytes] = set()
        for record in self._log.records:
            named.update(part.sha256 for part in record.snapshot or ())
            named.update(part.sha256 for delta in record.deltas for part in delta.parts)
            named.update(part.sha256 for path in record.added for part in path.parts)
        return named

    def _intents(self) -> FoundIntents:
        epoch = self._log.owner.epoch if self._log.owner else 0
        return find_intents(self._store, keys=self._keys, epoch=epoch, now_s=self._clock.wall_time_s())

    def _leased(self) -> frozenset[bytes]:
        """Parts that nodes are fetching; leases that ended by themselves are removed."""
        names: set[bytes] = set()
        for key, lease in stored_leases(self._store, keys=self._keys):
            if self._clock.wall_time_s() - lease.expires_time_s > _LEASE_SLACK_S:
                self._store.delete(key)
            else:
                names |= lease.parts
        return frozenset(names)


def _manifest_paths(record: VersionRecord) -> Iterator[tuple[int | None, tuple[PartRef, ...]]]:
    """Base and parts of each path of the manifest that was not collected."""
    if record.snapshot is not None and None not in record.swept:
        yield None, record.snapshot
    for delta in record.deltas:
        if delta.base_version not in record.swept:
            yield delta.base_version, delta.parts


def _shares(
    kept: Mapping[bytes, str], *, present: Mapping[bytes, int], paths: Mapping[Edge, str]
) -> tuple[Share, ...]:
    num_paths = Counter(paths.values())
    return tuple(
        Share(
            why=why,
            paths=num_paths[why],
            parts=sum(found == why for found in kept.values()),
            size_bytes=sum(present[name] for name, found in kept.items() if found == why),
        )
        for why in dict.fromkeys(kept.values())
    )
