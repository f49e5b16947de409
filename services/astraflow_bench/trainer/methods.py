"""The same step by our trainer, by a plain loop around transformers and by TRL's GRPO trainer.

Invariant: model, rows, advantages (GRPO's), loss (PPO's clip of the ratio to the log-probs that came with the rows,
mean over trained tokens), gradient clipping and AdamW are the same, and so is the gradient; what differs is how it is
computed. Ours packs rows and never holds whole logits. The plain loop pads rows to the longest beside them and holds
the logits of all positions. TRL is `GRPOTrainer` itself without its sampling: prompts padded on the left, completions
on the right, log-probs in tiles by its fused head, its own optimizer. Called by `trainers` and `gpu`.

Shape legend: B rows of a pass, L positions, V vocabulary.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, models
from torch.distributed.device_mesh import init_device_mesh

from astraflow.recipe import OptimizerSettings
from astraflow.recipe.advantage import Grpo
from astraflow.recipe.algorithm import AlgorithmSettings
from astraflow_trainer.batches.rows import TrainingRow
from astraflow_trainer.model.model import ModelShape, PolicyModel, build_causal_lm
from astraflow_trainer.model.optimizer import MasterOptimizer
from astraflow_trainer.model.sharding import Compute, Placement, shard
from astraflow_trainer.ranks.reductions import OneRank
from astraflow_trainer.step.estimators import RankedRows, batch_advantages
from astraflow_trainer.step.step import Outcome, StepSettings, train_step

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["COMPILED", "METHODS", "OURS", "PLAIN", "TRL", "Step", "Task", "lacking", "ours"]

Step = Callable[[], float]
"""Takes one step and says how large the gradient was before it was clipped, as a norm."""
OURS, COMPILED, PLAIN, TRL = (
    "ours: packed, logits in chunks",
    "ours, compiled",
    "plain loop: padded, whole logits",
    "TRL: padded, fused head",
)
_CLIP = 0.2
_OPTIMIZER = OptimizerSettings(warmup_steps=0)
_ALGORITHM = AlgorithmSettings.model_validate(
    {
        "advantage": "grpo",
        "loss": {"kind": "ppo_clip", "low": _CLIP, "high": _CLIP},
        "mismatch": {"weight": "none"},
    }
)


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is trained, and where."""

    shape: ModelShape
    rows: Sequence[TrainingRow]
    budget: int
    """Positions of one pass."""
    device: torch.device
    compute: Compute

    @property
    def num_trained(self) -> int:
        """Trained tokens of the rows."""
        return sum(row.num_trained_tokens for row in self.rows)

    def model(self) -> transformers.PreTrainedModel:
        """fp32 weights that bf16 can hold, as ours are."""
        with self.device:
            causal_lm = build_causal_lm(self.shape, seed=0)
        for parameter in causal_lm.parameters():
            parameter.data = parameter.data.bfloat16().float()
        causal_lm.train()
        return causal_lm

    def padded(self) -> Iterator[tuple[Sequence[TrainingRow], torch.Tensor]]:
        """Rows as they come, so many that the longest of all would fit the budget, and advantages float32[B, 1]."""
        everybody = RankedRows.gathered(self.rows, ranks=OneRank())
        found = batch_advantages(everybody, default=Grpo(), of_role={}, baselines={}).values
        at_once = max(1, self.budget // max(row.num_tokens for row in self.rows))
        for first in range(0, len(self.rows), at_once):
            chunk = slice(first, first + at_once)
            given_B1 = torch.tensor(found[chunk], dtype=torch.float32, device=self.device)[:, None]
            yield self.rows[chunk], given_B1

    def column(self, parts: Sequence[npt.NDArray[Any]], *, left: bool = False) -> torch.Tensor:
        """[B, L] on the device, padded with 0."""
        width = max(map(len, parts))
        table = [np.pad(part, (width - len(part), 0) if left else (0, width - len(part))) for part in parts]
        return torch.from_numpy(np.stack(table)).to(self.device)


def lacking(method: str) -> str:
    """The package that a method needs and that is not installed; empty where none is."""
    return "trl" if method == TRL and find_spec("trl") is None else ""


def ours(task: Task, *, compiled: bool = False) -> Step:
    """Our trainer's step; `compiled` as `ASTRAFLOW_COMPILE` has it."""
    policy = PolicyModel(task.model())
    mesh = init_device_mesh(task.device.type, (1,))
    shard(policy, mesh=mesh, placement=Placement(compute=task.compute, compiled=compiled))
    optimizer = MasterOptimizer(policy, settings=_OPTIMIZER)
    settings = StepSettings(algorithm=_ALGORITHM, tokens_per_microbatch=task.budget)

    def step() -> float:
        metrics = train_step(policy, optimizer=optimizer, rows=task.rows, settings=settings)
        assert metrics.outcome is Outcome.COMMITTED, metrics.skip_reason
        return metrics.gradient_norm

    return step


def _plain(task: Task) -> Step:
    model = task.model()
    betas = (_OPTIMIZER.beta1, _OPTIMIZER.beta2)
    adam = torch.optim.AdamW(
        model.parameters(),
        lr=_OPTIMIZER.learning_rate,
        betas=betas,
        eps=_OPTIMIZER.eps,
        weight_decay=0.0,
        fused=True,
    )
    batches = [
        (
            task.column([row.token_ids.astype(np.int64) for row in rows]),
            task.column([np.ones(row.num_tokens, dtype=np.int64) for row in rows]),
            task.column([row.loss_mask for row in rows]),
            task.column([row.behavior_logprobs for row in rows]),
            advantage_B1,
        )
        for rows, advantage_B1 in task.padded()
    ]

    def step() -> float:
        for ids_BL, mask_BL, trained_BL, behavior_BL, advantage_B1 in batches:
            with torch.autocast(task.device.type, torch.bfloat16, enabled=task.compute == "bf16"):
                logits_BLV = model(input_ids=ids_BL, attention_mask=mask_BL, use_cache=False).logits
            scores_BLV = torch.log_softmax(logits_BLV[:, :-1].float(), -1)
            logprob_BL = scores_BLV.gather(-1, ids_BL[:, 1:, None])[..., 0]
            ratio_BL = torch.where(trained_BL[:, 1:], logprob_BL - behavior_BL[:, 1:], 0.0).exp()
            bounded_BL = ratio_BL.clamp(1 - _CLIP, 1 + _CLIP)
            loss_BL = -torch.min(ratio_BL * advantage_B1, bounded_BL * advantage_B1) * trained_BL[:, 1:]
            (loss_BL.sum() / task.num_trained).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), _OPTIMIZER.grad_clip)
        adam.step()
        adam.zero_grad()
        return float(norm)

    return step


def _trl(task: Task) -> Step:
    batches = list(task.padded())
    trainer = _grpo_trainer(task, num_passes=len(batches))
    model, adam = trainer.model.train(), trainer.create_optimizer()
    inputs = [_inputs_of_trl(task, rows, advantage_B1) for rows, advantage_B1 in batches]

    def step() -> float:
        for given in inputs:
            trainer._compute_loss(model, given).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), trainer.args.max_grad_norm)
        adam.step()
        adam.zero_grad()
        return float(norm)

    return step


def _grpo_trainer(task: Task, *, num_passes: int) -> Any:  # noqa: ANN401 - trl may not be installed
    """TRL's trainer of this model; it will not be asked to sample, so a tokenizer of one word and one prompt do."""
    trl, words = import_module("trl"), Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    with tempfile.TemporaryDirectory(prefix="astraflow-trl-") as folder, warnings.catch_warnings():
        # The newest transformers have another name for recomputing, the oldest that we allow only this.
        warnings.simplefilter("ignore", FutureWarning)
        settings = trl.GRPOConfig(
            output_dir=folder,
            use_cpu=task.device.type == "cpu",
            bf16=task.compute == "bf16",
            gradient_checkpointing=False,
            steps_per_generation=num_passes,
            per_device_train_batch_size=2,
            num_generations=2,
            learning_rate=_OPTIMIZER.learning_rate,
            adam_beta2=_OPTIMIZER.beta2,
            epsilon=_CLIP,
            report_to=[],
        )
        trainer = trl.GRPOTrainer(
            model=task.model(),
            reward_funcs=lambda **_: [0.0],
            args=settings,
            train_dataset=import_module("datasets").Dataset.from_dict({"prompt": ["a"]}),
            processing_class=transformers.PreTrainedTokenizerFast(
                tokenizer_object=words, pad_token="a", eos_token="a"
            ),
        )
    trainer.current_gradient_accumulation_steps = num_passes
    return trainer


def _inputs_of_trl(
    task: Task, rows: Sequence[TrainingRow], advantage_B1: torch.Tensor
) -> dict[str, torch.Tensor]:
    ids = [np.split(row.token_ids.astype(np.int64), [_prompt(row)]) for row in rows]
    prompts, completions = [prompt for prompt, _ in ids], [completion for _, completion in ids]
    return {
        "prompt_ids": task.column(prompts, left=True),
        "prompt_mask": task.column([np.ones_like(prompt) for prompt in prompts], left=True),
        "completion_ids": task.column(completions),
        "completion_mask": task.column([np.ones_like(completion) for completion in completions]),
        "old_per_token_logps": task.column([row.behavior_logprobs[_prompt(row) :] for row in rows]),
        "advantages": advantage_B1[:, 0],
        "num_items_in_batch": torch.tensor(task.num_trained, device=task.device),
    }


def _prompt(row: TrainingRow) -> int:
    """Tokens before the first trained one."""
    return int(row.loss_mask.argmax())


METHODS: Mapping[str, Callable[[Task], Step]] = {OURS: ours, PLAIN: _plain, TRL: _trl}
