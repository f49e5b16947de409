"""What `commit` of `store/lua/pushes.lua` takes: episodes that follow each other and are alike as one push.

Pure. Redis keeps of a push what is sent here: lines, and headers behind their sizes. Called by the store of episodes.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple, TypeAlias

from astraflow.rollout.v1 import trajectory_pb2
from astraflow_dataflow.rules.evaluation import is_evaluation_task
from astraflow_dataflow.rules.scores import result_lines
from astraflow_dataflow.store.writing import Argument

Headers: TypeAlias = Sequence[trajectory_pb2.TrajectoryHeader]
PushedEpisode: TypeAlias = tuple[trajectory_pb2.Episode, Headers]
_MOST_COUNTED = 1_000_000
_SIZE_BYTES = 4
"""Before each header; the functions read it, too."""


def commit_arguments(
    episodes: Sequence[trajectory_pb2.Episode], headers: Sequence[Headers]
) -> tuple[list[Argument], list[int]]:
    """What `commit` takes: pushes of episodes that follow each other and are alike. Returns how many each has, too."""
    repeats = "d" if has_repeats(episodes) else ""
    arguments, sizes = list[Argument](), list[int]()
    for (whose, how), alike in groupby(zip(episodes, headers, strict=True), key=_whose_and_how):
        pushed = list(alike)
        sizes.append(len(pushed))
        arguments += (*whose, *_push_arguments(f"{len(pushed)} {how}{repeats}", pushed))
    return arguments, sizes


def has_repeats(episodes: Sequence[trajectory_pb2.Episode]) -> bool:
    """Return whether a member, an episode or a trajectory comes twice."""
    members = {(episode.task_id, episode.member) for episode in episodes}
    episode_ids = {episode.episode_id for episode in episodes}
    trajectory_ids = [item.header.trajectory_id for episode in episodes for item in episode.trajectories]
    num_each = (len(members), len(episode_ids), len(set(trajectory_ids)))
    return num_each != (len(episodes), len(episodes), len(trajectory_ids))


def _whose_and_how(pushed: PushedEpisode) -> tuple[tuple[Argument, ...], str]:
    """What episodes that are committed together have in common: task, attempt, node, and how they are."""
    episode, headers = pushed
    how = f"{len(headers)}h" if episode.hedge else str(len(headers))
    if episode.status == trajectory_pb2.EPISODE_STATUS_FAILED:
        how += "f"
    if is_evaluation_task(episode.task_id):
        how += "e"
    return (episode.task_id, episode.attempt, episode.node_id), how


def _push_arguments(how: str, pushed: Sequence[PushedEpisode]) -> list[Argument]:
    """What `commit` takes of a push behind whose it is."""
    lines, framed, results = lines_of(pushed), list[bytes](), list[Argument]()
    is_evaluation = is_evaluation_task(pushed[0][0].task_id)
    for episode, headers in pushed:
        if is_evaluation:
            results += (_metric_lines(episode), result_lines(episode))
        for header in headers:
            framed += _framed(header.SerializeToString())
    if lines.tool_calls:
        how += f"t{lines.tool_calls},{lines.tool_errors}"
    return [how, lines.who, lines.traces, b"".join(framed), *results]


class PushLines(NamedTuple):
    """What is kept of a push as text: a line of each episode, member and id and calls of tools where there are any, and
    one of each trajectory, as its task's trace has it.
    """

    who: str
    traces: str
    tool_calls: int
    tool_errors: int


def lines_of(pushed: Sequence[PushedEpisode]) -> PushLines:
    """Return the lines of episodes that are pushed together."""
    calls = errors = 0
    who, traces = list[str](), list[str]()
    for episode, headers in pushed:
        line = f"{episode.member}\t{episode.episode_id}"
        if own_calls := _counted(episode, "environment.tool_calls"):
            own_errors = _counted(episode, "environment.tool_errors")
            line += f"\t{own_calls},{own_errors}"
            calls, errors = calls + own_calls, errors + own_errors
        who.append(line)
        traces += map(_traced, headers)
    return PushLines("\n".join(who), "\n".join(traces), calls, errors)


def _framed(header: bytes) -> tuple[bytes, bytes]:
    return len(header).to_bytes(_SIZE_BYTES, "big"), header


def stored_headers(parts: Iterable[bytes]) -> Iterator[trajectory_pb2.TrajectoryHeader]:
    """Yield the headers of what is stored of a task, part by part, each behind its size."""
    for part in parts:
        at = 0
        while at < len(part):
            start = at + _SIZE_BYTES
            at = start + int.from_bytes(part[at:start], "big")
            yield trajectory_pb2.TrajectoryHeader.FromString(part[start:at])


def _counted(episode: trajectory_pb2.Episode, name: str) -> int:
    """A metric that counts: whatever number a client wrote, within bounds."""
    return int(min(max(episode.metrics.get(name, 0.0), 0.0), _MOST_COUNTED))


def _metric_lines(episode: trajectory_pb2.Episode) -> str:
    """The metrics of an evaluation episode, value first; a name that takes more than a line is left out."""
    named = (f"{value!r} {name}" for name, value in episode.metrics.items() if name and "\n" not in name)
    return "\n".join(named)


def _traced(header: trajectory_pb2.TrajectoryHeader) -> str:
    versions = f"{header.min_version}\t{header.max_version}"
    return f"{header.trajectory_id}\t{header.policy_id}\t{header.role}\t{versions}\t{header.reward!r}"
