"""The run that is measured: its recipe, its empty data set, and episodes of any length that cost little to make.

Invariant: every trajectory keeps all rules of `astraflow.trajectories`, so the server does with it what it does with
a real one. The server's processes import this module for the data set; keep it light.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from astraflow.columns import Columns, encode_columns
from astraflow.plugins import TaskSpec
from astraflow.recipe.file import parse_recipe
from astraflow.rollout.v1 import task_pb2, trajectory_pb2

POLICY = "solver"
NODE = "bench"
PROMPT_TOKENS = 512
_VOCABULARY = 150_000
_RECIPE = """
run: {{name: {name}, dataset: "{dataset}"}}
policies:
  solver:
    model: {{path: nowhere}}
    sampling: {{max_new_tokens: 16}}
    trainer: {{tokens_per_microbatch: 1048576}}
dataflow:
  group_size: {group_size}
  groups_per_step: {groups_per_step}
  max_staleness: 1024
  lease_ttl_s: 600
  group_deadline_s: 86400
  evaluation: {{every_versions: 0, num_samples: 1, final_samples: 1}}
raas: {{reward: "{reward}"}}
"""


class NoTasks:
    """A data set without tasks: the benchmark submits its own."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def train(self, index: int) -> TaskSpec | None:
        """None."""
        return None

    def heldout(self, index: int) -> TaskSpec | None:
        """None."""
        return None


class Unrewarded:
    """A reward that nobody calls."""

    def __call__(self, task: object, completion: str) -> float:
        """0."""
        return 0.0


def recipe_text(name: str, *, group_size: int, groups_per_step: int) -> str:
    """The recipe of a measured run; its window is 1,025 batches."""
    dataset, reward = (f"{__name__}:{plugin.__name__}" for plugin in (NoTasks, Unrewarded))
    text = _RECIPE.format(
        name=name, dataset=dataset, reward=reward, group_size=group_size, groups_per_step=groups_per_step
    )
    return parse_recipe(text).yaml_text


class Episodes:
    """Makes episodes of one trajectory with `PROMPT_TOKENS` and `num_response` tokens."""

    def __init__(self, run_id: str, *, num_response: int, num_prompt: int = PROMPT_TOKENS) -> None:
        num_tokens = num_prompt + num_response
        draw = np.random.default_rng(0)
        mask = np.arange(num_tokens) >= num_prompt
        columns = Columns(
            token_ids=draw.integers(0, _VOCABULARY, num_tokens, dtype=np.int32),
            loss_mask=mask,
            logprobs=np.where(mask, -draw.exponential(1.0, num_tokens), 0.0).astype(np.float32),
            version_spans=((num_prompt, num_tokens, 0),),
        )
        self._run_id = run_id
        self._body = encode_columns(columns, trajectory_id="")
        self._body.sampling.temperature = 1.0
        self._header = trajectory_pb2.TrajectoryHeader(
            policy_id=POLICY, num_tokens=num_tokens, num_trainable_tokens=num_response, finish_reason="stop"
        )

    @property
    def body_bytes(self) -> int:
        """Bytes of one trajectory's payload."""
        return self._made("x" * 16).ByteSize()

    def of(self, lease: task_pb2.Lease, *, group_size: int) -> Iterator[trajectory_pb2.Episode]:
        """The episodes of a task's members."""
        task_id = lease.task.task_id
        for member in range(group_size):
            name = f"{task_id}.{member}"
            self._header.trajectory_id, self._header.reward = name, float(member)
            item = trajectory_pb2.TrajectoryItem(
                header=self._header, body=self._made(name).SerializeToString()
            )
            yield trajectory_pb2.Episode(
                run_id=self._run_id,
                task_id=task_id,
                episode_id=name,
                member=member,
                attempt=lease.attempt,
                lease_id=lease.lease_id,
                node_id=NODE,
                status=trajectory_pb2.EPISODE_STATUS_FINISHED,
                trajectories=[item],
            )

    def _made(self, trajectory_id: str) -> trajectory_pb2.Trajectory:
        self._body.trajectory_id = trajectory_id
        return self._body
