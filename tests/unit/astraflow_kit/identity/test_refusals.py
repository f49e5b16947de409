"""Whom a server refused, as its operators see it."""

import math
from dataclasses import replace

import pytest

from astraflow_kit.identity.gate import denied
from astraflow_kit.identity.refusals import ENDED_SHOWN_S, MAX_KEPT, SHOWN_S, UNPROVEN, Refusals
from astraflow_kit.identity.tokens import Identity, refusal
from support.manual_clock import ManualClock

NODE = Identity(subject="spot-1", roles=frozenset({"rollout"}), runs=frozenset({"math"}))


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def refusals(clock: ManualClock) -> Refusals:
    return Refusals(clock)


def test_a_caller_is_shown_with_reason_since_and_how_often(refusals: Refusals, clock: ManualClock) -> None:
    began_s = clock.wall_time_s()
    for _ in range(3):
        refusals.note(refusal("expired", "it expired", of=NODE))
        clock.now_s += 1.0
    (shown,) = refusals.refused("math")
    assert (shown.subject, shown.reason, shown.count, shown.message) == ("spot-1", "expired", 3, "it expired")
    assert (shown.first_s, shown.last_s) == (began_s, began_s + 2)


def test_people_see_what_concerns_their_run_and_callers_without_proof(refusals: Refusals) -> None:
    refusals.note(refusal("expired", "", of=NODE))
    refusals.note(refusal("unknown_key", ""))
    refusals.note(denied("run", ""), caller=NODE)
    assert {(item.subject, item.reason) for item in refusals.refused("math")} == {
        ("spot-1", "expired"),
        ("spot-1", "run"),
        (UNPROVEN, "unknown_key"),
    }
    assert [item.reason for item in refusals.refused("other")] == ["unknown_key"]


def test_who_is_not_refused_any_more_is_not_shown(refusals: Refusals, clock: ManualClock) -> None:
    refusals.note(refusal("expired", "", of=NODE))
    clock.now_s += SHOWN_S + 1
    assert not refusals.refused("math")


def test_strangers_cannot_fill_it(refusals: Refusals, clock: ManualClock) -> None:
    for number in range(3 * MAX_KEPT):
        clock.now_s += 0.1
        refusals.note(refusal("expired", "", of=Identity(subject=f"node-{number}", roles=frozenset())))
    assert len(refusals.refused("math")) == MAX_KEPT


def ending(clock: ManualClock, role: str = "rollout") -> Identity:
    """A token for the next 100 s."""
    now_s = clock.wall_time_s()
    life = {"expires_s": now_s + 100, "warned_from_s": now_s + 80}
    return replace(NODE, roles=frozenset({role}), token_id="t", **life)


def test_a_token_is_named_before_it_ends_and_for_an_hour_after(
    refusals: Refusals, clock: ManualClock
) -> None:
    token = ending(clock)
    refusals.see(token)
    assert not refusals.ending("math")
    assert refusals.next_end_s() == 0
    clock.now_s += 80
    refusals.see(token)
    assert refusals.ending("math") == [token]
    assert not refusals.ending("other")
    assert refusals.next_end_s() == token.expires_s
    assert not refusals.ended("math")
    clock.now_s += 21
    assert not refusals.ending("math")
    assert (refusals.ended("math"), refusals.ended("other")) == ([token], [])
    assert refusals.next_end_s() == token.expires_s
    clock.now_s += ENDED_SHOWN_S
    assert not refusals.ended("math")
    assert refusals.next_end_s() == 0


def test_a_token_that_was_replaced_is_not_named(refusals: Refusals, clock: ManualClock) -> None:
    token = ending(clock)
    clock.now_s += 80
    refusals.see(token)
    refusals.see(replace(token, token_id="another's", subject="spot-2", expires_s=token.expires_s + 9))
    assert refusals.ending("math")[0] == token
    refusals.see(replace(token, token_id="new", expires_s=token.expires_s + 100, warned_from_s=math.inf))
    assert token not in refusals.ending("math")
    refusals.see(token)  # of another that has the same subject
    assert refusals.ending("math")[0] == token


def test_people_see_themselves_that_their_token_has_ended(refusals: Refusals, clock: ManualClock) -> None:
    token = ending(clock, "operator")
    clock.now_s += 80
    refusals.see(token)
    assert refusals.ending("math") == [token]
    clock.now_s += 21
    assert not refusals.ended("math")
