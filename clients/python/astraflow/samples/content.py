"""What is in a sample of the archive, as plain values: its tokens and what engine and trainer made of them.

Pure. Used by `astraflow samples` and by the dashboard, so that both show and export the same.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from astraflow.columns import decode_columns
from astraflow.commands.wording import as_json

if TYPE_CHECKING:
    from astraflow.dataflow.v1 import sample_service_pb2 as pb
    from astraflow.samples.token_texts import TokenTexts

__all__ = ["sample_values", "trainer_logprobs"]


def sample_values(content: pb.SampleContent, texts: TokenTexts | None) -> dict[str, Any]:
    """Return the sample's fields, and a value for each token: id, text (None without `texts`), loss mask, log-probs."""
    columns = decode_columns(content.trajectory)
    ids = columns.token_ids.tolist()
    return as_json(content.sample) | {
        "token_ids": ids,
        "texts": None if texts is None else [texts.of(token_id) for token_id in ids],
        "loss_mask": columns.loss_mask.tolist(),
        "logprobs": columns.logprobs.tolist(),
        "trainer_logprobs": trainer_logprobs(content),
        "version_spans": columns.version_spans,
        "turn_spans": [
            {"start": span.start, "end": span.end, "role": span.role, "reward": span.reward}
            for span in content.trajectory.turn_spans
        ],
    }


def trainer_logprobs(content: pb.SampleContent) -> list[float | None] | None:
    """Return the trainer's log-prob of each token, None of those not trained on; None where nothing is known."""
    if not content.trainer_logprobs:
        return None
    found = np.frombuffer(content.trainer_logprobs, dtype="<f4").tolist()
    return [None if math.isnan(value) else value for value in found]
