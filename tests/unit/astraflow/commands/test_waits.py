"""Waits are told in the order in which a person must see to them, and each is explained in that order."""

import re
from pathlib import Path

from astraflow.commands.waits import RANKS, Rank, in_order, is_alarm
from astraflow.dataflow.v1 import admin_service_pb2 as pb

PAGE = Path(__file__).parents[4] / "docs" / "debugging.md"


def wait(reason: str, *, seconds: int = 1) -> pb.Wait:
    """A wait that has lasted so long."""
    made = pb.Wait(reason=reason)
    made.waited_duration.FromSeconds(seconds)
    return made


def test_what_lies_under_the_others_comes_first_and_of_one_rank_the_longest() -> None:
    waits = [
        wait("ready_groups", seconds=900),
        wait("warm_start", seconds=60),
        wait("of_a_later_release", seconds=1000),
        wait("no_node"),
        wait("no_trainer", seconds=5),
        wait("store_missing"),
        wait("state_in_doubt"),
        wait("redis_full"),
        wait("server_silent"),
    ]
    assert [item.reason for item in in_order(waits)] == [
        *(
            "server_silent",
            "redis_full",
            "state_in_doubt",
            "store_missing",
            "no_trainer",
            "no_node",
            "warm_start",
        ),
        *("of_a_later_release", "ready_groups"),
    ]


def test_only_what_is_wrong_and_does_not_pass_is_an_alarm() -> None:
    alarms = {Rank[name] for name in ("SERVER", "DATA", "DOUBT", "STORE", "SILENT")}
    assert {RANKS[reason] for reason in RANKS if is_alarm(wait(reason))} == alarms


def test_the_debugging_page_explains_every_wait_in_this_order() -> None:
    section = PAGE.read_text().partition("\n## Every wait\n")[2].partition("\n## ")[0]
    assert re.findall(r"^\|[^|]*\| [a-z]+ `([a-z_]+)` \|", section, flags=re.MULTILINE) == list(RANKS)
