"""Builds the initial model of a policy, and keeps it: tokenizer, warm start, Hugging Face directory.

Invariant: a directory's name is a digest of everything its content depends on (sizes, settings, seed,
demonstrations, this code and its libraries), and it appears whole or not at all; so an existing one is used
without looking inside. Called once when a trainer starts.
"""

import hashlib
import importlib.metadata
import inspect
import json
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from types import ModuleType

from astraflow_trainer.model import logprobs, model, tokenizer
from astraflow_trainer.model.model import Qwen3Shape, build_causal_lm, save_causal_lm
from astraflow_trainer.model.tokenizer import TokenizerSettings, train_tokenizer
from astraflow_trainer.warm_start import training as warm_start
from astraflow_trainer.warm_start.training import Example, WarmStartSettings, encode_examples

_CODE: tuple[ModuleType, ...] = (logprobs, model, tokenizer, warm_start)
_LIBRARIES = ("torch", "transformers", "tokenizers")
_REPORT_FILE = "warm_start.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class InitialModel:
    """Everything that the initial weights depend on."""

    shape: Qwen3Shape
    """`vocab_size`, `eos_token_id` and `pad_token_id` are replaced by the tokenizer's."""
    tokenizer: TokenizerSettings
    num_tokenizer_texts: int
    """Leading examples that the tokenizer is trained on."""
    warm_start: WarmStartSettings
    seed: int
    """Seeds the weights; the stream of examples is seeded by its maker."""
    demonstrations_digest: str
    """Digest of the code (and seed) that makes the examples."""

    @property
    def key(self) -> str:
        """64 hexadecimal digits naming the result."""
        content = {
            "initial_model": asdict(self),
            "code": [hashlib.sha256(inspect.getsource(module).encode()).hexdigest() for module in _CODE],
            "libraries": {name: importlib.metadata.version(name) for name in _LIBRARIES},
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def prepare_initial_model(
    cache: Path,
    *,
    initial: InitialModel,
    examples: Callable[[], Iterator[Example]],
    num_threads: int = 1,
    progress: Callable[[int, float], None] | None = None,
) -> Path:
    """The Hugging Face directory of `initial` (bf16 weights, tokenizer, warm_start.json), made unless it is
    cached.

    `examples` starts the stream of demonstrations anew at each call. Safe to call from several processes at
    once: the first to finish wins and their results are equal. Raises as `warm_start` does.
    """
    final = cache / f"initial-{initial.key[:16]}"
    if final.exists():
        return final
    cache.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=".initial-", dir=cache))
    try:
        _build(partial, initial=initial, examples=examples, num_threads=num_threads, progress=progress)
        _publish(partial, final=final)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return final


def chat_texts(examples: Iterable[Example]) -> Iterator[str]:
    """What the tokenizer is trained on: prompt and completion as one text."""
    return (example.prompt + example.completion for example in examples)


def _build(
    directory: Path,
    *,
    initial: InitialModel,
    examples: Callable[[], Iterator[Example]],
    num_threads: int,
    progress: Callable[[int, float], None] | None,
) -> None:
    texts = chat_texts(islice(examples(), initial.num_tokenizer_texts))
    trained = train_tokenizer(texts, settings=initial.tokenizer)
    shape = replace(
        initial.shape,
        vocab_size=len(trained),
        eos_token_id=trained.eos_token_id,
        pad_token_id=trained.pad_token_id,
    )
    causal_lm = build_causal_lm(shape, seed=initial.seed)
    needed = islice(examples(), initial.warm_start.num_examples)
    report = warm_start.warm_start(
        causal_lm,
        examples=encode_examples(needed, tokenizer=trained),
        settings=initial.warm_start,
        num_threads=num_threads,
        progress=progress,
    )
    save_causal_lm(causal_lm, directory)
    trained.save_pretrained(directory)
    (directory / _REPORT_FILE).write_text(json.dumps(asdict(report)))


def _publish(partial: Path, *, final: Path) -> None:
    partial.chmod(0o755)
    try:
        partial.rename(final)
    except OSError:
        # Another process finished first; a directory cannot be renamed onto one with content.
        if not final.exists():
            raise
