"""A recipe's trainer section as settings of the compute core, and a tiny policy that resumes bit for bit."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from astraflow.errors import InvalidArgumentError
from astraflow.recipe import file
from astraflow_kit.plugins import RecipeSource
from astraflow_trainer.batches.rows import RowOrigin, TrainingRow
from astraflow_trainer.learner import PolicyLearner
from astraflow_trainer.model.checkpoint import CheckpointError
from astraflow_trainer.model.model import PolicyModel, build_causal_lm, load_causal_lm, save_causal_lm
from astraflow_trainer.publish.probing import Prober
from astraflow_trainer.ranks.group import join_rank_group
from astraflow_trainer.ranks.reductions import OneRank
from astraflow_trainer.settings import RankSettings
from astraflow_trainer.step.plugins import StepPlugins
from astraflow_trainer.step.step import Outcome, SkipReason
from astraflow_weights.codec.shards import ShardedModel
from support import scripted_dataflow, tiny_training


@dataclass
class Bench:
    """Where learners of one tiny model are made."""

    model_dir: Path
    checkpoint_dir: Path

    def learner(self, *overrides: str, reference_dir: Path | None = None) -> PolicyLearner:
        overrides = ("trainer.optimizer.warmup_steps=0", *overrides)
        policy = file.parse_recipe(scripted_dataflow.RECIPE, overrides=overrides).recipe.policy("solver")
        algorithm, roles = policy.trainer.algorithm, policy.advantages
        return PolicyLearner(
            policy,
            plugins=StepPlugins.made(algorithm, source=RecipeSource(), roles=roles),
            model_dir=self.model_dir,
            reference_dir=reference_dir,
            checkpoint_dir=self.checkpoint_dir,
            group=join_rank_group(RankSettings(), timeout_s=1.0),
        )


@pytest.fixture(scope="module", autouse=True)
def _no_process_group_left() -> Iterator[None]:
    """A learner joins a process group of one and keeps it for the life of the process."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    model_dir = tmp_path / "model"
    model_dir.mkdir()
    save_causal_lm(build_causal_lm(tiny_training.TINY, seed=0), model_dir)
    return Bench(model_dir, tmp_path / "checkpoints")


def _differing(left: ShardedModel, right: ShardedModel) -> list[str]:
    assert left.specs == right.specs
    pairs = {name: (shard.elements, right.shards[name].elements) for name, shard in left.shards.items()}
    return [name for name, (one, other) in pairs.items() if not np.array_equal(one, other)]


ALGORITHMS = [
    ("{loss: dual_clip, anchor: proximal, aggregation: {kind: constant, length: 8}}", False),
    ("{loss: gspo, advantage: rloo, kl: {coefficient: 0.1, estimator: k2, reference: model}}", True),
    ("{loss: cispo, advantage: dr_grpo, kl: {coefficient: 0.1}, aggregation: seq_mean_token_mean}", True),
]


@pytest.mark.parametrize(("algorithm", "kl_after"), ALGORITHMS)
def test_the_recipe_reaches_every_part_of_an_algorithm(algorithm: str, kl_after: bool, bench: Bench) -> None:
    learner = bench.learner(f"trainer.algorithm={algorithm}", "trainer.optimizer.learning_rate=0.01")
    first, second = (learner.train(tiny_training.make_rows(seed=seed)) for seed in range(2))
    assert (first.outcome, second.outcome) == (Outcome.COMMITTED, Outcome.COMMITTED)
    assert second.loss is not None
    assert (second.loss.kl > 1e-4) == kl_after


def test_a_reference_model_is_the_initial_one(bench: Bench) -> None:
    kl = "trainer.algorithm.kl={coefficient: 0.1, reference: model}"
    metrics = bench.learner(kl).train(tiny_training.make_rows())
    assert metrics.loss is not None
    assert metrics.loss.kl == pytest.approx(0.0, abs=1e-6)


def test_a_teacher_is_another_model_that_knows_the_policys_tokens(bench: Bench, tmp_path: Path) -> None:
    kl = "trainer.algorithm.kl={coefficient: 0.1, reference: {path: teacher}}"
    (teacher := tmp_path / "teacher").mkdir()
    larger = replace(tiny_training.TINY, hidden_size=32, vocab_size=tiny_training.VOCAB + 3)
    save_causal_lm(build_causal_lm(larger, seed=3), teacher)
    metrics = bench.learner(kl, reference_dir=teacher).train(tiny_training.make_rows())
    assert metrics.loss is not None
    assert metrics.loss.kl > 0.01
    (small := tmp_path / "small").mkdir()
    save_causal_lm(build_causal_lm(replace(tiny_training.TINY, vocab_size=8), seed=3), small)
    with pytest.raises(InvalidArgumentError, match=r"knows 8 token ids, the policy has 32"):
        bench.learner(kl, reference_dir=small)


def test_a_model_without_routers_cannot_replay(bench: Bench) -> None:
    with pytest.raises(
        InvalidArgumentError, match=r"no routers that can replay .* Qwen3-MoE, or leave it out"
    ):
        bench.learner("trainer.router_replay=true")


def test_several_updates_resume_with_the_same_bits(bench: Bench) -> None:
    algorithm = "{loss: ppo_clip, anchor: proximal, minibatches: 2, epochs: 2}"
    options = (f"trainer.algorithm={algorithm}", "trainer.optimizer.learning_rate=0.01")
    straight = bench.learner(*options)
    assert straight.train(tiny_training.make_rows(seed=1)).num_updates == 4
    straight.stage(step=1, version=1)()
    straight.train(tiny_training.make_rows(seed=2))
    resumed = bench.learner(*options)
    position = resumed.restore()
    assert position is not None
    assert (position.step, position.optimizer_steps) == (1, 4)
    resumed.train(tiny_training.make_rows(seed=2))
    assert _differing(straight.published_bytes().open(), resumed.published_bytes().open()) == []


PPO = "trainer.algorithm={preset: ppo, epochs: 2, critic: {learning_rate: 0.01, warmup: 1}}"


def test_a_critic_resumes_with_the_same_bits_and_is_never_published(bench: Bench) -> None:
    options = (PPO, "trainer.optimizer.learning_rate=0.01")
    plain, straight = bench.learner(), bench.learner(*options)
    assert straight.held.specs == plain.held.specs
    first = straight.published_bytes().open()
    assert straight.train(tiny_training.make_rows(seed=1)).skip_reason is SkipReason.CRITIC_WARMUP
    # A step of the critic alone makes no version: not a bit of the policy is another.
    assert _differing(straight.published_bytes().open(), first) == []
    straight.train(tiny_training.make_rows(seed=2))
    straight.stage(step=2, version=1)()
    expected = straight.train(tiny_training.make_rows(seed=3))
    straight.stage(step=3, version=2)()

    resumed = bench.learner(*options)
    position = resumed.restore(at_most=2)
    assert position is not None
    found = resumed.train(tiny_training.make_rows(seed=3))
    assert (found.of_critic, found.loss) == (expected.of_critic, expected.loss)
    assert found.of_critic.keys() >= {"value_loss", "explained_variance", "critic_grad_norm"}
    assert _differing(straight.published_bytes().open(), resumed.published_bytes().open()) == []

    with pytest.raises(CheckpointError, match=r"holds critic\.exp_avg.* this model needs None"):
        bench.learner("trainer.optimizer.learning_rate=0.01").restore()


def test_learning_rate_and_warm_up_come_from_the_recipe(bench: Bench) -> None:
    learner = bench.learner("trainer.optimizer.learning_rate=0.01", "trainer.optimizer.warmup_steps=4")
    rates = [learner.train(tiny_training.make_rows(seed=seed)).learning_rate for seed in range(2)]
    assert rates == [pytest.approx(0.0025), pytest.approx(0.005)]


def test_a_learning_rate_of_zero_publishes_the_weights_it_started_from(bench: Bench) -> None:
    learner = bench.learner("trainer.optimizer.learning_rate=0")
    before = learner.published_bytes().open()
    assert learner.train(tiny_training.make_rows()).outcome is Outcome.COMMITTED
    assert _differing(before, learner.published_bytes().open()) == []


def test_published_bytes_are_a_copy_that_training_does_not_change(bench: Bench) -> None:
    learner = bench.learner("trainer.optimizer.learning_rate=0.01")
    before = learner.published_bytes().open()
    kept = {name: shard.elements.copy() for name, shard in before.shards.items()}
    learner.train(tiny_training.make_rows())
    assert all(np.array_equal(before.shards[name].elements, bits) for name, bits in kept.items())
    assert _differing(before, learner.published_bytes().open()) != []


def test_a_version_says_what_its_published_bits_answer(bench: Bench, tmp_path: Path) -> None:
    learner = bench.learner("trainer.optimizer.learning_rate=0.01")
    first = learner.published_bytes().probe
    learner.train(tiny_training.make_rows())
    published = learner.published_bytes()
    learner.stage(step=1, version=1)()
    # A model made of the published bits alone, as an engine loads it.
    bits = {
        name: torch.from_numpy(shard.elements.copy()).view(torch.bfloat16)
        for name, shard in published.open().shards.items()
    }
    loaded = load_causal_lm(bench.model_dir)
    for name, parameter in loaded.named_parameters():
        parameter.data = bits[name].float().reshape(parameter.shape)
    expected = Prober(PolicyModel(loaded), ranks=OneRank()).answers()
    assert published.probe == expected != first
    assert bench.learner().restore() is not None, "a checkpoint after a probe is whole"
    assert bench.learner("trainer.publish.probe=false").published_bytes().probe is None


def test_bf16_compute_resumes_with_the_same_bits(bench: Bench) -> None:
    options = ("trainer.compute=bf16", "trainer.optimizer.learning_rate=0.01")
    straight = bench.learner(*options)
    straight.train(tiny_training.make_rows(seed=1))
    straight.stage(step=1, version=1)()
    straight.train(tiny_training.make_rows(seed=2))
    resumed = bench.learner(*options)
    assert resumed.restore() is not None
    resumed.train(tiny_training.make_rows(seed=2))
    assert _differing(straight.published_bytes().open(), resumed.published_bytes().open()) == []


def test_there_is_nothing_to_restore_before_the_first_checkpoint(bench: Bench) -> None:
    assert bench.learner().restore() is None


def test_only_as_many_checkpoints_are_kept_as_the_recipe_says(bench: Bench) -> None:
    learner = bench.learner("trainer.keep_checkpoints=2")
    for step in (1, 2, 3):
        learner.stage(step=step, version=step + 10)()
    assert len(list(bench.checkpoint_dir.iterdir())) == 2
    position = bench.learner().restore()
    assert position is not None
    assert (position.step, position.version) == (3, 13)


RAE = "roles={solver: {policy: solver, advantage: {kind: rae, decay: 0.5}}}"


def _played(reward: float) -> list[TrainingRow]:
    origin = RowOrigin("t", "solver", source="sums")
    return [tiny_training.make_row([1], [2, 3], reward=reward, group=origin)]


def test_a_resumed_trainer_goes_on_with_the_running_baselines_of_its_checkpoint(bench: Bench) -> None:
    """From 0 again, the step would push up what is below average."""
    first = bench.learner(RAE)
    for _ in range(3):
        first.train(_played(1.0))
    first.stage(step=3, version=3)()
    first.train(_played(0.75))
    first.stage(step=4, version=4)()

    resumed = bench.learner(RAE)
    position = resumed.restore(at_most=3)
    assert position is not None
    assert position.baselines == {"role=solver/source=sums": 0.875}
    resumed.train(_played(0.75))
    resumed.stage(step=4, version=4)()
    assert [at.baselines for at in bench.learner(RAE).positions()] == [
        {"role=solver/source=sums": 0.875},
        {"role=solver/source=sums": 0.8125},
    ]


def test_a_step_that_is_skipped_moves_running_baselines_all_the_same(bench: Bench) -> None:
    """They depend on the batches alone, so a replay that a guard judges otherwise finds them again."""
    learner = bench.learner(RAE)
    assert learner.train(_played(0.0)).outcome is Outcome.SKIPPED
    learner.train(_played(1.0))
    learner.train(_played(0.5))
    assert learner.train(_played(0.5)).outcome is Outcome.SKIPPED
    learner.stage(step=4, version=2)()
    (position,) = learner.positions()
    assert position.baselines == {"role=solver/source=sums": 0.5}
