"""What a node pushed and what the server answered: a file against which a run can be audited, and the log for people.

Invariant: in the file an episode is written down before its first byte leaves and again when its answer was read, one
whole line each, so that a killed node leaves a true record; no node reads it back. A file of `MAX_BYTES` becomes the
older one, `pushes.1.jsonl`, in place of the one before. It is off unless the setting `push_journal` is on. Called by
`pushing`.

One JSON object per line: `at` (`sent` or `answered`), `task_id`, `episode_id`, `trajectory_ids`, and for
answers `outcome` and `reason`.
"""

import asyncio
import json
import os
from pathlib import Path

from astraflow.dataflow.v1 import trajectory_service_pb2
from astraflow.rollout.v1 import trajectory_pb2
from astraflow_kit.log import get_logger
from astraflow_kit.log_files import older
from astraflow_kit.unit_of_work import task_correlation

log = get_logger(__name__)

MAX_BYTES = 64 * 2**20
_LOG_DELAY_S = 0.25


class PushJournal:
    """Appends to one file. Without a path it records nothing."""

    def __init__(self, path: Path | None = None, *, max_bytes: int = MAX_BYTES) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._descriptor = _open(path) if path is not None else None

    def sent(self, episode: trajectory_pb2.Episode) -> None:
        """Record that the episode is about to be written to the stream."""
        self._append(episode, at="sent")

    def answered(self, episode: trajectory_pb2.Episode, result: trajectory_service_pb2.PushResult) -> None:
        """Record what the server made of the episode."""
        self._append(episode, at="answered", outcome=outcome_name(result), reason=result.reason)

    def close(self) -> None:
        """Close the file; nothing is recorded afterwards."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _append(self, episode: trajectory_pb2.Episode, *, at: str, **answer: str) -> None:
        if self._descriptor is None or self._path is None:
            return
        if os.fstat(self._descriptor).st_size >= self._max_bytes:
            self.close()
            self._path.replace(older(self._path, 1))
            self._descriptor = _open(self._path)
        names = {"task_id": episode.task_id, "episode_id": episode.episode_id}
        line = {"at": at, **names, "trajectory_ids": _trajectory_ids(episode), **answer}
        # One write to an O_APPEND file: SIGKILL leaves whole lines, and the kernel keeps them.
        os.write(self._descriptor, json.dumps(line, separators=(",", ":")).encode() + b"\n")


class PushLog:
    """Logs what became of episodes, those of one task together: a line per episode cost a fifth of a node's time."""

    def __init__(self) -> None:
        self._noted: dict[tuple[str, str, str], list[trajectory_pb2.Episode]] = {}

    def note(self, episode: trajectory_pb2.Episode, result: trajectory_service_pb2.PushResult) -> None:
        """Remember one answer; it is in the log within `_LOG_DELAY_S`."""
        if not self._noted:
            asyncio.get_running_loop().call_later(_LOG_DELAY_S, self.write)
        key = (episode.task_id, outcome_name(result), result.reason)
        self._noted.setdefault(key, []).append(episode)

    def write(self) -> None:
        """Log what was noted."""
        noted, self._noted = self._noted, {}
        for (task_id, outcome, reason), episodes in noted.items():
            report = log.error if outcome == "refused" else log.info
            report(
                "episode.pushed",
                correlation_id=task_correlation(task_id),
                task_id=task_id,
                episode_ids=[episode.episode_id for episode in episodes],
                trajectory_ids=[name for episode in episodes for name in _trajectory_ids(episode)],
                outcome=outcome,
                reason=reason,
            )


def outcome_name(result: trajectory_service_pb2.PushResult) -> str:
    """The outcome as metrics and logs name it, `accepted` for OUTCOME_ACCEPTED."""
    return trajectory_service_pb2.Outcome.Name(result.outcome).removeprefix("OUTCOME_").lower()


def _open(path: Path) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)


def _trajectory_ids(episode: trajectory_pb2.Episode) -> list[str]:
    return [item.header.trajectory_id for item in episode.trajectories]
