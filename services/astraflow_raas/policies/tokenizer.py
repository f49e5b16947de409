"""The policy's tokenizer, read from the files that travel with its weights.

Invariant: ids are those the trainer's tokenizer gives for the same messages, because both read the same
tokenizer.json and chat template; no model library is loaded for it (importing one costs a node 3 s and 230
MB). A model without a tokenizer.json falls back to `transformers`. Called by `policy_handle` and
`served_policy`.
"""

import functools
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn, Protocol

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as RustTokenizer

from astraflow.errors import RecipeError
from astraflow.plugins import Message, Tool
from astraflow_raas.policies.continuation import Continuation
from astraflow_raas.policies.tool_calls import Called, Reader, reader_of

_CACHED_PROMPTS = 256


class Tokenizer(Protocol):
    """Messages to ids and ids to text."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a completion, ascending."""

    @property
    def end_of_turn(self) -> int | None:
        """The one of them that the policy is taught to end with; None where it has none of its own."""

    def encode(self, messages: Sequence[Message] | str, tools: Sequence[Tool] = ()) -> tuple[int, ...]:
        """Ids of the chat with the template applied and the generation prompt added; text as it is."""

    def continuation(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> tuple[int, ...]:
        """Ids that follow an assistant's text: the end of its turn, `messages`, the generation prompt."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of the ids, special tokens removed."""

    def read(self, token_ids: Sequence[int], tools: Sequence[Tool]) -> tuple[str, Sequence[Called]]:
        """What an assistant's ids say and which tools they call, in the format of the chat template."""


def load_tokenizer(model_dir: Path) -> Tokenizer:
    """Read the tokenizer of `model_dir`. Raises RecipeError when it has none or no chat template."""
    if (model_dir / "tokenizer.json").is_file():
        return FastTokenizer(model_dir)
    return _TransformersTokenizer(model_dir)


class _ChatTokenizer(ABC):
    """What both kinds of tokenizer do with a template that can be rendered and a text that can be encoded."""

    def __init__(self) -> None:
        # The episodes of a task, and its repetitions, share one prompt: it is rendered and encoded once.
        self._encode = functools.lru_cache(maxsize=_CACHED_PROMPTS)(
            lambda messages, tools: self._ids(self._render(messages, tools))
        )
        self._continuation = Continuation(self._render)
        self._reader: Reader | None = None

    @abstractmethod
    def _render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> str: ...

    @abstractmethod
    def _ids(self, text: str) -> tuple[int, ...]: ...

    @abstractmethod
    def _text(self, token_ids: Sequence[int], *, special: bool) -> str: ...

    stop_token_ids: tuple[int, ...]
    end_of_turn: int | None

    def encode(self, messages: Sequence[Message] | str, tools: Sequence[Tool] = ()) -> tuple[int, ...]:
        if isinstance(messages, str):
            return self._ids(messages)
        return self._encode(tuple(messages), tuple(tools))

    def continuation(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> tuple[int, ...]:
        return self._ids(self._continuation.text(messages, tools))

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._text(token_ids, special=False)

    def read(self, token_ids: Sequence[int], tools: Sequence[Tool]) -> tuple[str, Sequence[Called]]:
        if tools and self._reader is not None:
            # The marks of some formats are special tokens.
            spoken = [token for token in token_ids if token not in self.stop_token_ids]
            try:
                said, calls = self._reader(self._text(spoken, special=True), tools)
            except (AttributeError, LookupError, RecursionError, TypeError, ValueError):
                calls = []
            if calls:
                return said, calls
        return self.decode(token_ids), ()


class FastTokenizer(_ChatTokenizer):
    """tokenizer.json plus the chat template; safe to share between tasks of one loop."""

    def __init__(self, model_dir: Path) -> None:
        super().__init__()
        self._tokenizer = RustTokenizer.from_file(str(model_dir / "tokenizer.json"))
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        config = _read_json(model_dir / "tokenizer_config.json")
        source = _template_source(model_dir, config)
        self._template = _compile_template(model_dir, source)
        self._reader = reader_of(source)
        self._special = _special_tokens(config)
        eos = self._special.get("eos_token")
        self.end_of_turn = None if eos is None else self._tokenizer.token_to_id(eos)
        self.stop_token_ids = self._find_stop_tokens(model_dir)

    def _text(self, token_ids: Sequence[int], *, special: bool) -> str:
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=not special)
        return text

    def _render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> str:
        chat = [message.as_chat() for message in messages]
        listed = [tool.as_chat() for tool in tools] or None
        given = {"messages": chat, "tools": listed, "add_generation_prompt": True}
        try:
            return self._template.render(**given, **self._special)
        except jinja2.TemplateError as error:
            raise RecipeError(f"the model's chat template refuses these messages: {error}") from error

    def _ids(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def _find_stop_tokens(self, model_dir: Path) -> tuple[int, ...]:
        found = {self.end_of_turn}
        for name in ("generation_config.json", "config.json"):
            listed = _read_json(model_dir / name).get("eos_token_id")
            found.update(listed if isinstance(listed, list) else [listed])
        return tuple(sorted(token for token in found if token is not None))


class _TransformersTokenizer(_ChatTokenizer):
    """Slow path for models whose tokenizer exists only in the form that `transformers` reads."""

    def __init__(self, model_dir: Path) -> None:
        super().__init__()
        from transformers import AutoTokenizer  # imported here: it loads torch where that is installed

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(str(model_dir))
        except (OSError, ValueError) as error:
            raise RecipeError(
                f"{model_dir} holds no usable tokenizer ({error}); publish tokenizer.json with the weights"
            ) from error
        self.end_of_turn = self._tokenizer.eos_token_id
        self.stop_token_ids = () if self.end_of_turn is None else (self.end_of_turn,)
        self._reader = reader_of(str(self._tokenizer.chat_template))

    def _render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> str:
        chat = [message.as_chat() for message in messages]
        listed = [tool.as_chat() for tool in tools] or None
        given = {"tools": listed, "add_generation_prompt": True, "tokenize": False}
        return str(self._tokenizer.apply_chat_template(chat, **given))

    def _ids(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    def _text(self, token_ids: Sequence[int], *, special: bool) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=not special))


def _compile_template(model_dir: Path, source: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().astimezone().strftime(form)
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise RecipeError(f"{model_dir}: the chat template is not valid Jinja: {error}") from error


def _template_source(model_dir: Path, config: Mapping[str, Any]) -> str:
    path = model_dir / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    if not isinstance(template, str):
        raise RecipeError(
            f"{model_dir} has no chat template; add chat_template.jinja, or `chat_template` in "
            "tokenizer_config.json"
        )
    return template


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token`, `eos_token`, … as text; files write them plain or as objects with `content`."""
    named = {name: value for name, value in config.items() if name.endswith("_token") and value}
    texts = {name: value["content"] if isinstance(value, dict) else value for name, value in named.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _to_json(value: object, *, ensure_ascii: bool = False, indent: int | None = None) -> str:
    # Jinja's own filter escapes for HTML, which no chat template wants.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    content = json.loads(path.read_text(encoding="utf-8"))
    return content if isinstance(content, dict) else {}
