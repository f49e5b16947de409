"""How much of everything is measured, and which sections there are; importing it costs nothing.

The defaults of the command `astraflow bench trainer` are those of the page of results. Read by every measurement of
this room.
"""

from __future__ import annotations

from dataclasses import dataclass

SECTIONS = ("packing", "logits", "losses", "ranks", "blocking", "prefetch", "split", "trainers", "gpu")


@dataclass(frozen=True, kw_only=True)
class TrainerSizes:
    """The model, its rows, and how often each is measured."""

    hidden: int
    """Width of the model, a multiple of 64."""
    layers: int
    rows: int
    """Rows of a batch."""
    median: int
    """Tokens of the row in the middle."""
    outlier: int
    """Tokens of the one long row beside rows of the median."""
    turns: int
    """Measured turns of each work; the least counts."""
    logit_tokens: int
    """Trained tokens whose logits are computed."""
    logit_vocab: int
    logit_hidden: int
    ranks: tuple[int, ...]
    """Numbers of processes, one of them 1."""
    steps: int
    """Steps of the loop that publishes and checkpoints."""
    toy: bool = False
    """Whether section `gpu` runs on the CPU, with this model."""
