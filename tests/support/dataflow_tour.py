"""A fixed walk over what the servers promise, each once: what the random search finds sooner or later, at once.

Each line says what happens; servers and model are compared after it as after any call. Used by the stateful test, and
as a program by the one of planted bugs: `python -m support.dataflow_tour REDIS FOLDER` takes it, then searches.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hypothesis import Phase

from astraflow.errors import AstraflowError
from support.dataflow_machine import DataflowMachine, Plane, compare

FOUND = "found by"
"""What the last line of a found disagreement begins with: then the call and the number of calls until it."""
NAN = float("nan")
ANY, OTHER = 0, 1
NEWEST, LAST = 9, -1
"""The newest trainer; the last lease or push."""


class Tour:
    """Calls of one machine, each compared."""

    def __init__(self, machine: DataflowMachine) -> None:
        self.machine = machine

    def take(self) -> None:
        """All of it, in a run of its own."""
        self._do(self.machine.begin, filters=True, steps=1)
        for part in (
            self.attempts,
            self.closing,
            self.failures,
            self.groups,
            self.batches,
            self.ahead,
            self.trainers,
            self.together,
        ):
            part()

    def attempts(self) -> None:
        """Members under an old and a new attempt, and repetitions of all that was answered."""
        self._submit()
        self._lease(1)
        self._expire_last()
        self._lease(1, node=OTHER)
        self._push(-2, member=0)  # late, and kept
        self._again()
        self._push(LAST, member=0)  # superseded
        self._again()
        self._push(-2, member=0)  # fenced
        self._again()
        self._push(LAST, member=1, reward=NAN)  # poison
        self._again()
        self._push(LAST, member=1)

    def closing(self) -> None:
        """Groups that close without their members: failed, expired, dead."""
        self._submit()
        self._lease(1)
        self._push(LAST, member=0)
        self._push(LAST, member=1, failed=0)
        self._lease(1)
        self._push(LAST, member=0)
        self._do(self.machine.expire_a_group, which=self._opened(), server=ANY)
        self._push(LAST, member=1)  # closed
        self._again()

    def failures(self) -> None:
        """Leases that are given back, at the cost of an attempt or not, until the task is dead, and runs anew."""
        self._submit()
        for reason in ("drain", "drain", "drain", "workflow_error"):
            self._lease(1)
            self._fail(reason)
        self._lease(1)
        self._push(LAST, member=0)
        self._fail("workflow_error")
        self._do(self.machine.requeue, server=ANY)
        self._again()  # of a dead task
        self._lease(1)
        self._do(self.machine.fail_what_was_lost, which=self._leased(), server=OTHER, reason="workflow_error")
        self._do(self.machine.push_what_was_lost, which=self._leased(), server=ANY)

    def groups(self) -> None:
        """Groups that are filtered, that several pushes complete at once, that both servers settle."""
        self._submit()
        self._work((1.0, 1.0))
        for leased_by in (ANY, OTHER):
            self._lease(1, node=leased_by)
            self._together([1, 0], equal=True)
            self._again()
        self._submit()
        self._lease(1)
        self._lease(1)
        self._do(self.machine.push_at_once, first=LAST, server=ANY, rewards=[0.0, 1.0, 0.0, 1.0])
        self._make_room()
        self._do(self.machine.settle_twice, server=ANY)
        self._do(self.machine.switch_plugins, server=ANY)

    def batches(self) -> None:
        """Steps that are bound, given back, acknowledged in any order, skipped and released."""
        self._do(self.machine.train, server=ANY)
        self._until_ready(2)
        self._submit()
        self._lease(1)
        self._push(LAST, member=0, age=1)
        self._push(LAST, member=1, reward=0.0)  # due before the other two
        self._acquire(step=2)
        self._acquire(step=1)
        self._do(self.machine.nack, which=NEWEST, server=ANY, step=1, quarantine=False)
        self._acquire(step=1)
        self._ack("trained")  # without its intent
        self._ack("intent", wrong=0)
        for stage in ("intent", "trained", "trained", "skipped"):
            self._ack(stage)
        self._do(self.machine.mark_durable, which=NEWEST, server=ANY, step=1)
        self._do(self.machine.publish, which=NEWEST, server=ANY)
        self._do(self.machine.mark_durable, which=NEWEST, server=ANY, step=0)
        self._until_ready(3)  # one of them is as old as it may be
        self._do(self.machine.train, server=ANY)
        self._until_ready(2)
        self._do(self.machine.skip, server=ANY)
        self._until_ready(2)
        self._acquire(step=1)
        self._do(self.machine.void, server=ANY, discard=True)

    def ahead(self) -> None:
        """The batch of the step after the one in hand, whose fate it shares."""
        assert not self.machine.model.ready
        for age in (1, 1, 1, 0):
            self._submit()
            self._lease(1)
            self._push(LAST, member=0, age=age)
            self._push(LAST, member=1, age=age, reward=0.0)
        self._acquire(step=1)
        self._read_ahead(early=True)  # of those that are left, one will be too old for the next step
        self._finish("trained")
        self._until_ready(4)
        self._acquire(step=1)  # drops one that is too old
        self._until_ready(2)
        self._read_ahead()
        self._ack("intent")  # of the one that was read ahead
        self._finish("skipped")
        self._until_ready(4)
        self._acquire(step=1)
        self._read_ahead()
        self._do(self.machine.nack, which=NEWEST, server=ANY, step=1, quarantine=False)
        self._acquire(step=1)
        self._read_ahead()
        self._do(self.machine.void, server=ANY, discard=False)
        self._do(self.machine.nack, which=NEWEST, server=ANY, step=1, quarantine=False)
        self._acquire(step=1)
        self._do(self.machine.void, server=OTHER, discard=False)  # again: other batches were bound meanwhile
        self._ack("intent")  # of the one that was taken away
        self._read_ahead()
        self._finish("trained")
        self._do(self.machine.acquire, which=NEWEST, server=ANY, step=1, behind=1)  # not what it was read for

    def trainers(self) -> None:
        """An old trainer goes on after another one has claimed its policy."""
        self._until_ready(2)
        self._do(self.machine.replace_the_trainer, server=ANY)
        self._acquire(step=1, which=0)
        self._acquire(step=1)
        self._ack("intent", which=0)

    def together(self) -> None:
        """Members in one message: all of them, none of which was there, some, and what is repeated. Their server leased
        the task, or another did.
        """
        for leased_by in (ANY, OTHER):
            self._submit()
            self._lease(1, node=leased_by)
            self._together([0, 1])  # all
            self._together([0, 1], again=True)  # superseded, and one is a repetition
            self._lease(1, node=leased_by)
            self._push(LAST, member=0)
            self._together([0, 1], again=True)
            self._lease(1, node=leased_by)
            self._together([0, 0])  # the same member twice
            self._together([1, 0])
        self._submit()
        self._lease(1)
        self._expire_last()
        self._lease(1, node=OTHER)
        self._together([0, 1], lease=-2)  # all, late
        self._again()

    def _do(self, call: Callable[..., Any], **arguments: Any) -> None:
        call(**arguments)
        self.machine.all_is_where_the_model_has_it()

    def _submit(self) -> None:
        self._do(self.machine.submit, count=3)

    def _lease(self, want: int, *, node: int = ANY) -> None:
        """Whatever is leased again comes first."""
        self._make_room()
        self._do(self.machine.lease, node=node, server=node, want=want)

    def _make_room(self) -> None:
        """Close open groups, else train, while the window is full: a tour waits for nothing."""
        machine = self.machine
        while not machine.model.credit and not machine._in_state("retry"):
            if machine._opened():
                self._do(machine.expire_a_group, which=0, server=ANY)
            else:
                self._do(machine.train, server=ANY)

    def _expire_last(self) -> None:
        self._do(self.machine.expire_a_lease, which=self._leased(), server=ANY)

    def _leased(self) -> int:
        """The last lease, among the tasks that are leased."""
        return self.machine._in_state("leased").index(self.machine.leases[-1][1].task.task_id)

    def _opened(self) -> int:
        return self.machine._opened().index(self.machine.leases[-1][1].task.task_id)

    def _push(self, lease: int, *, member: int, reward: float = 1.0, age: int = 0, failed: int = 1) -> None:
        how: dict[str, Any] = {"reward": reward, "age": age, "failed": failed, "hedge": 1}
        self._do(self.machine.push, lease=lease, server=ANY, member=member, **how)

    def _together(
        self, members: Sequence[int], *, lease: int = LAST, again: bool = False, equal: bool = False
    ) -> None:
        how = {"members": members, "again": again, "equal": equal}
        self._do(self.machine.push_together, lease=lease, server=ANY, **how)

    def _again(self) -> None:
        self._do(self.machine.push_again, episode=0, server=OTHER)

    def _fail(self, reason: str) -> None:
        self._do(self.machine.fail, lease=LAST, server=ANY, reason=reason, retryable=True)

    def _work(self, rewards: Sequence[float]) -> None:
        self._make_room()
        self._do(self.machine.work, node=ANY, server=ANY, want=1, rewards=rewards)

    def _until_ready(self, number: int) -> None:
        """Work on tasks until so many groups are ready."""
        while len(self.machine.model.ready) < number:
            self._submit()
            self._work((0.0, 1.0))

    def _acquire(self, *, step: int, which: int = NEWEST) -> None:
        self._do(self.machine.acquire, which=which, server=ANY, step=step, behind=0)

    def _read_ahead(self, *, early: bool = False) -> None:
        self._do(self.machine.read_ahead, which=NEWEST, server=OTHER, step=2, early=early)

    def _finish(self, stage: str) -> None:
        """Acknowledge the step in hand, whether or not another batch was read ahead, and publish."""
        machine = self.machine
        place = sum(step > machine.model.finished + 1 for step in machine.bound)
        for each in ("intent", stage):
            self._do(machine.ack, which=NEWEST, server=ANY, step=place, stage=each, wrong=1)
        self._do(machine.publish, which=NEWEST, server=ANY)

    def _ack(self, stage: str, *, wrong: int = 1, which: int = NEWEST) -> None:
        self._do(self.machine.ack, which=which, server=OTHER, step=0, stage=stage, wrong=wrong)


def tour(url: str, folder: Path, *, machine: type[DataflowMachine] = DataflowMachine) -> None:
    """Take the tour over this Redis; raise what tells servers and model apart."""
    plane = Plane(url, folder)
    plane.runs = iter(["tour"])
    touring = type("Machine", (machine,), {"plane": plane})()
    try:
        Tour(touring).take()
    finally:
        touring.teardown()
        plane.close()


class FirstDisagreement(DataflowMachine):
    """Ends the process at the first disagreement: what is repeated to explain it may end otherwise, for servers with
    bugs need not do the same thing twice. Its last line says which call found it, and after how many.
    """

    calls = 0

    def teardown(self) -> None:
        """Called while the error of the call, if there was one, is on its way out."""
        FirstDisagreement.calls += self.model.now
        # A server that answers with an error where the model has an answer disagrees as well.
        if isinstance(error := sys.exc_info()[1], AssertionError | AstraflowError):
            traceback.print_exception(error)
            called = traceback.extract_tb(error.__traceback__)
            found_by = next(frame.name for frame in called if frame.filename.endswith("dataflow_machine.py"))
            print(f"{FOUND} {found_by} {FirstDisagreement.calls}", file=sys.stderr, flush=True)  # noqa: T201
            os._exit(1)
        super().teardown()


if __name__ == "__main__":
    where = sys.argv[1], Path(sys.argv[2])
    tour(*where, machine=FirstDisagreement)
    compare(*where, examples=100, calls=100, phases=[Phase.generate], machine=FirstDisagreement)
