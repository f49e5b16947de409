"""Whether an engine's log-probs came with 8 bits: what that does to ratios, said once.

bf16 keeps 8 significant bits, so a log-prob l is off by up to |l| / 256, and a ratio by as much: more than the whole
clip range of GSPO. Nothing in a trajectory has to say so, because an engine may have rounded before it answered. Called
by `rank_batches` with the rows of each batch.
"""

from collections.abc import Sequence

import numpy as np

from astraflow_kit.log import get_logger
from astraflow_trainer.batches.rows import TrainingRow

log = get_logger(__name__)

_ENOUGH = 16
"""Log-probs of which none is below bf16's precision by chance: each float32 is with probability 2^-16."""


class LogprobPrecision:
    """What one trainer has noticed of its engines' log-probs."""

    def __init__(self) -> None:
        self._has_warned = False

    def look(self, rows: Sequence[TrainingRow]) -> bool:
        """Return whether all log-probs of `rows` are bf16 numbers, and warn the first time that they are."""
        columns = [row.behavior_logprobs for row in rows]
        logprobs = np.concatenate(columns) if columns else np.zeros(0, dtype=np.float32)
        # 0 is where nothing was sampled, or where there was one candidate: it is exact either way.
        bits = logprobs[logprobs != 0].astype("<f4").view(np.uint32)
        are_rounded = len(bits) >= _ENOUGH and not (bits & 0xFFFF).any()
        if are_rounded and not self._has_warned:
            self._has_warned = True
            log.warning(
                "batch.logprobs_are_bf16",
                num_logprobs=len(bits),
                largest_ratio_error=float(np.expm1(np.abs(logprobs).max() / 256)),
                remedy="let the engine compute log-probs in float32, or choose a loss with a wide trust region",
            )
        return are_rounded
