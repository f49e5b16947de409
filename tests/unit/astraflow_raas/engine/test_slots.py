"""Never more places than there are, from the rank with the most."""

from astraflow_raas.engine.slots import EngineSlots


def test_nobody_gets_more_than_is_free_and_ranks_are_filled_evenly() -> None:
    slots = EngineSlots(4, num_ranks=2)
    assert slots.take(3) == (0, 3)
    assert slots.take(9) == (1, 4)
    assert slots.take(9) == (0, 1)
    assert slots.take(1)[1] == 0
    slots.give_back(1, 2)
    assert slots.take(0) == (1, 0), "who wants none any more takes none"
    assert slots.take(1) == (1, 1)


def test_whoever_waits_hears_of_places_that_are_given_back() -> None:
    slots, heard = EngineSlots(2), list[str]()
    slots.freed |= {lambda: heard.append("solver"), lambda: heard.append("verifier")}
    slots.take(2)
    assert heard == []
    slots.give_back(0, 1)
    assert sorted(heard) == ["solver", "verifier"]
