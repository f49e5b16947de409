"""Scores of an evaluation: avg@k and pass@k of each policy, of all tasks and by source, from its journal of results.

The journal is text, a line of JSON for each held-out task as it is queued and for each policy of an episode as it is
accepted; this module alone knows its form. Pure; called by curation, the episode store and the evaluation servicer.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from statistics import fmean

from astraflow.dataflow.v1.evaluation_service_pb2 import PassAtK, SampleResult, Score, TaskResult
from astraflow.rollout.v1.trajectory_pb2 import Episode
from astraflow_dataflow.rules.evaluation import sample_index
from astraflow_dataflow.rules.groups import TRUNCATED

__all__ = ["pass_at_k", "read_journal", "result_lines", "scores_of", "task_line"]


def task_line(index: int, *, task_id: str, source: str) -> str:
    """Return the line of the held-out task at `index`."""
    return json.dumps([index, task_id, source]) + "\n"


def result_lines(episode: Episode) -> str:
    """Return a line for each policy with a trajectory in an episode of an evaluation."""
    sample = sample_index(episode.task_id)
    headers = sorted((item.header for item in episode.trajectories), key=lambda header: header.policy_id)
    lines = []
    for policy_id, group in groupby(headers, key=lambda header: header.policy_id):
        own = list(group)
        truncated = any(header.finish_reason == TRUNCATED for header in own)
        lines.append(json.dumps([sample, policy_id, fmean(header.reward for header in own), int(truncated)]))
    return "".join(line + "\n" for line in lines)


def read_journal(journal: str, *, samples_per_task: int) -> list[TaskResult]:
    """Return the tasks of a journal by index, each with its results by sample and policy."""
    lines = [json.loads(line) for line in journal.splitlines()]
    tasks = {
        line[0]: TaskResult(index=line[0], task_id=line[1], source=line[2])
        for line in lines
        if len(line) == 3
    }
    for sample, policy_id, reward, truncated in sorted(line for line in lines if len(line) == 4):
        index, position = divmod(sample, samples_per_task)
        tasks[index].samples.add(
            policy_id=policy_id, sample=position, reward=reward, truncated=bool(truncated)
        )
    return [tasks[index] for index in sorted(tasks)]


def scores_of(
    tasks: Sequence[TaskResult], *, policies: Iterable[str], samples_per_task: int, pass_reward: float
) -> list[Score]:
    """Return the scores of each policy: of all tasks, then by source where tasks name one; none without a result."""
    scores = []
    for policy_id in policies:
        results = {
            task.index: [item for item in task.samples if item.policy_id == policy_id] for task in tasks
        }
        for source in ("", *sorted({task.source for task in tasks} - {""})):
            own = [
                results[task.index] for task in tasks if source in ("", task.source) and results[task.index]
            ]
            if own:
                score = _score(own, ks=list(_ks(samples_per_task)), pass_reward=pass_reward)
                score.policy_id, score.source = policy_id, source
                scores.append(score)
    return scores


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """Return how likely one of k samples passes, estimated without bias from n ≥ k samples of which c passed:
    1 − C(n − c, k) / C(n, k).
    """
    return 1.0 - math.comb(num_samples - num_passed, k) / math.comb(num_samples, k)


def _score(tasks: Sequence[Sequence[SampleResult]], *, ks: Sequence[int], pass_reward: float) -> Score:
    """`tasks` has the results of each task, at least one."""
    results = [result for task in tasks for result in task]
    passed = [(len(task), sum(result.reward >= pass_reward for result in task)) for task in tasks]
    estimates: Mapping[int, list[float]] = {
        k: [pass_at_k(num_samples, num_passed, k) for num_samples, num_passed in passed if num_samples >= k]
        for k in ks
    }
    return Score(
        num_tasks=len(tasks),
        num_samples=len(results),
        mean_reward=fmean(result.reward for result in results),
        avg_at_k=fmean(fmean(result.reward for result in task) for task in tasks),
        pass_at_k=[
            PassAtK(k=k, value=fmean(values), num_tasks=len(values))
            for k, values in estimates.items()
            if values
        ],
        truncated_fraction=fmean(result.truncated for result in results),
    )


def _ks(most: int) -> Iterator[int]:
    """The powers of two below `most`, and `most`."""
    k = 1
    while k < most:
        yield k
        k *= 2
    yield most
