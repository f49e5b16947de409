"""Which route takes a group: the first whose conditions all hold."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from astraflow.plugins import TaskSpec
from astraflow.recipe.groups import RouteConditions, RouteSettings
from astraflow_dataflow.rules.routes import route_verdict
from support.groups import group

NOON = datetime(2026, 11, 30, 12, tzinfo=UTC)
TASK = TaskSpec("t", (), data={"type": "proof"}, source="gsm8k")
GROUP = replace(group(0.0, 1.0, min_version=3, max_version=5), task=TASK, policy="solver")


def route(name: str = "it", to: str = "drop", **when: Any) -> RouteSettings:
    return RouteSettings(name=name, to=to, when=RouteConditions(**when))


@pytest.mark.parametrize(
    ("when", "is_taken"),
    [
        ({}, True),
        ({"policies": ["verifier", "solver"]}, True),
        ({"policies": ["verifier"]}, False),
        ({"sources": ["gsm8k"], "task_types": ["proof"]}, True),
        ({"sources": ["gsm8k"], "task_types": ["answer"]}, False),
        # The mean of 0 and 1.
        ({"min_reward": 0.5, "max_reward": 0.5}, True),
        ({"min_reward": 0.51}, False),
        ({"max_reward": 0.49}, False),
        # Its oldest token is of version 3, whatever the newest is of.
        ({"min_version": 3, "max_version": 3}, True),
        ({"min_version": 4}, False),
        ({"after": NOON}, True),
        ({"before": NOON}, False),
        ({"before": NOON + timedelta(seconds=1)}, True),
    ],
)
def test_a_route_takes_a_group_of_which_all_its_conditions_hold(when: Any, is_taken: bool) -> None:
    assert route_verdict(GROUP, [route(**when)], now=NOON) == ("routed_it" if is_taken else "")


def test_the_first_route_decides() -> None:
    kept = route("kept", "train", min_reward=0.5)
    assert route_verdict(GROUP, [kept, route("rest")], now=NOON) == ""
    assert route_verdict(GROUP, [route("score", "evaluation"), kept], now=NOON) == "evaluated_score"
    assert route_verdict(GROUP, [route("kept_whole", "archive"), kept], now=NOON) == "routed_kept_whole"


def test_a_task_of_no_type_is_of_no_route_that_asks_for_one() -> None:
    plain = replace(GROUP, task=TaskSpec("t", ()))
    assert route_verdict(plain, [route(task_types=["proof"])], now=NOON) == ""
