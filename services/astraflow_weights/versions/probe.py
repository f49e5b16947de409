"""Known answers of a version: what greedy sampling with its weights gives, computed by whoever made them.

Invariant: every answer has one log-prob and one margin per token, finite and in range, so a reader may compare without
checking. Pure. The trainer computes them, the manifest carries them below its seal, nodes compare
(`astraflow_raas.policies.canary`).
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from astraflow.weights.v1 import manifest_pb2

_MAX_ANSWERS = 16
_MAX_IDS = 256
"""Of a prompt and its answer."""


@dataclass(frozen=True, kw_only=True)
class ProbeAnswer:
    """The greedy continuation of one prompt by the published weights in float32, past any end of text.

    `margins` say by how much each log-prob (natural log, temperature 1) exceeds that of the second most likely token.
    Raises ValueError for what no reader would accept.
    """

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    margins: tuple[float, ...]

    def __post_init__(self) -> None:
        num_prompt, num_tokens = len(self.prompt_ids), len(self.token_ids)
        if not (num_prompt and num_tokens and num_prompt + num_tokens <= _MAX_IDS):
            raise ValueError(
                f"a probe of {num_prompt} prompt ids and {num_tokens} tokens, expected some of each, {_MAX_IDS} in all"
            )
        if (len(self.logprobs), len(self.margins)) != (num_tokens, num_tokens):
            raise ValueError(
                f"a probe of {num_tokens} tokens has {len(self.logprobs)} log-probs and {len(self.margins)} margins"
            )
        if not all(-math.inf < value <= 0 for value in self.logprobs):
            raise ValueError(f"a probe has log-probs {self.logprobs}, expected finite numbers ≤ 0")
        if not all(0 <= value < math.inf for value in self.margins):
            raise ValueError(f"a probe has margins {self.margins}, expected finite numbers ≥ 0")

    def after(self, num_tokens: int) -> "ProbeAnswer":
        """What remains behind its first tokens; they are part of the prompt then."""
        return ProbeAnswer(
            prompt_ids=self.prompt_ids + self.token_ids[:num_tokens],
            token_ids=self.token_ids[num_tokens:],
            logprobs=self.logprobs[num_tokens:],
            margins=self.margins[num_tokens:],
        )


Probe = tuple[ProbeAnswer, ...]
"""Answers to different prompts; never empty."""


def probe_message(probe: Probe) -> manifest_pb2.Probe:
    """As it stands in a manifest. Raises ValueError for no answers, and for too many."""
    return manifest_pb2.Probe(
        answers=[
            manifest_pb2.ProbeAnswer(
                prompt_ids=answer.prompt_ids,
                token_ids=answer.token_ids,
                logprobs=answer.logprobs,
                margins=answer.margins,
            )
            for answer in _counted(probe)
        ]
    )


def read_probe(message: manifest_pb2.Probe) -> Probe:
    """What `probe_message` was given. Raises ValueError."""
    return _counted(
        ProbeAnswer(
            prompt_ids=tuple(answer.prompt_ids),
            token_ids=tuple(answer.token_ids),
            logprobs=tuple(answer.logprobs),
            margins=tuple(answer.margins),
        )
        for answer in message.answers
    )


def _counted(answers: Iterable[ProbeAnswer]) -> Probe:
    probe = tuple(answers)
    if not 1 <= len(probe) <= _MAX_ANSWERS:
        raise ValueError(f"a probe has {len(probe)} answers, expected 1 to {_MAX_ANSWERS}")
    return probe
