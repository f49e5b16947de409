"""The same around transformers' own `Trainer`. `hf_trainer.py ADDRESS TOKEN_FILE MODEL WORK_DIR`"""

import sys
from pathlib import Path
from typing import Any

import torch
from plain_trainer import bits_of, loss_of, opened
from transformers import Trainer, TrainerCallback, TrainingArguments

from astraflow.client import Client, Connection
from astraflow.training.claimed import ClaimedPolicy
from astraflow_weights.tools.whole_model import WholeModelPublisher


class PolicyTrainer(Trainer):
    """Asks for the batch of a step when the step begins: `Trainer` reads its data set ahead, which cannot be."""

    policy: ClaimedPolicy
    versions: WholeModelPublisher

    def compute_loss(
        self, model: torch.nn.Module, inputs: dict[str, Any], *_: object, **__: object
    ) -> torch.Tensor:
        """Policy gradient on the batch of the next step; nothing of `inputs` is looked at."""
        versions = self.versions
        self.batch = self.policy.next_batch(step=versions.step + 1, base_version=versions.version)
        return loss_of(model, self.batch)


class Published(TrainerCallback):
    """Each optimizer step becomes a version."""

    def __init__(self, trainer: PolicyTrainer) -> None:
        self.trainer = trainer

    def on_step_end(self, args: object, state: object, control: object, **_: object) -> None:
        """Ack, publish, and let go of the step."""
        trainer, step = self.trainer, self.trainer.batch.bound.step
        trainer.policy.trained(trainer.batch)
        assert isinstance(trainer.model, torch.nn.Module)
        trainer.versions.publish(bits_of(trainer.model), step=step)
        trainer.policy.durable(step)


def main(address: str, token: str, first: str, folder: str) -> None:
    with Client(Connection(address, token=Path(token))) as client:
        policy = ClaimedPolicy(client, trainer_id="transformers")
        model, versions = opened(client, policy, first=Path(first), folder=Path(folder) / "version")
        said = policy.settings.trainer.optimizer
        steps = policy.settings.steps - versions.step
        arguments = TrainingArguments(
            output_dir=folder, max_steps=steps, per_device_train_batch_size=1, use_cpu=True,
            learning_rate=said.learning_rate, adam_beta1=said.beta1, adam_beta2=said.beta2, adam_epsilon=said.eps,
            max_grad_norm=said.grad_clip, warmup_steps=said.warmup_steps, lr_scheduler_type="constant_with_warmup",
            save_strategy="no", report_to=[], remove_unused_columns=False, disable_tqdm=True,
        )  # fmt: skip
        # What the data set holds is never looked at; it only has to be long enough.
        trainer = PolicyTrainer(model, arguments, train_dataset=[{"labels": torch.zeros(1)}] * steps)
        trainer.policy, trainer.versions = policy, versions
        trainer.add_callback(Published(trainer))
        trainer.train()


if __name__ == "__main__":
    main(*sys.argv[1:])
