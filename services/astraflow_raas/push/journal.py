"""What a node pushed and what it was told: the producer's own record, against which a run can be audited.

Invariant: an episode is written down before its first byte leaves and again when its answer was read, one
whole line each, so that a killed node leaves a true record; nothing reads it back while the node lives.
Called by `push`; off unless the setting `push_journal` is on, because it only grows.

One JSON object per line: `at` (`sent` or `answered`), `task_id`, `episode_id`, `trajectory_ids`, and for
answers `outcome` and `reason`.
"""

import json
import os
from pathlib import Path

from astraflow.dataflow.v1 import trajectory_service_pb2
from astraflow.rollout.v1 import trajectory_pb2

__all__ = ["PushJournal"]


class PushJournal:
    """Appends to one file. Without a path it records nothing."""

    def __init__(self, path: Path | None = None) -> None:
        self._descriptor = _open(path) if path is not None else None

    def sent(self, episode: trajectory_pb2.Episode) -> None:
        """Record that the episode is about to be written to the stream."""
        self._append({"at": "sent", **_names(episode)})

    def answered(self, episode: trajectory_pb2.Episode, result: trajectory_service_pb2.PushResult) -> None:
        """Record what the server made of the episode."""
        outcome = trajectory_service_pb2.Outcome.Name(result.outcome).removeprefix("OUTCOME_").lower()
        self._append({"at": "answered", **_names(episode), "outcome": outcome, "reason": result.reason})

    def close(self) -> None:
        """Close the file; nothing is recorded afterwards."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _append(self, line: dict[str, object]) -> None:
        # One write to an O_APPEND file: SIGKILL leaves whole lines, and the kernel keeps them.
        if self._descriptor is not None:
            os.write(self._descriptor, json.dumps(line, separators=(",", ":")).encode() + b"\n")


def _open(path: Path) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)


def _names(episode: trajectory_pb2.Episode) -> dict[str, object]:
    return {
        "task_id": episode.task_id,
        "episode_id": episode.episode_id,
        "trajectory_ids": [item.header.trajectory_id for item in episode.trajectories],
    }
