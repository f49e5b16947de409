"""What the benchmark pushes keeps the rules of trajectories, or the server would only refuse it."""

from astraflow.columns import decode_columns
from astraflow.recipe.file import parse_recipe
from astraflow.rollout.v1 import trajectory_pb2
from astraflow.rollout.v1.task_pb2 import Lease, Task
from astraflow.trajectories import check_columns
from astraflow_bench.dataflow.workload import POLICY, PROMPT_TOKENS, Episodes, recipe_text


def test_every_member_has_a_trajectory_of_its_own_that_keeps_the_rules() -> None:
    episodes = list(
        Episodes("run", num_response=6, num_prompt=4).of(
            Lease(task=Task(task_id="task"), attempt=1), group_size=3
        )
    )
    assert [episode.member for episode in episodes] == [0, 1, 2]
    items = [item for episode in episodes for item in episode.trajectories]
    assert [item.header.trajectory_id for item in items] == ["task.0", "task.1", "task.2"]
    for item in items:
        body = trajectory_pb2.Trajectory.FromString(item.body)
        assert body.trajectory_id == item.header.trajectory_id
        columns = decode_columns(body)
        trained = check_columns(
            "it",
            token_ids=columns.token_ids,
            loss_mask=columns.loss_mask,
            logprobs=columns.logprobs,
            version_spans=body.version_spans,
            num_trainable=item.header.num_trainable_tokens,
        )
        assert trained is not None
        assert (len(columns.token_ids), int(columns.loss_mask.sum())) == (10, 6)


def test_the_longest_trajectories_that_are_measured_may_be_trained_on() -> None:
    recipe = parse_recipe(recipe_text("run", group_size=8, groups_per_step=64)).recipe
    assert recipe.row_limits[POLICY].max_tokens >= 16_384 + PROMPT_TOKENS
