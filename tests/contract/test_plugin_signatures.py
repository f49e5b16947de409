"""What data plug-ins are called with, and what they are given: a change here breaks recipes."""

from __future__ import annotations

import dataclasses
import inspect

import pytest
from typing_extensions import get_protocol_members

from astraflow import plugins

CALLS = {
    "Curator": {
        "observe": "(self, group: Group) -> None",
        "propose": "(self, tasks: Sequence[TaskSpec]) -> Sequence[TaskSpec]",
    },
    "Dataset": {
        "heldout": "(self, index: int) -> TaskSpec | None",
        "train": "(self, index: int) -> TaskSpec | None",
    },
    "Filter": {"__call__": "(self, group: Group) -> bool"},
    "Selector": {
        "select": "(self, candidates: Sequence[ReadyGroup], request: StepRequest) -> Sequence[str]",
    },
}
VALUES = {
    "Group": "task trajectories policy role group_id verdict",
    "ReadyGroup": "group_id trajectories arrival task_id role source",
    "StepRequest": "policy step base_version num_groups max_staleness num_outstanding",
    "TaskSpec": "task_id messages data source",
    "TrajectorySummary": (
        "reward trajectory_id num_tokens num_trainable_tokens min_version max_version finish_reason metrics"
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_server_calls_data_plugins_like_this(name: str) -> None:
    protocol = getattr(plugins, name)
    found = {
        member: str(inspect.signature(getattr(protocol, member))).replace("'", "")
        for member in get_protocol_members(protocol)
    }
    assert found == CALLS[name]


@pytest.mark.parametrize("name", VALUES)
def test_what_they_are_given_has_these_fields(name: str) -> None:
    fields = [field.name for field in dataclasses.fields(getattr(plugins, name))]
    assert fields == VALUES[name].split()
