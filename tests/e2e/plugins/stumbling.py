"""A loss that raises on one rank alone, for one batch."""

import hashlib
import os
from pathlib import Path
from typing import Any

import torch.distributed


class Stumbling:
    """REINFORCE that raises for the first micro-batch that rank 1 ever sees, whenever it sees it again.

    The variable STUMBLED names the file that remembers it across processes.
    """

    def __call__(self, tokens: Any) -> Any:
        """The loss of each token."""
        stumbled = Path(os.environ["STUMBLED"])
        if torch.distributed.get_rank() == 1:
            seen = hashlib.sha256(tokens.behavior_logprob.numpy().tobytes()).hexdigest()
            if not stumbled.exists():
                stumbled.write_text(seen)
            if stumbled.read_text() == seen:
                raise ValueError("this rank has stumbled")
        return -tokens.advantage * tokens.logprob
