"""Whatever an engine answers, what is pushed is right: the call is made again, or the episode fails with that reason
and its lease is given back to be run again.
"""

import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from astraflow.columns import decode_columns
from astraflow.dataflow.v1 import trajectory_service_pb2 as outcomes
from astraflow.plugins import TaskSpec
from astraflow.rollout.v1 import trajectory_pb2
from astraflow_kit.metrics import Metrics
from astraflow_raas.engine.http import HttpEngine
from astraflow_raas.grading.scoring import RewardScorer
from astraflow_raas.policies.served_policy import ServedPolicy
from astraflow_raas.work.session import Failure, Session, SessionSettings
from astraflow_raas.workflows.single_turn import SingleTurn
from support import misbehaving_engine as bad
from support.misbehaving_engine import MisbehavingEngine, Misbehaviour
from support.raas_parts import LIMITS, SAMPLING, SOLVER, leased, write_tokenizer
from support.scripted_dataflow import result

pytestmark = pytest.mark.integration

REQUEST_TIMEOUT_S = 3.0


@dataclass
class Node:
    engine: MisbehavingEngine
    policy: ServedPolicy
    pushed: list[trajectory_pb2.Episode]

    async def push(self, episode: trajectory_pb2.Episode) -> outcomes.PushResult:
        self.pushed.append(episode)
        return result(outcomes.OUTCOME_ACCEPTED)

    async def run(self) -> Failure | None:
        """A lease of two episodes, whose calls share the first request."""
        settings = SessionSettings(
            node_id="node-1",
            sampling={"solver": SAMPLING},
            roles={"solver": SOLVER},
            row_limits=LIMITS,
            episode_timeout_s=30.0,
            coalesce_max_new_tokens=128,
        )
        parts: dict[str, Any] = {"policies": {"solver": self.policy}, "pusher": self}
        session = Session(
            SingleTurn(reward=RewardScorer(no_reward)), settings=settings, metrics=Metrics(), **parts
        )
        return await session.run(leased(members=(0, 1)))

    def completions(self) -> list[tuple[list[int], list[float], tuple[tuple[int, int], ...]]]:
        """What was pushed of each episode: sampled tokens, log-probs and versions."""
        found = []
        for episode in self.pushed:
            body = trajectory_pb2.Trajectory.FromString(episode.trajectories[0].body)
            columns = decode_columns(body)
            mask = columns.loss_mask
            spans = tuple((end - start, version) for start, end, version in columns.version_spans)
            found.append((columns.token_ids[mask].tolist(), columns.logprobs[mask].tolist(), spans))
        return found


RIGHT = ([7, 8, 2], [-0.5, -1.5, -2.5], ((3, 4),))


def no_reward(_task: TaskSpec, _completion: str) -> float:
    return 0.0


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    async with bad.misbehaving_engine() as engine:
        policy = ServedPolicy("solver")
        await policy.read_tokenizer(write_tokenizer(tmp_path))
        client = HttpEngine(engine.url, request_timeout_s=REQUEST_TIMEOUT_S)
        await client.introduce()
        assert await client.served_version() == 4
        policy.engines[0].ready(client, version=4)
        yield Node(engine, policy, [])
        await policy.close()
        await client.close()


# Misbehaviour and the words of the failure.
FAILS: dict[str, tuple[Misbehaviour, str]] = {
    "fewer log-probs than tokens": (bad.outputs(7, 8, 2, logprobs=(-1.0,)), "1 log-probs do not belong"),
    "log-probs of other tokens": (bad.meta(output_token_logprobs=[[-1.0, 5, None]] * 3), "do not belong"),
    "no log-probs": (bad.meta(output_token_logprobs=None), "output_token_logprobs"),
    "more tokens than asked for": (bad.outputs(*[7] * 9), "9 tokens, asked for 1 to 8"),
    "no tokens": (bad.outputs(), "0 tokens, asked for 1 to 8"),
    "a NaN log-prob": (bad.outputs(7, 2, logprobs=(float("nan"), -1.0)), "log-prob nan"),
    "a null log-prob": (bad.outputs(7, 2, logprobs=(None, -1.0)), "TypeError"),
    "a log-prob above zero": (bad.outputs(7, 2, logprobs=(0.5, -1.0)), "log-prob 0.5"),
    "a token outside the vocabulary": (bad.outputs(7, 320), "token 1 of call .* is 320"),
    "a negative token": (bad.outputs(-1, 2), "is -1, the model knows ids from 0 to 319"),
    "a token that is no integer": (bad.outputs(7.0, 2), "is 7.0"),
    "spans that end early": (bad.span(("4", 0, 2)), "do not cover 3 tokens"),
    "spans with a gap": (bad.span(("4", 0, 1), ("4", 2, 3)), "do not cover"),
    "a version that is no number": (bad.span(("default", 0, 3)), "'default' is not a number"),
    "a version that was never loaded": (bad.span(("5", 0, 3)), "the engine served 4 to 4 meanwhile"),
    "versions that go back": (bad.span(("4", 0, 1), ("3", 1, 3)), "go back"),
    "the answer to another call": (bad.meta(id="somebody-else"), "it is the answer to call somebody-else"),
    "one answer for two calls": (bad.too_few_answers, "answered 2 calls with"),
    "an unknown end": (bad.meta(finish_reason={"type": "tired"}), "finish reason tired"),
    "no end": (bad.meta(finish_reason=None), "KeyError"),
    "a status 500 with text": (bad.says(500, "CUDA error: an illegal memory access"), "illegal memory"),
    "JSON that ends early": (bad.truncated_json, "broken JSON"),
    "a page of HTML": (bad.says(200, "<html>welcome</html>"), "answered 2 calls with <html>"),
}
REPEATED: dict[str, Misbehaviour] = {
    "silence": bad.hang,
    "a byte at a time": bad.drip,
    "a half-closed connection": bad.half_closed,
    "a connection that is reset": bad.reset,
    "a full queue": bad.says(503, "queue full"),
    "a gateway's page": bad.says(502, "<html>bad gateway</html>"),
    "an abort": bad.meta(finish_reason={"type": "abort", "message": "by its operator"}),
}


@pytest.mark.parametrize("name", FAILS)
async def test_an_unusable_answer_fails_the_episode_and_is_never_pushed(node: Node, name: str) -> None:
    misbehaviour, words = FAILS[name]
    node.engine.next("/generate", misbehaviour)
    failure = await node.run()
    assert failure is not None
    assert (failure.reason, failure.retryable) == ("engine_error", True)
    assert re.search(words, failure.detail), failure.detail
    assert all(completion == RIGHT for completion in node.completions())
    # Leased again, the same episodes succeed.
    node.pushed.clear()
    assert await node.run() is None
    assert node.completions() == [RIGHT, RIGHT]


@pytest.mark.parametrize("name", REPEATED)
async def test_a_call_without_an_answer_is_made_again(node: Node, name: str) -> None:
    node.engine.next("/generate", REPEATED[name])
    assert await node.run() is None
    assert node.completions() == [RIGHT, RIGHT]
    rids = [rid for path, body in node.engine.asked if path == "/generate" for rid in body["rid"]]
    assert len(set(rids)) == len(rids), "an id was used twice while the engine may still run the first"
