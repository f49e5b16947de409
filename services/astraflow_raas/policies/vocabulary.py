"""Which token ids a model knows, read from the config that travels with its weights.

Invariant: no id outside the vocabulary reaches an engine or leaves it: SGLang 0.5.20 dies of one too large, and takes
one just past the end for padding. Pure but for `read_vocab_size`; called by `served_policy`.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from astraflow.errors import RecipeError
from astraflow_raas.engine.base import EngineFaulty, EngineRefused, GenerateCall, Generation


def read_vocab_size(model_dir: Path) -> int:
    """Rows of the embedding, from config.json. Raises RecipeError when it does not say."""
    path = model_dir / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        # Models of several modalities keep the language model's settings apart.
        size = config.get("vocab_size", config.get("text_config", {}).get("vocab_size"))
    except (OSError, ValueError, AttributeError) as error:
        raise RecipeError(
            f"{path} cannot be read ({error}); publish the model's config.json with its weights"
        ) from error
    if not isinstance(size, int) or size < 1:
        raise RecipeError(f"{path}: vocab_size is {size!r}, expected a positive integer")
    return size


def check_call(call: GenerateCall, *, vocab_size: int) -> None:
    """Raises EngineRefused for a prompt that holds an unknown id."""
    if min(call.prompt_ids) >= 0 and max(call.prompt_ids) < vocab_size:
        return  # a third of a loop's time, and prompts are long
    wrong = _first_unknown(call.prompt_ids, vocab_size)
    if wrong is not None:
        index, token = wrong
        raise EngineRefused(
            f"prompt_ids[{index}] of call {call.rid} is {token}, the model knows ids from 0 to {vocab_size - 1}; "
            "encode prompts with this policy's own tokenizer"
        )


def check_generation(call: GenerateCall, generation: Generation, *, vocab_size: int) -> None:
    """Raises EngineFaulty for a sampled token that the model does not know."""
    wrong = _first_unknown(generation.token_ids, vocab_size)
    if wrong is not None:
        index, token = wrong
        raise EngineFaulty(
            f"output token {index} of call {call.rid} is {token}, the model knows ids from 0 to {vocab_size - 1}"
        )


def _first_unknown(token_ids: Sequence[int], vocab_size: int) -> tuple[int, object] | None:
    for index, token in enumerate(token_ids):
        if type(token) is not int or not 0 <= token < vocab_size:
            return index, token
    return None
