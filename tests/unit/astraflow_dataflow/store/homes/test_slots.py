"""Slots of a cluster: whose they are as a node tells it, and what servers agree on from that."""

from astraflow_dataflow.store.homes.slots import NUM_SLOTS, SlotMap, slot_of
from astraflow_dataflow.store.keys import (
    DELETING_KEY,
    PAYLOADS_KEY,
    REVOKED_TOKENS_KEY,
    RUNS_KEY,
    Keys,
    own_key,
)

INFO = b"cluster_state:ok\r\ncluster_current_epoch:7\r\n"


def node(port: int, host: bytes | None = b"10.0.0.1") -> list[object]:
    """A node as CLUSTER SLOTS tells it."""
    return [host, port, b"id", []]


def read(*ranges: list[object]) -> SlotMap:
    """What a node at `asked` answers."""
    return SlotMap.read(INFO, list(ranges), asked="asked")  # type: ignore[arg-type]


def test_all_keys_of_a_run_are_in_the_slot_of_what_its_calls_name() -> None:
    keys = Keys("r")
    assert {slot_of(keys.of("task", "{t}")), slot_of(keys.of("payload", "e", "t"))} == {slot_of(keys.prefix)}


def test_the_registry_is_in_one_slot() -> None:
    assert len({slot_of(key) for key in (RUNS_KEY, DELETING_KEY, PAYLOADS_KEY, REVOKED_TOKENS_KEY)}) == 1


def test_a_node_tells_whose_slots_are_and_may_not_know_its_own_name() -> None:
    slots = read([0, 99, node(1), node(2)], [100, NUM_SLOTS - 1, node(3, None)])
    assert (slots.epoch, slots.owners[99], slots.owners[100]) == (7, "10.0.0.1:1", "asked:3")
    assert slots.addresses == ["10.0.0.1:1", "asked:3"]
    assert read([0, 0, node(3, b"?")]).owners[0] == read([0, 0, node(3, b"")]).owners[0] == "asked:3"


def test_slots_that_nobody_has_are_named_as_ranges() -> None:
    assert read([0, NUM_SLOTS - 1, node(1)]).uncovered() == ""
    assert read([1, 4, node(1)], [6, 9, node(1)]).uncovered() == "0, 5, 10-16383"
    assert read().uncovered() == "0-16383"


def test_a_slot_that_nobody_has_now_is_still_the_one_s_who_had_it() -> None:
    before, now = read([0, NUM_SLOTS - 1, node(1)]), read([0, 9, node(2)])
    assert now.over(before.owners).owners[9:11] == ("10.0.0.1:2", "10.0.0.1:1")


def test_what_a_primary_keeps_of_itself_is_in_a_slot_of_its_own() -> None:
    slots = read([0, 8000, node(1)], [8001, NUM_SLOTS - 2, node(2)], [NUM_SLOTS - 1, NUM_SLOTS - 1, node(3)])
    for address in slots.addresses:
        assert slots.owners[slot_of(own_key("beat", slots.tag_of(address)))] == address
