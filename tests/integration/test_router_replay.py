"""Experts from an engine to a gradient: an engine that speaks SGLang's words samples from a mixture of experts, a node
records which experts its tokens went to, and a trainer whose routers round otherwise computes what the engine did.
"""

import base64
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from astraflow.columns import decode_columns
from astraflow.dataflow.v1 import trajectory_service_pb2 as outcomes
from astraflow.plugins import TaskSpec
from astraflow.rollout.v1 import blob_pb2, trajectory_pb2
from astraflow_kit.metrics import Metrics
from astraflow_raas.engine.http import HttpEngine
from astraflow_raas.engine.server_info import EngineUnsuitable
from astraflow_raas.grading.scoring import RewardScorer
from astraflow_raas.policies.served_policy import ServedPolicy
from astraflow_raas.work.expert_records import ExpertBlobs
from astraflow_raas.work.session import Failure, Session, SessionSettings
from astraflow_raas.workflows.single_turn import SingleTurn
from astraflow_trainer.batches.packing import pack
from astraflow_trainer.batches.routing import recorded_routing
from astraflow_trainer.batches.rows import TrainingRow
from astraflow_trainer.model.model import PolicyModel, load_causal_lm
from support import misbehaving_engine as bad
from support.misbehaving_engine import Json, MisbehavingEngine, Misbehaviour
from support.raas_parts import LIMITS, SAMPLING, SOLVER, leased, write_tokenizer
from support.scripted_dataflow import result
from support.stepped_store import MemoryStore
from support.tiny_models import TinyShape, save_tiny_model
from support.tiny_training import make_row

pytestmark = pytest.mark.integration

LAYERS, DENSE, EXPERTS, EACH = 3, 1, 8, 2
MIXTURE = TinyShape(
    model_type="qwen3_moe",
    tied=False,
    num_layers=LAYERS,
    vocab_size=320,
    more={
        "num_experts": EXPERTS,
        "num_experts_per_tok": EACH,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
        "mlp_only_layers": [DENSE],
    },
)


def rounding_otherwise(model_dir: Path) -> PolicyModel:
    """The model with routers that are off by as much as another engine's arithmetic."""
    policy = PolicyModel(load_causal_lm(model_dir))
    generator = torch.Generator().manual_seed(1)
    for name, parameter in policy.named_parameters():
        if name.endswith("mlp.gate.weight"):
            parameter.data += 0.003 * torch.randn(parameter.shape, generator=generator)
    return policy


@dataclass
class Mixture(MisbehavingEngine):
    """Samples from a model, and says where its tokens went in SGLang's words: all layers, dense ones as zeros, of all
    tokens but the last.
    """

    model: PolicyModel | None = None
    num_tokens: int = 6
    server_info: Json = field(default_factory=lambda: {"enable_return_routed_experts": True})

    def _sample(self, body: Json, index: int) -> Json:
        prompt, asked = body["input_ids"][index], body["sampling_params"][index]
        torch.manual_seed(asked["sampling_seed"] % 2**31)
        tokens, pairs, experts = list(prompt), [], np.zeros(0)
        for _ in range(min(self.num_tokens, asked["max_new_tokens"])):
            scores, experts = self._pass(tokens)
            token = int(torch.multinomial(scores.exp(), 1))
            pairs.append([float(scores[token]), token, None])
            tokens.append(token)
        answer = super()._sample(body, index)
        answer["output_ids"] = tokens[len(prompt) :]
        answer["meta_info"] |= {
            "output_token_logprobs": pairs,
            "weight_versions": [{"version": self.version, "start": 0, "end": len(pairs)}],
            "finish_reason": {"type": "length"},
        }
        if body.get("return_routed_experts"):
            answer["meta_info"]["routed_experts"] = base64.b64encode(experts.tobytes()).decode()
        return answer

    @torch.no_grad()
    def _pass(self, tokens: list[int]) -> tuple[torch.Tensor, np.ndarray]:
        """Log-probs of the next token, and int32[S, layers, k] of the pass."""
        assert self.model is not None
        experts = np.zeros((len(tokens), LAYERS, EACH), dtype="<i4")
        hooks = []
        for name, module in self.model.named_modules():
            if name.endswith("mlp.gate"):
                layer = int(name.split(".")[-3])

                def note(_module: object, _given: object, found: Any, layer: int = layer) -> None:
                    experts[:, layer] = found[2].numpy()

                hooks.append(module.register_forward_hook(note))
        scores = self.model.next_token_logprobs(torch.tensor([tokens]), last=1)[0, 0]
        for hook in hooks:
            hook.remove()
        return scores, experts


@dataclass
class Node:
    engine: Mixture
    policy: ServedPolicy
    store: MemoryStore
    model_dir: Path
    pushed: list[trajectory_pb2.Episode]

    async def push(self, episode: trajectory_pb2.Episode) -> outcomes.PushResult:
        self.pushed.append(episode)
        return result(outcomes.OUTCOME_ACCEPTED)

    async def run(self, *, members: tuple[int, ...] = tuple(range(16)), **lease: Any) -> Failure | None:
        settings = SessionSettings(
            node_id="node-1",
            sampling={"solver": SAMPLING},
            roles={"solver": SOLVER},
            row_limits=LIMITS,
            episode_timeout_s=30.0,
            coalesce_max_new_tokens=128,
        )
        metrics = Metrics()
        blobs = ExpertBlobs(self.store, store_uri="memory://store", run_id="run", metrics=metrics)
        parts: dict[str, Any] = {"policies": {"solver": self.policy}, "pusher": self, "experts": blobs}
        workflow = SingleTurn(reward=RewardScorer(no_reward))
        session = Session(workflow, settings=settings, metrics=metrics, **parts)
        return await session.run(leased(members=members, **lease))

    def rows(self) -> list[TrainingRow]:
        """What a trainer makes of what was pushed."""
        found = []
        for episode in self.pushed:
            body = trajectory_pb2.Trajectory.FromString(episode.trajectories[0].body)
            columns, num_tokens = decode_columns(body), len(body.token_ids) // 4
            mask = columns.loss_mask
            row = make_row(
                columns.token_ids[~mask].tolist(),
                columns.token_ids[mask].tolist(),
                logprobs=columns.logprobs[mask].tolist(),
            )
            routing = recorded_routing(body.expert_routing, name="t", num_tokens=num_tokens, read=self._read)
            found.append(replace(row, expert_routing=routing))
        return found

    def _read(self, uri: str) -> bytes:
        return self.store.objects[uri.removeprefix("memory://store/")]


def no_reward(_task: TaskSpec, _completion: str) -> float:
    return 0.0


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    model_dir = write_tokenizer(save_tiny_model(tmp_path / "model", shape=MIXTURE))
    async with bad.misbehaving_engine(Mixture, model=rounding_otherwise(model_dir)) as engine:
        policy = ServedPolicy("solver", records_experts=True)
        await policy.read_tokenizer(model_dir)
        client = HttpEngine(engine.url, request_timeout_s=30.0, records_experts=True)
        await client.introduce()
        assert await client.served_version() == 4
        policy.engines[0].ready(client, version=4)
        yield Node(cast("Mixture", engine), policy, MemoryStore(), model_dir, [])
        await policy.close()
        await client.close()


def gap(policy: PolicyModel, rows: list[TrainingRow]) -> float:
    """Mean distance of a trainer's log-probs to those that the engine reported, nats."""
    distances = []
    for row in rows:
        (batch,) = pack([row], token_budget=1000)
        with torch.no_grad():
            found = policy.train().score(batch).logprob_N.numpy()
        distances.append(np.abs(found - row.behavior_logprobs[row.loss_mask]).mean())
    return float(np.mean(distances))


async def test_a_trainer_computes_with_the_experts_that_the_engine_chose(node: Node) -> None:
    assert await node.run() is None
    rows = node.rows()
    assert len(rows) == 16
    for row in rows:
        assert row.expert_routing is not None
        assert row.expert_routing.shape == (row.num_tokens, LAYERS - 1, EACH)
    trainer = PolicyModel(load_causal_lm(node.model_dir))
    without = gap(trainer, [replace(row, expert_routing=None) for row in rows])
    assert gap(trainer, rows) < 0.8 * without
    # With the engine's own gate weights nothing is left but rounding, and of other experts much: what was recorded is
    # what computed.
    engine = rounding_otherwise(node.model_dir)
    assert gap(engine, rows) < 1e-4
    others = [replace(row, expert_routing=(row.expert_routing + 1) % EXPERTS) for row in rows]
    assert gap(engine, others) > 0.1


async def test_nothing_is_recorded_of_evaluations(node: Node) -> None:
    assert await node.run(members=(0,), required_versions={"solver": 4}) is None
    (episode,) = node.pushed
    body = trajectory_pb2.Trajectory.FromString(episode.trajectories[0].body)
    assert body.expert_routing == blob_pb2.BlobRef()
    assert node.store.objects == {}
    assert "return_routed_experts" not in node.engine.asked[-1][1]


def encoded(numbers: list[int]) -> str:
    return base64.b64encode(np.asarray(numbers, dtype="<i4").tobytes()).decode()


WRONG: dict[str, tuple[Misbehaviour, str]] = {
    "none": (bad.meta(routed_experts=None), "does not say which experts its tokens went to"),
    "no base64": (bad.meta(routed_experts="%"), "is unusable"),
    "too few": (bad.meta(routed_experts=encoded([0] * 7)), "have 28 bytes, no multiple of"),
}


@pytest.mark.parametrize("name", WRONG)
async def test_a_record_that_does_not_fit_fails_its_episode(node: Node, name: str) -> None:
    misbehaviour, words = WRONG[name]
    node.engine.next("/generate", misbehaviour)
    failure = await node.run(members=(0,))
    assert failure is not None
    assert failure.reason == "engine_error"
    assert words in failure.detail
    assert node.pushed == []


@pytest.mark.parametrize(
    ("info", "words"),
    [
        ({"enable_return_routed_experts": False}, "start it with --enable-return-routed-experts"),
        ({"engine": "astraflow"}, "the CPU engine serves dense models: give --engine sglang"),
    ],
)
async def test_an_engine_that_records_nothing_is_refused(info: Json, words: str) -> None:
    async with bad.misbehaving_engine(server_info=info) as engine:
        client = HttpEngine(engine.url, records_experts=True)
        with pytest.raises(EngineUnsuitable, match=words):
            await client.introduce()
        await client.close()
