"""The rules of trajectories: one list of reasons, raised, documented, and nothing else."""

import re

import numpy as np
import pytest

from astraflow.plugins import VersionSpan
from astraflow.trajectories import REASONS, BadTrajectory, check_columns
from support.source_tree import REPOSITORY

RAISING = (
    "clients/python/astraflow/trajectories.py",
    "services/astraflow_dataflow/rules/trajectories.py",
    "services/astraflow_raas/work/episode.py",
)
CONTRACT = "proto/astraflow/rollout/v1/trajectory.proto"


def test_every_reason_that_is_raised_is_listed_and_every_listed_one_is_raised() -> None:
    sources = "".join((REPOSITORY / path).read_text() for path in RAISING)
    raised = re.findall(r"(?:BadTrajectory|VersionMoved)\(\s*\"(\w+)\"", sources)
    stated = re.findall(r"poison: \"(\w+)\"", (REPOSITORY / CONTRACT).read_text())
    assert {*raised, *stated, "bad_blob", "out_of_bounds"} == set(REASONS)


def test_the_documented_reasons_are_the_ones_in_the_code() -> None:
    page = (REPOSITORY / "docs/dataflow.md").read_text()
    section = page.split("## Reasons of poison")[1].split("\n## ")[0]
    assert dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", section, re.MULTILINE)) == dict(REASONS)


@pytest.mark.parametrize(
    ("token_ids", "spans", "slug"),
    [
        (np.array([1, 2**31]), [(0, 2, 0)], "token_out_of_range"),
        (np.array([1, -1]), [(0, 2, 0)], "token_out_of_range"),
        (np.array([1, 2]), [(0, 2, -1)], "bad_spans"),
        (np.zeros(0, dtype=np.int32), [], "empty"),
    ],
)
def test_columns_that_no_message_could_hold_are_refused_too(
    token_ids: np.ndarray, spans: list[tuple[int, int, int]], slug: str
) -> None:
    with pytest.raises(BadTrajectory, match=f"^{slug}: "):
        check_columns(
            "t",
            token_ids=token_ids,
            loss_mask=np.array([False, True][: len(token_ids)]),
            logprobs=np.zeros(len(token_ids), np.float32),
            version_spans=[VersionSpan(*span) for span in spans],
        )
