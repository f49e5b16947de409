"""Stale tokens: what a token counts whose weights were older than `max_staleness` allows when its batch was bound.

Invariant: a replay of a batch corrects the same tokens, for its base version is the batch's own; rows that are replayed
on purpose (`dataflow.replay`) are left as they are, for they have a bound of their own. Called where rows are made.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from astraflow.plugins import VersionSpan
from astraflow.recipe import BatchSettings
from astraflow_trainer.batches.rows import TrainingRow


def corrected(row: TrainingRow, *, base_version: int, settings: BatchSettings) -> tuple[TrainingRow, int]:
    """Return the row as it is trained on in a step that starts from `base_version`, and its stale tokens.

    `mask` takes them out of `loss_mask`; `reweight` gives each decay ** (versions beyond `max_staleness`).
    """
    correction = settings.stale_tokens
    if correction is None:
        return row, 0
    newest_fresh = base_version - settings.max_staleness
    excess_T = _excess(row.version_spans, newest_fresh, num_tokens=row.num_tokens)
    stale_T = row.loss_mask & (excess_T > 0)
    num_stale = int(np.count_nonzero(stale_T))
    if not num_stale:
        return row, 0
    if correction.correction == "mask":
        kept_T = row.loss_mask & ~stale_T
        logprobs_T = np.where(kept_T, row.behavior_logprobs, np.float32(0))
        return replace(row, loss_mask=kept_T, behavior_logprobs=logprobs_T), num_stale
    return replace(row, loss_weights=correction.decay ** excess_T.astype(np.float32)), num_stale


def _excess(spans: Sequence[VersionSpan], newest_fresh: int, *, num_tokens: int) -> NDArray[np.int64]:
    """How many versions each token is older than `newest_fresh`, int64[T]; 0 where it is not, or not sampled."""
    excess_T = np.zeros(num_tokens, dtype=np.int64)
    for span in spans:
        excess_T[span.start : span.end] = max(0, newest_fresh - span.version)
    return excess_T
