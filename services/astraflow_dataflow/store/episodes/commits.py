"""Commits of episodes in Redis, and the groups they complete.

Many commits are sent as one transaction: payloads, then one function call that refers to them. Called by ingest and the
run loop.
"""

import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from astraflow.dataflow.v1.trajectory_service_pb2 import Outcome, PushResult
from astraflow.errors import AstraflowError, InternalError, NotFoundError, PayloadMissingError
from astraflow.rollout.v1 import trajectory_pb2
from astraflow.trajectories import BadTrajectory
from astraflow_dataflow.records import CompleteTask
from astraflow_dataflow.rules.evaluation import is_evaluation_task
from astraflow_dataflow.rules.groups import complete_task, placed_headers
from astraflow_dataflow.store.connection import Call
from astraflow_dataflow.store.episodes.judged import Judged, settle_arguments, whole_arguments
from astraflow_dataflow.store.episodes.pushes import Headers, commit_arguments, stored_headers
from astraflow_dataflow.store.homes.redis import Redis
from astraflow_dataflow.store.keys import Keys
from astraflow_dataflow.store.payloads.inside import call_with
from astraflow_dataflow.store.payloads.packs import Payloads
from astraflow_dataflow.store.replies import Reply, as_bytes, as_int, as_list, as_ms, as_text, as_texts
from astraflow_dataflow.store.writing import Argument

MAX_SAMPLE_BYTES = 64 * 1024
"""Of an episode that is kept in quarantine."""
ACCEPTED = (Outcome.OUTCOME_ACCEPTED, Outcome.OUTCOME_ACCEPTED_LATE)
Pushed: TypeAlias = PushResult | AstraflowError
"""What became of an episode, or why it must be pushed again."""
_OUTCOMES = {name.removeprefix("OUTCOME_"): number for name, number in Outcome.items()}
"""By the names that the functions have for them."""


class EpisodeStore:
    """Commits of episodes, and the groups they complete."""

    def __init__(self, connection: Redis, payloads: Payloads) -> None:
        self._connection = connection
        self._payloads = payloads

    async def commit(
        self, run_id: str, episodes: Sequence[trajectory_pb2.Episode], *, horizon_s: float
    ) -> tuple[list[Pushed], list[CompleteTask]]:
        """Store payloads and commit valid episodes in one call; payloads of evaluation episodes are not kept.

        Returns what became of each episode, and the tasks that these completed and that wait to be settled. An
        episode's error is PayloadMissingError when it must be pushed again, InternalError when what Redis holds of its
        task is damaged. Raises NotFoundError, with all payloads removed, when the run is gone, UnavailableError when
        Redis is away.
        """
        headers = [list(placed_headers(episode)) for episode in episodes]
        pushed, completed, wrote_all = await self._commit(
            run_id, episodes, headers, horizon_s, some_exist=False
        )
        missing = [place for place, result in enumerate(pushed) if isinstance(result, PayloadMissingError)]
        if missing and not wrote_all:  # one of another episode was there already, so none was written
            again, their_headers = zip(*((episodes[place], headers[place]) for place in missing), strict=True)
            results, also_completed, _ = await self._commit(
                run_id, again, their_headers, horizon_s, some_exist=True
            )
            completed += also_completed
            for place, result in zip(missing, results, strict=True):
                pushed[place] = result
        accepted = _accepted(episodes, headers, pushed) if completed else {}
        return pushed, [_completed(as_list(task), accepted) for task in completed]

    async def commit_whole(self, run_id: str, judged: Judged) -> dict[str, list[Pushed]]:
        """Store and settle tasks that were judged with all of their episodes, in one call.

        Returns what became of the episodes of each by task; those of one that is not as it was when it was judged, or
        other plug-ins hold by now, are to be committed. Raises as `commit` does.
        """
        episodes = [episode for one in judged.tasks for episode, _ in one.episodes]
        reply, *_ = await self._call_with_payloads(
            run_id, episodes, "commit_whole", as_ms(judged.tombstone_s), list(whole_arguments(judged))
        )
        position, answers = as_int(reply[0]), map(as_text, as_list(reply[1]))
        return {
            one.task.task_id: [
                _result("ACCEPTED", "", position) if answer == "1" else _damaged(one.task.task_id, answer)
                for _ in one.episodes
            ]
            for one, answer in zip(judged.tasks, answers, strict=True)
            if answer
        }

    async def _commit(
        self,
        run_id: str,
        episodes: Sequence[trajectory_pb2.Episode],
        headers: Sequence[Headers],
        horizon_s: float,
        *,
        some_exist: bool,
    ) -> tuple[list[Pushed], list[Reply], bool]:
        """Return what became of each, the tasks that are complete, and whether all payloads were written."""
        pushes, sizes = commit_arguments(episodes, headers)
        reply, packed, wrote_all = await self._call_with_payloads(
            run_id, episodes, "commit", as_ms(horizon_s), pushes, some_exist=some_exist
        )
        pushed = _pushed(episodes, sizes, reply)
        if packed:
            await self._payloads.replace_lost(run_id, _repeated(episodes, pushed))
        return pushed, as_list(reply[2]), wrote_all

    async def _call_with_payloads(
        self,
        run_id: str,
        episodes: Sequence[trajectory_pb2.Episode],
        name: str,
        first: Argument,
        arguments: Sequence[Argument],
        *,
        some_exist: bool = False,
    ) -> tuple[list[Reply], str, bool]:
        """Store the payloads of episodes and call a function that refers to them, with where they are behind its first
        argument. Returns its reply, where they are if they are outside, and whether all were written.
        """
        keys = Keys(run_id)
        bodies = list(_bodies(episodes))
        packed = await self._payloads.write(run_id, [body for _, _, body in bodies])
        payloads = {
            keys.of("payload", episode_id, trajectory_id): body
            for episode_id, trajectory_id, body in bodies
            if not packed and body
        }
        if not payloads:  # they are outside, or not kept
            try:
                reply = await self._connection.call(keys, name, first, "", packed, *arguments)
            except NotFoundError:
                await self._payloads.forgo(run_id, packed)
                raise
            return as_list(reply), packed, True
        # The function removes it, and learns from it that none of the payloads was there before.
        mark = "" if some_exist else secrets.token_hex(8)
        if mark:
            payloads[keys.of("written", mark)] = b""
        reply, wrote_all = await call_with(
            self._connection, keys, payloads, name, first, mark, packed, *arguments, some_exist=some_exist
        )
        return as_list(reply), packed, wrote_all

    async def quarantine(
        self, run_id: str, refused: Sequence[tuple[trajectory_pb2.Episode, BadTrajectory]]
    ) -> list[Pushed]:
        """Count and keep refused episodes with a sample of each; a repeated one gets its first answer.

        Returns one reply, or typed error, per episode.
        """
        calls: list[Call] = [("quarantine", _quarantine_arguments(*one)) for one in refused]
        results: list[Pushed] = []
        replies = await self._connection.call_many(Keys(run_id), calls) if calls else []
        for (_, problem), reply in zip(refused, replies, strict=True):
            if isinstance(reply, AstraflowError):
                results.append(reply)
                continue
            outcome, kept_reason, position = as_list(reply)
            result = _result(as_text(outcome), as_text(kept_reason), as_int(position))
            if result.reason == problem.slug:
                result.detail = problem.detail[:2048]
            results.append(result)
        return results

    async def complete_tasks(self, run_id: str, task_ids: Sequence[str]) -> list[CompleteTask]:
        """Return those of some tasks that are complete and wait to be settled."""
        found = as_list(await self._connection.call(Keys(run_id), "members", *task_ids))
        return [_completed(as_list(task), {}) for task in found]

    async def settle(self, run_id: str, judged: Judged) -> set[str] | None:
        """Move the groups of complete tasks to ready or dropped, by the verdict of each. Returns the tasks that another
        server had not settled before, None when they were judged by other plug-ins than those of the newest switch.
        Raises InternalError for one that holds other trajectories than were judged.
        """
        reply = await self._connection.call(Keys(run_id), "settle", *settle_arguments(judged))
        if not isinstance(reply, list):
            return None
        settled, wrong = as_list(reply)
        if problem := as_text(wrong):
            raise InternalError(problem)
        return set(as_texts(settled))

    async def unsettled(self, run_id: str, *, least_age_s: float, limit: int) -> list[str]:
        """Return complete tasks that nobody settled for `least_age_s`."""
        reply = await self._connection.call(Keys(run_id), "unsettled", as_ms(least_age_s), limit)
        return as_texts(reply)


def _bodies(episodes: Iterable[trajectory_pb2.Episode]) -> Iterable[tuple[str, str, bytes]]:
    """Episode, trajectory and payload, in order; those of an evaluation are not kept, so theirs are empty."""
    for episode in episodes:
        is_kept = not is_evaluation_task(episode.task_id)
        for item in episode.trajectories:
            yield episode.episode_id, item.header.trajectory_id, item.body if is_kept else b""


def _repeated(
    episodes: Sequence[trajectory_pb2.Episode], pushed: Sequence[Pushed]
) -> dict[str, tuple[str, bytes]]:
    """Episode and payload of each trajectory that came again."""
    again = [
        episode
        for episode, result in zip(episodes, pushed, strict=True)
        if isinstance(result, PushResult) and result.outcome == Outcome.OUTCOME_DUPLICATE
    ]
    return {trajectory_id: (episode_id, body) for episode_id, trajectory_id, body in _bodies(again) if body}


def _quarantine_arguments(episode: trajectory_pb2.Episode, problem: BadTrajectory) -> tuple[Argument, ...]:
    return (
        episode.task_id,
        episode.member,
        episode.episode_id[:128],
        episode.node_id[:64],
        problem.slug,
        problem.detail[:2048],
        len(episode.trajectories),
        episode.SerializeToString()[:MAX_SAMPLE_BYTES],
        episode.attempt,
    )


def _accepted(
    episodes: Sequence[trajectory_pb2.Episode], headers: Sequence[Headers], pushed: Sequence[Pushed]
) -> dict[str, list[trajectory_pb2.TrajectoryHeader]]:
    """The headers of accepted episodes by task."""
    accepted = dict[str, list[trajectory_pb2.TrajectoryHeader]]()
    for episode, own, result in zip(episodes, headers, pushed, strict=True):
        if isinstance(result, PushResult) and result.outcome in ACCEPTED:
            accepted.setdefault(episode.task_id, []).extend(own)
    return accepted


def _completed(fields: list[Reply], accepted: Mapping[str, Headers]) -> CompleteTask:
    """A task that this commit completed. Of one that came as a whole Redis does not repeat the headers: they are
    those of its episodes that were accepted.
    """
    if isinstance(fields[5], list):
        return _complete_task(fields, list(stored_headers(map(as_bytes, fields[5]))))
    return _complete_task(fields, accepted.get(as_text(fields[0]), ()))


def _complete_task(fields: list[Reply], headers: Headers) -> CompleteTask:
    task_id, why, credited, size, num_finished, _, spec = fields
    roles = as_text(credited)
    return complete_task(
        as_text(task_id),
        why=as_text(why),
        credited=None if roles == "*" else frozenset(filter(None, roles.split("\n"))),
        group_size=as_int(size),
        num_finished=as_int(num_finished),
        spec=as_bytes(spec),
        headers=headers,
    )


def _pushed(
    episodes: Sequence[trajectory_pb2.Episode], sizes: Sequence[int], reply: Sequence[Reply]
) -> list[Pushed]:
    """What became of episodes that were sent in pushes of these sizes: each has one answer, or one of each episode."""
    position, answers, _ = reply
    outcomes = list[Reply]()
    for answer, size in zip(as_list(answers), sizes, strict=True):
        outcomes += answer if isinstance(answer, list) else [answer] * size
    return [
        _committed(episode, as_text(outcome), position=as_int(position))
        for episode, outcome in zip(episodes, outcomes, strict=True)
    ]


def _committed(episode: trajectory_pb2.Episode, outcome: str, *, position: int) -> Pushed:
    name, _, detail = outcome.partition(" ")
    if name == "RETRY":
        return PayloadMissingError(
            f"the payload of episode {episode.episode_id} is gone; push it again", retry_after_s=0.1
        )
    if name == "ERROR":
        return _damaged(episode.task_id, detail)
    return _result(name, detail, position)


def _damaged(task_id: str, detail: str) -> InternalError:
    return InternalError(f"Redis answered an error for task {task_id}: {detail}")


def _result(outcome: str, reason: str, position: int) -> PushResult:
    return PushResult(outcome=_OUTCOMES[outcome], reason=reason, position=position)
