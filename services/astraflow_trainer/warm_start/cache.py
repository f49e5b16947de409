"""Builds the initial model of a policy, and keeps it: tokenizer, warm start, Hugging Face directory.

Invariant: a directory's name is a digest of everything its content depends on (sizes, settings, seed, the
demonstrations themselves, this code and its libraries), and it appears whole or not at all; so an existing one is used
without looking inside. Called once when a trainer starts.
"""

import fcntl
import hashlib
import importlib.metadata
import inspect
import json
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import ModuleType

from transformers import PreTrainedTokenizerFast

from astraflow_trainer.model import logprobs, model, tokenizer
from astraflow_trainer.model.model import ModelShape, build_causal_lm, save_causal_lm
from astraflow_trainer.model.tokenizer import TokenizerSettings, train_tokenizer
from astraflow_trainer.warm_start import training as warm_start
from astraflow_trainer.warm_start.training import (
    EncodedExamples,
    Example,
    WarmStartSettings,
    encode_examples,
)

_CODE: tuple[ModuleType, ...] = (logprobs, model, tokenizer, warm_start)
_LIBRARIES = ("torch", "transformers", "tokenizers")
_REPORT_FILE = "warm_start.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class InitialModel:
    """Everything that the initial weights depend on."""

    shape: ModelShape
    """`vocab_size`, `eos_token_id` and `pad_token_id` are replaced by the tokenizer's."""
    tokenizer: TokenizerSettings
    warm_start: WarmStartSettings
    seed: int
    """Seeds the weights; the streams of examples are seeded by their maker."""
    digests: tuple[str, str]
    """Of what the tokenizer is trained on and of what the model is: see `digest_of`."""

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
    tokenizer_examples: Iterable[Example],
    examples: Iterable[Example],
    num_threads: int = 1,
    progress: Callable[[int, float], None] | None = None,
) -> Path:
    """The Hugging Face directory of `initial` (bf16 weights, tokenizer, warm_start.json), made unless it is
    cached.

    `examples` are those of the warm start, in order. Of several processes that want the same model one makes it, and
    the others wait. Raises as `warm_start` does.
    """
    final = cache / f"initial-{initial.key[:16]}"
    if final.exists():
        return final
    cache.mkdir(parents=True, exist_ok=True)
    with _alone(cache / f".{final.name}.lock"):
        if final.exists():
            return final
        partial = Path(tempfile.mkdtemp(prefix=".initial-", dir=cache))
        try:
            trained = train_tokenizer(chat_texts(tokenizer_examples), settings=initial.tokenizer)
            encoded = encode_examples(examples, tokenizer=trained)
            _build(partial, trained, encoded, initial=initial, num_threads=num_threads, progress=progress)
            _publish(partial, final=final)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return final


def digest_of(examples: Iterable[Example]) -> str:
    """Return the sha256 of examples, as hex: equal for equal ones, whatever code made them."""
    digest = hashlib.sha256()
    for example in examples:
        for text in (example.prompt.encode(), example.completion.encode()):
            digest.update(len(text).to_bytes(8, "big") + text)
    return digest.hexdigest()


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Wait for other processes in the same block. A folder without locks lets them all in, which costs time only."""
    with lock.open("a") as file:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)


def chat_texts(examples: Iterable[Example]) -> Iterator[str]:
    """What the tokenizer is trained on: prompt and completion as one text."""
    return (example.prompt + example.completion for example in examples)


def _build(
    directory: Path,
    trained: PreTrainedTokenizerFast,
    examples: EncodedExamples,
    *,
    initial: InitialModel,
    num_threads: int,
    progress: Callable[[int, float], None] | None,
) -> None:
    shape = replace(
        initial.shape,
        vocab_size=len(trained),
        eos_token_id=trained.eos_token_id,
        pad_token_id=trained.pad_token_id,
    )
    causal_lm = build_causal_lm(shape, seed=initial.seed)
    report = warm_start.warm_start(
        causal_lm,
        examples=examples,
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
