"""The conservation law over one snapshot."""

from dataclasses import replace
from functools import partial

from astraflow_dataflow.records import Recount
from astraflow_dataflow.rules.conservation import corrected, drift, last_count, recount
from support.dataflow_snapshots import AUDIT

audit = partial(replace, AUDIT)


def test_an_empty_run_balances() -> None:
    account = recount(audit(), trained_in_log=0)
    assert (account.ingested, account.conservation_error, dict(account.dropped)) == (0, 0, {})


def test_every_place_counts_once() -> None:
    places = {"ingested": 21, "evaluated": 6, "ready": 4, "trained": 1}
    counters = places | {"dropped:stale": 2, "dropped:poison": 3}
    snapshot = audit(counters=counters, held_assembling=3, held_ready=4, held_in_batch=2)
    account = recount(snapshot, trained_in_log=1)
    assert (account.conservation_error, dict(account.dropped)) == (0, {"poison": 3, "stale": 2})


def test_the_recount_and_not_the_counter_decides() -> None:
    snapshot = audit(counters={"ingested": 4, "ready": 4}, held_ready=3)
    assert recount(snapshot, trained_in_log=0).conservation_error == 1
    assert drift(snapshot, trained_in_log=0) == {"trained": 0, "in_batch": 0, "ready": 1, "assembling": 0}


def test_what_a_recount_found_corrects_the_counters_of_a_run_that_was_not_counted() -> None:
    counters = {"ingested": 9, "ready": 7, "assembling": 2}
    said = audit(counters=counters, is_whole=False, held_ready=7, held_assembling=2)
    found = Recount(drift={"assembling": 0, "ready": 3, "in_batch": 0}, credit={"p": 1})
    assert recount(said, trained_in_log=0).conservation_error == 0
    snapshot = corrected(said, found)
    assert recount(snapshot, trained_in_log=0).conservation_error == 3
    assert [policy.outstanding - policy.charged for policy in snapshot.policies] == [1]


def test_a_deleted_run_balances_from_its_counters_alone() -> None:
    counters = {"ingested": 9, "trained": 4, "evaluated": 1, "dropped:stale": 1, "dropped:run_deleted": 3}
    account = last_count(counters)
    assert (account.conservation_error, dict(account.dropped)) == (0, {"run_deleted": 3, "stale": 1})
    assert last_count({"ingested": 2}).conservation_error == 2
