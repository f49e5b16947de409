"""Parts of a node for tests: a tokenizer on disk, a policy served by the fake engine, leases as values, and a
workflow that misbehaves on request.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from astraflow.plugins import Episode, Policy, TaskSpec
from astraflow.recipe import ResolvedRole, RowLimits
from astraflow.rollout.v1 import task_pb2
from astraflow_raas.engine.base import GenerateCall
from astraflow_raas.policies.served_policy import ServedPolicy
from support.fake_engine import FakeEngine
from support.scripted_dataflow import POLICY, lease

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% if tools %}<|im_start|>tools\n"
    "{% for tool in tools %}{{ tool.function | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SOLVER = ResolvedRole("solver", "solver", is_trained=True)
LIMITS = {"solver": RowLimits(max_tokens=8192, vocab_size=None)}
SAMPLING = task_pb2.SamplingParams(temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=8)


def write_tokenizer(folder: Path) -> Path:
    """Write a byte-level BPE tokenizer with a ChatML template, as a policy's weights carry it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"\d"), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["What is 3 + 4? The sum is 7.", "user assistant"], trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": SPECIAL[2], "pad_token": SPECIAL[0], "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    if not (folder / "config.json").exists():
        (folder / "config.json").write_text(
            json.dumps({"model_type": "qwen3", "eos_token_id": 2, "vocab_size": 320})
        )
    return folder


async def served_policy(folder: Path, engine: FakeEngine, *, version: int = 0) -> ServedPolicy:
    """A policy whose engine is ready at `version`."""
    policy = ServedPolicy("solver")
    await policy.read_tokenizer(write_tokenizer(folder))
    engine.version = version
    policy.engines[0].ready(engine, version=version)
    return policy


def generate_call(rid: str = "r0", **differing: Any) -> GenerateCall:
    """A call of one sequence."""
    given: dict[str, Any] = {"prompt_ids": (1, 2), "seed": 1, "max_new_tokens": 8}
    sampling: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}
    return GenerateCall(rid=rid, **(given | sampling | differing))


def leased(*, members: Sequence[int] = (0, 1), **differing: Any) -> task_pb2.Lease:
    """A lease whose sampling is filled in; an evaluation when it requires versions."""
    message = lease(members=members, **differing)
    message.sampling[POLICY].CopyFrom(SAMPLING)
    return message


@dataclass
class ScriptedWorkflow:
    """Wraps a workflow; the n-th run raises, hangs or returns what the script says, others just run."""

    inner: object
    script: dict[int, object] = field(default_factory=dict)
    runs: int = 0

    async def run(self, task: TaskSpec, policies: Mapping[str, Policy]) -> Episode:
        """Run number `runs` from 0."""
        number, self.runs = self.runs, self.runs + 1
        act = self.script.get(number)
        if isinstance(act, BaseException):
            raise act
        if act == "hang":
            await asyncio.Event().wait()
        if isinstance(act, Episode):
            return act
        return await self.inner.run(task, policies)  # type: ignore[attr-defined,no-any-return]
