"""Queue and slots: every request is somewhere exactly once, in order, and leading rows stay dense."""

from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from astraflow_engine.errors import InvalidRequest, QueueFull
from astraflow_engine.requests import Finish, FinishKind, GenerateRequest, SamplingParams, VersionSpan
from astraflow_engine.scheduler import AdmissionLimits, Sequence, SlotScheduler

NUM_SLOTS = 8
LIMITS = AdmissionLimits(max_waiting=12, max_prefill_tokens=64, max_held_steps=3)


def sequence(rid: str, *, prompt_length: int = 4, arrived_s: float = 0.0, **params: Any) -> Sequence:
    sampling = SamplingParams(**({"max_new_tokens": 8} | params))
    request = GenerateRequest(rid=rid, prompt=tuple(range(prompt_length)), params=sampling)
    return Sequence(request=request, seed=0, arrived_s=arrived_s)


def queue_of(*lengths: int, limits: AdmissionLimits = LIMITS, num_slots: int = NUM_SLOTS) -> SlotScheduler:
    """Requests r0, r1, … wait."""
    scheduler = SlotScheduler(num_slots=num_slots, limits=limits)
    for index, length in enumerate(lengths):
        scheduler.submit(sequence(f"r{index}", prompt_length=length, arrived_s=index))
    return scheduler


def busy_with(num_requests: int) -> SlotScheduler:
    """Short requests, of which as many as there is room for have entered."""
    scheduler = queue_of(*[4] * num_requests)
    enter(scheduler)
    return scheduler


def enter(scheduler: SlotScheduler) -> list[str]:
    """Admit once and place in ascending slots; the rids that entered."""
    admitted = scheduler.admit()
    for entered, slot in zip(admitted, scheduler.free_slots(), strict=False):
        scheduler.place(entered, slot=slot)
    return [entered.request.rid for entered in admitted]


ENTERING = [
    pytest.param([4], 1, id="an idle engine takes a single request at once"),
    pytest.param([4] * 10, NUM_SLOTS, id="in arrival order up to the free slots"),
    pytest.param([20, 21, 22, 23], 2, id="a batch of prompts stays within the prefill budget"),
    pytest.param([500, 4], 1, id="a prompt beyond the budget enters alone"),
    pytest.param([40] * 6, 6, id="samples of one prompt cost its tokens once"),
]


@pytest.mark.parametrize(("prompt_lengths", "entered"), ENTERING)
def test_how_many_requests_enter_at_once(prompt_lengths: list[int], entered: int) -> None:
    assert enter(queue_of(*prompt_lengths)) == [f"r{index}" for index in range(entered)]


def test_a_few_requests_wait_beside_a_nearly_full_engine_but_not_for_ever() -> None:
    limits = AdmissionLimits(max_waiting=40, max_prefill_tokens=9_999)
    scheduler = queue_of(*[4] * 36, limits=limits, num_slots=32)
    enter(scheduler)
    scheduler.finish(3)
    entered = [enter(scheduler) for _ in range(10)]
    assert entered[:8] == [[]] * 8
    assert ["r32"] in entered


def test_a_full_queue_refuses_with_its_limit() -> None:
    scheduler = queue_of(*[4] * 12)
    with pytest.raises(QueueFull, match="12 waiting, limit 12"):
        scheduler.submit(sequence("one more"))


def test_a_rid_in_progress_is_refused_and_free_again_afterwards() -> None:
    scheduler = busy_with(1)
    with pytest.raises(InvalidRequest, match="rid 'r0' is already in progress"):
        scheduler.submit(sequence("r0"))
    scheduler.finish(0)
    scheduler.submit(sequence("r0"))


def test_retracted_requests_enter_before_those_that_came_later() -> None:
    scheduler = busy_with(11)
    retracted = scheduler.retract_all()
    assert [slot for slot, _ in retracted] == list(range(8))
    assert all(item.num_retractions == 1 for _, item in retracted)
    assert enter(scheduler) == [f"r{index}" for index in range(8)]


def test_removal_finds_running_and_waiting_requests() -> None:
    scheduler = busy_with(10)
    removed = scheduler.remove(lambda request: request.rid in ("r2", "r9"))
    assert [(slot, item.request.rid) for slot, item in removed] == [(2, "r2"), (None, "r9")]
    assert (scheduler.num_running, scheduler.num_waiting) == (7, 1)


def test_holes_are_closed_from_the_top_once_they_waste_a_quarter() -> None:
    scheduler = busy_with(8)
    for slot in (0, 2):
        scheduler.finish(slot)
    assert list(scheduler.exchanges()) == []
    scheduler.finish(4)
    assert list(scheduler.exchanges()) == [(7, 0), (6, 2)]
    assert [slot for slot, _ in scheduler.running()] == [0, 1, 2, 3, 5]


SPANS = [
    pytest.param([], "1", 3, [("1", 0, 3)], id="one"),
    pytest.param([], "1", 0, [("1", 0, 0)], id="no token"),
    pytest.param([("1", 2)], "2", 5, [("1", 0, 2), ("2", 2, 5)], id="swap"),
    pytest.param([("1", 2), ("2", 2)], "3", 5, [("1", 0, 2), ("3", 2, 5)], id="no token between swaps"),
    pytest.param([("1", 2)], "2", 2, [("1", 0, 2)], id="swap at the end"),
    pytest.param([("1", 2)], "1", 5, [("1", 0, 5)], id="same name"),
]


@pytest.mark.parametrize(("ends", "last_version", "num_tokens", "spans"), SPANS)
def test_version_spans_cover_the_tokens(
    ends: list[tuple[str, int]], last_version: str, num_tokens: int, spans: list[tuple[str, int, int]]
) -> None:
    item = sequence("r", max_new_tokens=num_tokens)
    for version, end in ends:
        item.tokens = [0] * end
        item.note_version_end(version)
    item.tokens, item.logprobs = [0] * num_tokens, [0.0] * num_tokens
    completion = item.complete(Finish(kind=FinishKind.LENGTH), version=last_version, now_s=1.0)
    assert completion.spans == tuple(VersionSpan(version=v, start=s, end=e) for v, s, e in spans)


ENDS = [
    ({}, FinishKind.STOP),
    ({"stop_token_ids": frozenset([7])}, FinishKind.STOP),
    ({"stop_token_ids": frozenset([7]), "ignore_eos": True}, None),
    ({"max_new_tokens": 1, "ignore_eos": True}, FinishKind.LENGTH),
]


@pytest.mark.parametrize(("params", "kind"), ENDS)
def test_when_a_sequence_ends(params: dict[str, Any], kind: FinishKind | None) -> None:
    item = sequence("r", **params)
    item.tokens = [7 if "stop_token_ids" in params else 2]
    finish = item.finish_after_last_token(frozenset([2]))
    assert (finish.kind if finish else None) == kind


class SchedulerMachine(RuleBasedStateMachine):
    """Arbitrary traffic; the model is the plain list of requests that were accepted and not yet returned."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = SlotScheduler(num_slots=NUM_SLOTS, limits=LIMITS)
        self.live: dict[str, Sequence] = {}
        self.num_submitted = 0
        self.last_entered = -1.0

    @rule(length=st.integers(1, 40))
    def submit(self, length: int) -> None:
        self.num_submitted += 1
        item = sequence(f"r{self.num_submitted}", prompt_length=length, arrived_s=self.num_submitted)
        if self.scheduler.num_waiting >= LIMITS.max_waiting:
            with pytest.raises(QueueFull):
                self.scheduler.submit(item)
        else:
            self.scheduler.submit(item)
            self.live[item.request.rid] = item

    @rule()
    def admit(self) -> None:
        waiting_before = self.scheduler.num_waiting
        admitted = self.scheduler.admit()
        assert len(admitted) <= len(self.scheduler.free_slots())
        oldest = sorted(i.arrived_s for i in self.scheduler.live() if i not in running(self.scheduler))
        if admitted:
            assert [item.arrived_s for item in admitted] == sorted(item.arrived_s for item in admitted)
            assert not oldest or admitted[-1].arrived_s < oldest[0]
        assert self.scheduler.num_waiting == waiting_before - len(admitted)
        for item, slot in zip(admitted, self.scheduler.free_slots(), strict=False):
            self.scheduler.place(item, slot=slot)

    @precondition(lambda self: self.scheduler.num_running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from([slot for slot, _ in self.scheduler.running()]))
        item = self.scheduler.finish(slot)
        assert self.live.pop(item.request.rid) is item

    @rule(chosen=st.integers(0, 3))
    def abort_some(self, chosen: int) -> None:
        removed = self.scheduler.remove(lambda request: int(request.rid[1:]) % 4 == chosen)
        for _, item in removed:
            assert self.live.pop(item.request.rid) is item
        assert not [rid for rid in self.live if int(rid[1:]) % 4 == chosen]

    @rule()
    def retract(self) -> None:
        self.scheduler.retract_all()
        assert self.scheduler.num_running == 0

    @rule()
    def close_holes(self) -> None:
        before = {item.request.rid for item in running(self.scheduler)}
        for source, target in self.scheduler.exchanges():
            assert target < source
        assert {item.request.rid for item in running(self.scheduler)} == before
        assert self.scheduler.num_running >= 0.75 * self.scheduler.extent

    @invariant()
    def every_live_request_is_somewhere_exactly_once(self) -> None:
        found = [item.request.rid for item in self.scheduler.live()]
        assert sorted(found) == sorted(self.live)
        assert len(set(found)) == len(found)

    @invariant()
    def slots_add_up(self) -> None:
        assert self.scheduler.num_running + len(self.scheduler.free_slots()) == NUM_SLOTS

    def teardown(self) -> None:
        """Whatever happened, everything drains in bounded steps."""
        for _ in range(10 * (len(self.live) + 1)):
            enter(self.scheduler)
            for slot, _ in list(self.scheduler.running()):
                self.live.pop(self.scheduler.finish(slot).request.rid)
        assert not self.live


def running(scheduler: SlotScheduler) -> list[Sequence]:
    """Requests in slots."""
    return [item for _, item in scheduler.running()]


TestAnyTraffic = SchedulerMachine.TestCase
