"""A trainer in plain torch: PPO's clip, group baselines, AdamW. `plain_trainer.py ADDRESS TOKEN_FILE MODEL WORK_DIR`"""

import sys
from pathlib import Path

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, PreTrainedModel

from astraflow.client import Client, Connection
from astraflow.training.claimed import ClaimedBatch, ClaimedPolicy
from astraflow_weights.codec.tensors import Model
from astraflow_weights.store import open_store
from astraflow_weights.tools.whole_model import WholeModelPublisher


def loss_of(model: torch.nn.Module, batch: ClaimedBatch) -> torch.Tensor:
    """Mean over trained tokens of -min(r A, clip(r) A), where A is a reward less the mean of its group."""
    reward = torch.tensor([row.item.reward for row in batch.rows])
    _, group = np.unique([row.item.group_id for row in batch.rows], return_inverse=True)
    gain = torch.stack([reward[i] - reward[group == group[i]].mean() for i in range(len(reward))])[:, None]
    ids = pad_sequence([torch.tensor(row.columns.token_ids).long() for row in batch.rows], batch_first=True)
    mask = pad_sequence([torch.tensor(row.columns.loss_mask) for row in batch.rows], batch_first=True)[:, 1:]
    before = pad_sequence([torch.tensor(row.columns.logprobs) for row in batch.rows], batch_first=True)[:, 1:]
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
    now = torch.log_softmax(logits, -1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    ratio = torch.where(mask, now - before, 0.0).exp()
    return -(torch.minimum(ratio * gain, ratio.clamp(0.8, 1.28) * gain) * mask).sum() / mask.sum()


def bits_of(model: torch.nn.Module) -> Model:
    """What is published: bf16 bits under Hugging Face's names, tied weights once."""
    named = model.named_parameters()
    return {name: weight.detach().to(torch.bfloat16).view(torch.uint16).numpy() for name, weight in named}


def opened(
    client: Client, policy: ClaimedPolicy, *, first: Path, folder: Path
) -> tuple[PreTrainedModel, WholeModelPublisher]:
    """The newest version in the store, or the model of `first` as version 0; and who publishes the next."""
    versions = WholeModelPublisher(
        open_store(policy.store_uri),
        client=client,
        run_id=policy.run_id,
        policy_id=policy.settings.policy_id,
        epoch=policy.epoch,
        folder=folder,
        assets=sorted([*first.glob("*.json"), *first.glob("*.jinja")]),
    )
    model = AutoModelForCausalLM.from_pretrained(versions.model_dir or first, dtype=torch.float32)
    if versions.version < 0:
        versions.publish(bits_of(model), step=0)
    return model, versions


def main(address: str, token: str, first: str, folder: str) -> None:
    with Client(Connection(address, token=Path(token))) as client:
        policy = ClaimedPolicy(client, trainer_id="plain")
        model, versions = opened(client, policy, first=Path(first), folder=Path(folder))
        said = policy.settings.trainer.optimizer
        adamw = torch.optim.AdamW(
            model.parameters(), said.learning_rate, (said.beta1, said.beta2), said.eps, 0.0
        )
        for step in range(versions.step + 1, policy.settings.steps + 1):
            batch = policy.next_batch(step=step, base_version=versions.version)
            adamw.zero_grad()
            loss_of(model, batch).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), said.grad_clip)
            adamw.step()
            policy.trained(batch)
            versions.publish(bits_of(model), step=step)
            policy.durable(step)


if __name__ == "__main__":
    main(*sys.argv[1:])
