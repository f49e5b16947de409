"""Training a small byte-level BPE tokenizer with a ChatML template, for models built from numbers.

Invariant: digits are never merged, so arithmetic is seen digit by digit; every byte sequence can be encoded;
and equal corpora give equal tokenizers. Called by the warm start.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from jinja2 import Template
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

PAD = "<|endoftext|>"
START = "<|im_start|>"
END = "<|im_end|>"
_SPECIAL_TOKENS = [PAD, START, END]

CHAT_TEMPLATE = (
    "{% if tools %}<|im_start|>tools\n"
    "{% for tool in tools %}{{ tool.function | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""ChatML with tools; with the generation prompt a text ends where the model's answer begins."""

_TEMPLATE = Template(CHAT_TEMPLATE, keep_trailing_newline=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerSettings:
    """Size of a tokenizer trained here."""

    vocab_size: int = 512
    """Upper bound, the 3 special tokens and 256 bytes included; a small corpus ends below it."""

    def __post_init__(self) -> None:
        smallest = len(_SPECIAL_TOKENS) + 256
        if self.vocab_size < smallest:
            raise ValueError(
                f"vocab_size {self.vocab_size} cannot hold 3 special tokens and 256 bytes: {smallest}"
            )


def train_tokenizer(corpus: Iterable[str], *, settings: TokenizerSettings) -> PreTrainedTokenizerFast:
    """A tokenizer whose special tokens are 0 (padding), 1 (start of a message) and 2 (its end, also end of
    text).
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=settings.vocab_size,
        special_tokens=_SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=PAD)
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def render_chat(messages: Sequence[Mapping[str, object]]) -> str:
    """The prompt of `messages` as text: `CHAT_TEMPLATE` applied, generation prompt added."""
    text: str = _TEMPLATE.render(messages=messages, add_generation_prompt=True)
    return text
