"""The audit of a run that has ended: producers' journals × payload census × trainer's ledger × accounts × store.

Four records that are kept independently of each other must tell one story: what the nodes pushed and were
told, what Redis holds, what the trainer trained on, and what the store serves. Nothing acknowledged is lost
(it is in exactly one place, or was dropped for a reason that was counted), nothing is trained twice, no group
is split, and every version is whole. `audit` returns the violations in words; tests assert that there are none.
"""

import json
import shutil
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from astraflow_weights.store import open_store
from support import store_census
from support.development import POLICY, RUN_ID, RunFiles
from support.redis_census import Census, take_census

_KEPT = frozenset({"accepted", "accepted_late", "duplicate"})
_AT_THE_DOOR = frozenset({"poison", "superseded", "fenced", "late_closed"})
_SHOWN = 5


@dataclass
class Pushed:
    """What the producers say, by trajectory id; evaluations apart."""

    task_of: dict[str, str] = field(default_factory=dict)
    answers: dict[str, list[str]] = field(default_factory=dict)

    def kept(self, *, evaluations: bool) -> set[str]:
        """Ids whose last answer said that they are kept."""
        kept = [item for item, answers in self.answers.items() if answers[-1] in _KEPT]
        return {item for item in kept if _is_evaluation(self.task_of[item]) is evaluations}

    def unanswered(self, *, evaluations: bool) -> set[str]:
        """Ids sent whose answer nobody read: the node died."""
        unanswered = self.task_of.keys() - self.answers.keys()
        return {item for item in unanswered if _is_evaluation(self.task_of[item]) is evaluations}


@dataclass
class Audit:
    """What was compared, and what does not fit."""

    violations: list[str] = field(default_factory=list)
    figures: dict[str, int] = field(default_factory=dict)

    def refuse(self, text: str, items: Collection[object]) -> None:
        """Note a violation for the items that should not be."""
        self.require(not items, text, items)

    def require(self, holds: bool, text: str, items: Iterable[object] = ()) -> None:
        """Note a violation, with a few of the items it is about."""
        if not holds:
            named = sorted(map(str, items))
            shown = f": {len(named)}, such as {', '.join(named[:_SHOWN])}" if named else ""
            self.violations.append(f"{text}{shown}")


def audit(folder: Path) -> Audit:
    """Compare all records of the ended run below `folder`."""
    files, found = RunFiles(folder), Audit()
    pushed, ledger = read_pushes(files), files.read_ledger()
    scratch = folder / "audit"
    census = take_census(files.data_dir / "redis", RUN_ID, POLICY, scratch=scratch)
    trained = _check_steps(found, census, ledger)
    _check_groups(found, census, pushed, trained)
    _check_places(found, census, trained)
    _check_accounts(found, census, trained)
    _check_nothing_lost(found, census, pushed, trained)
    _check_evaluations(found, census, pushed)
    _check_store(found, census, files.data_dir / "store")
    shutil.rmtree(scratch, ignore_errors=True)
    found.figures |= {
        "pushed": len(pushed.task_of),
        "unanswered": len(pushed.unanswered(evaluations=False)),
        "trained": len(trained),
        "steps": len(census.consumed),
        "ledger lines": len(ledger),
        "held": len(census.owners),
        "dropped": sum(census.dropped.values()),
    }
    return found


def read_pushes(files: RunFiles) -> Pushed:
    """The journals of all nodes."""
    pushed = Pushed()
    for path in sorted((files.data_dir / "work").glob("*/*/pushes.jsonl")):
        for line in map(json.loads, path.read_text().splitlines()):
            for item in line["trajectory_ids"]:
                pushed.task_of[item] = line["task_id"]
                if line["at"] == "answered":
                    pushed.answers.setdefault(item, []).append(line["outcome"])
    return pushed


def _check_steps(found: Audit, census: Census, ledger: Sequence[dict[str, Any]]) -> dict[str, int]:
    """Committed steps against the trainer's ledger. Returns step by id of what was trained, skips included."""
    steps = [entry.step for entry in census.consumed]
    found.require(steps == list(range(1, len(steps) + 1)), f"committed steps are not 1, 2, 3 …: {steps}")
    by_step: dict[int, list[dict[str, Any]]] = {}
    for line in ledger:
        by_step.setdefault(line["step"], []).append(line)
    for step, lines in by_step.items():
        digests = {line["digest"] for line in lines}
        found.require(len(digests) == 1, f"step {step} was trained on several batches", digests)
    step_of: dict[str, int] = {}
    for line in ledger:
        step, items = line["step"], line["trajectory_ids"]
        twice = [item for item in items if step_of.setdefault(item, step) != step]
        found.refuse(f"trained twice, in step {step} and before", twice)
    for entry in census.consumed:
        lines = [line for line in by_step.get(entry.step, ()) if line["digest"] == entry.digest]
        found.require(bool(lines), f"step {entry.step} is committed and not in the trainer's ledger")
        found.require(
            all(len(line["trajectory_ids"]) == entry.num_trajectories for line in lines),
            f"step {entry.step} has another size in the ledger",
        )
    committed = {entry.step for entry in census.consumed}
    return {item: step for item, step in step_of.items() if step in committed}


def _check_groups(found: Audit, census: Census, pushed: Pushed, trained: dict[str, int]) -> None:
    """Groups are trained whole, and consist of what their producers pushed."""
    invented = (trained.keys() | census.live) - pushed.task_of.keys()
    found.refuse("held or trained, and pushed by nobody", invented)
    steps_of_task: dict[str, set[int]] = {}
    for item, step in trained.items():
        steps_of_task.setdefault(pushed.task_of.get(item, ""), set()).add(step)
    several = [task for task, steps in steps_of_task.items() if len(steps) > 1]
    found.refuse("groups in more than one step", several)
    members = pushed.kept(evaluations=False)
    split = [item for item in members if pushed.task_of[item] in steps_of_task and item not in trained]
    found.refuse("kept members missing from their group's step", split)


def _check_places(found: Audit, census: Census, trained: dict[str, int]) -> None:
    """Each trajectory is in one place, with its payload."""
    places = Counter(item for held in census.places.values() for item in held)
    found.refuse("in several places of Redis", [item for item, count in places.items() if count > 1])
    found.refuse("trained, and waiting to be trained again", census.live & trained.keys())
    found.refuse("held without a payload", (census.live | census.retained) - census.with_payload)
    found.refuse("held with a payload that expires", (census.live | census.retained) & census.expiring)
    found.refuse("owned and in no place", census.owners - census.live - census.retained)
    found.refuse("payloads that nothing owns and nothing frees", census.orphans)


def _check_accounts(found: Audit, census: Census, trained: dict[str, int]) -> None:
    """The server's counters against what the census and the ledger count."""
    counters, live = census.counters, {name: len(held) for name, held in census.places.items()}
    skipped = sum(entry.num_trajectories for entry in census.consumed if entry.stage == "skipped")
    num_trained = len(trained) - skipped
    held = num_trained + sum(live.values()) + sum(census.dropped.values()) + counters.get("evaluated", 0)
    error = counters.get("ingested", 0) - held
    figures = f"counters {counters}, trained {num_trained}, {live}"
    found.require(error == 0, f"conservation error {error}: {figures}")
    found.require(census.dropped.get("skipped", 0) == skipped, f"{skipped} skipped, counted {census.dropped}")


def _check_nothing_lost(found: Audit, census: Census, pushed: Pushed, trained: dict[str, int]) -> None:
    """What producers were told is kept, is trained, held, or dropped for a counted reason."""
    gone = pushed.kept(evaluations=False) - trained.keys() - census.live
    apart = {*_AT_THE_DOOR, "skipped"}
    dropped = sum(count for name, count in census.dropped.items() if name not in apart)
    # An episode whose answer nobody read may have been kept and dropped later.
    unknown = len(pushed.unanswered(evaluations=False) - trained.keys() - census.live)
    found.require(
        dropped - unknown <= len(gone) <= dropped,
        f"{dropped} were dropped after they were kept ({unknown} unanswered), missing are",
        gone or ["none"],
    )


def _check_evaluations(found: Audit, census: Census, pushed: Pushed) -> None:
    told, evaluated = len(pushed.kept(evaluations=True)), census.counters.get("evaluated", 0)
    unknown = len(pushed.unanswered(evaluations=True))
    figures = f"{evaluated} evaluated, the nodes say {told} (+ {unknown})"
    found.require(told <= evaluated <= told + unknown, figures)


def _check_store(found: Audit, census: Census, store: Path) -> None:
    """Every version is whole, belongs to a committed step, and is what was announced."""
    try:
        versions = store_census.take(open_store(store.as_uri()), run_id=RUN_ID, policy_id=POLICY).records
    except AssertionError as error:
        found.violations.append(f"the store: {error}")
        return
    found.figures["versions"] = len(versions)
    digests = {item.version: item.manifest_sha256.hex() for item in versions}
    wrong = [number for number, sha in census.announced.items() if digests.get(number) != sha]
    found.refuse("announced versions that the store does not hold", wrong)
    trained = {0, *(entry.step for entry in census.consumed if entry.stage == "trained")}
    astray = [item.version for item in versions if item.step not in trained]
    found.refuse("versions of steps that were never committed", astray)
    # A rollback gives up the weights of steps that were finished and not published before it.
    ends = [item.step for item in versions[1:]] + [len(census.consumed) + 1]
    for item, end in zip(versions, ends, strict=True):
        if item.rollback_of is not None:
            trained -= set(range(item.step + 1, end))
    found.refuse("committed steps without a version", trained - {item.step for item in versions})
    steps = [item.step for item in versions]
    found.require(steps == sorted(steps), f"versions are not in the order of their steps: {steps}")


def _is_evaluation(task_id: str) -> bool:
    return task_id.startswith("eval:")
