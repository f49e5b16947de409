"""avg@k and pass@k, against numbers worked by hand."""

import pytest

from astraflow.dataflow.v1.evaluation_service_pb2 import TaskResult
from astraflow.rollout.v1.trajectory_pb2 import Episode, TrajectoryHeader, TrajectoryItem
from astraflow_dataflow.rules.evaluation import task_id
from astraflow_dataflow.rules.scores import pass_at_k, read_journal, result_lines, scores_of, task_line


def episode(sample: int, *rewards: float, policy: str = "solver", finish_reason: str = "stop") -> Episode:
    """An episode of sample number `sample` of a pass, with a trajectory for each reward."""
    headers = [
        TrajectoryHeader(policy_id=policy, reward=reward, finish_reason=finish_reason) for reward in rewards
    ]
    return Episode(
        task_id=task_id("0:final", sample), trajectories=[TrajectoryItem(header=header) for header in headers]
    )


def tasks(*rewards: list[float], sources: str = "") -> list[TaskResult]:
    """Held-out tasks with the rewards of their samples; `sources` has a letter for each."""
    size = max(map(len, rewards))
    lines = [
        task_line(index, task_id=f"t{index}", source=sources[index : index + 1])
        for index in range(len(rewards))
    ]
    lines += [
        result_lines(episode(index * size + sample, reward))
        for index, own in enumerate(rewards)
        for sample, reward in enumerate(own)
    ]
    return read_journal("".join(lines), samples_per_task=size)


@pytest.mark.parametrize(
    ("num_samples", "num_passed", "k", "expected"),
    [
        (1, 0, 1, 0.0),
        (1, 1, 1, 1.0),
        (4, 1, 1, 1 / 4),
        (4, 1, 2, 1 / 2),  # C(3, 2) / C(4, 2) = 3 / 6
        (4, 2, 2, 5 / 6),  # C(2, 2) / C(4, 2) = 1 / 6
        (4, 3, 2, 1.0),  # no two of them can both fail
        (5, 2, 3, 9 / 10),  # C(3, 3) / C(5, 3) = 1 / 10
        (10, 3, 5, 11 / 12),  # C(7, 5) / C(10, 5) = 21 / 252
        (200, 1, 100, 1 / 2),  # one sample, drawn with probability k / n
    ],
)
def test_pass_at_k_is_one_less_the_draws_in_which_all_fail(
    num_samples: int, num_passed: int, k: int, expected: float
) -> None:
    assert pass_at_k(num_samples, num_passed, k) == pytest.approx(expected, abs=1e-12)


def test_scores_are_means_over_tasks() -> None:
    found = tasks([1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.5])
    (score,) = scores_of(found, policies=["solver"], samples_per_task=4, pass_reward=1.0)
    assert (score.policy_id, score.source, score.num_tasks, score.num_samples) == ("solver", "", 2, 8)
    assert score.mean_reward == score.avg_at_k == 3.5 / 8
    # Per task: c = 1 and c = 2 of n = 4.
    assert [(item.k, item.num_tasks) for item in score.pass_at_k] == [(1, 2), (2, 2), (4, 2)]
    assert [item.value for item in score.pass_at_k] == pytest.approx([3 / 8, (1 / 2 + 5 / 6) / 2, 1.0])


def test_the_reward_that_passes_is_the_recipes() -> None:
    (score,) = scores_of(tasks([0.5, 0.0]), policies=["solver"], samples_per_task=2, pass_reward=0.5)
    assert [item.value for item in score.pass_at_k] == [0.5, 1.0]


def test_a_task_that_lacks_samples_counts_in_the_k_it_has() -> None:
    found = tasks([1.0, 0.0, 1.0], [0.0], [])
    (score,) = scores_of(found, policies=["solver"], samples_per_task=3, pass_reward=1.0)
    assert (score.num_tasks, score.num_samples) == (2, 4)
    assert score.mean_reward == 1 / 2
    assert score.avg_at_k == pytest.approx(1 / 3)
    assert [(item.k, item.num_tasks) for item in score.pass_at_k] == [(1, 2), (2, 1), (3, 1)]


def test_sources_have_scores_of_their_own_after_that_of_all() -> None:
    found = tasks([1.0], [0.0], [1.0], sources="bab")
    scores = scores_of(found, policies=["solver"], samples_per_task=1, pass_reward=1.0)
    assert [(item.source, item.num_tasks, item.avg_at_k) for item in scores] == [
        ("", 3, pytest.approx(2 / 3)),
        ("a", 1, 0.0),
        ("b", 2, 1.0),
    ]


def test_a_policy_without_a_result_has_no_score() -> None:
    assert scores_of(tasks([1.0]), policies=["judge"], samples_per_task=1, pass_reward=1.0) == []


def test_a_sample_is_the_mean_of_the_policys_trajectories_and_truncated_when_one_is() -> None:
    cut = episode(1, 1.0, 0.0, finish_reason="length")
    journal = task_line(0, task_id="t", source="s") + result_lines(cut) + result_lines(episode(0, 1.0))
    (task,) = read_journal(journal, samples_per_task=2)
    assert (task.index, task.task_id, task.source) == (0, "t", "s")
    assert [(item.sample, item.reward, item.truncated) for item in task.samples] == [
        (0, 1.0, False),
        (1, 0.5, True),
    ]
    score, *_ = scores_of([task], policies=["solver"], samples_per_task=2, pass_reward=1.0)
    assert score.truncated_fraction == 0.5


def test_names_of_any_characters_come_back() -> None:
    (task,) = read_journal(task_line(3, task_id='a"b', source="ü\n\t"), samples_per_task=1)
    assert (task.task_id, task.source) == ('a"b', "ü\n\t")
