"""What the policy answers to a few fixed prompts: published with each version, so that nodes can prove they serve it.

Invariant: the answers are those of the greedy continuation under the weights as they are published (bf16 values, fp32
arithmetic, as in training); taking them changes nothing of the model. Owned by the learner.

Shape legend: B prompts, P tokens of a prompt, K tokens of an answer, V vocabulary.
"""

from typing import Final

import torch

from astraflow_kit.log import get_logger
from astraflow_trainer.model.model import PolicyModel
from astraflow_trainer.ranks.reductions import Ranks
from astraflow_weights.versions.probe import Probe, ProbeAnswer

log = get_logger(__name__)

_PROMPTS: Final = 2
_PROMPT_TOKENS: Final = 16
_ANSWER_TOKENS: Final = 8


class Prober:
    """Not thread-safe: owned by the training thread, as the model is."""

    def __init__(self, policy: PolicyModel, *, ranks: Ranks) -> None:
        self._policy = policy
        self._ranks = ranks
        self._prompt_BP = _prompts(policy.vocab_size)
        self._answer_BK = torch.zeros((_PROMPTS, _ANSWER_TOKENS), dtype=torch.int64)

    @torch.no_grad()
    def answers(self) -> Probe | None:
        """The answers of the weights as they are now; a collective. None when they are not numbers.

        The last version's answers are tried first, all tokens in one pass; each further pass settles at least one
        token more. Weights change so little between versions that one pass is the rule, and `K` are the most.
        """
        try:
            token_BK, logprob_BK, margin_BK = self._settled()
        finally:
            # Copies and checkpoints take this rank's part.
            self._policy.gathered_no_more()
        if not (logprob_BK.isfinite().all() and margin_BK.isfinite().all()):
            log.warning("version.no_probe", message="the policy's log-probs are not finite numbers")
            return None
        columns = zip(self._prompt_BP, token_BK, logprob_BK.clamp(max=0.0), margin_BK, strict=True)
        return tuple(
            ProbeAnswer(
                prompt_ids=tuple(prompt.tolist()),
                token_ids=tuple(tokens.tolist()),
                logprobs=tuple(logprobs.tolist()),
                margins=tuple(margins.tolist()),
            )
            for prompt, tokens, logprobs, margins in columns
        )

    def _settled(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Pass after pass over the last answers, until they repeat."""
        for _ in range(_ANSWER_TOKENS):
            token_BK, logprob_BK, margin_BK = self._continued(self._answer_BK)
            same = torch.equal(token_BK, self._answer_BK)
            self._answer_BK = token_BK
            # Ranks may round differently, and none may leave the others waiting in the next pass.
            if not self._ranks.max(torch.tensor([not same], dtype=torch.int64)).item():
                break
        return token_BK, logprob_BK, margin_BK

    def _continued(self, draft_BK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The most likely token after the prompt and each token of the draft but the last; its log-prob and margin."""
        token_ids_BL = torch.cat([self._prompt_BP, draft_BK[:, :-1]], dim=1)
        logprob_BKV = self._policy.next_token_logprobs(token_ids_BL, last=_ANSWER_TOKENS)
        top = logprob_BKV.topk(2, dim=-1)
        best_BK, second_BK = top.values.cpu().unbind(-1)
        return top.indices[..., 0].cpu(), best_BK, best_BK - second_BK


def _prompts(vocab_size: int) -> torch.Tensor:
    """Ids from the lower half, int64[B, P]: tokenizers put special tokens at the ends, most at the upper one."""
    low = vocab_size // 8
    # Alike on every rank.
    generator = torch.Generator().manual_seed(0)
    return torch.randint(low, max(low + 1, vocab_size // 2), (_PROMPTS, _PROMPT_TOKENS), generator=generator)
