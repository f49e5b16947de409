"""What a chat template writes after an assistant's turn, apart from everything before it.

Invariant: the text that `Continuation` returns depends on the new messages alone, so it can follow tokens that were
sampled, whatever they are; a template for which that is not so is refused. Pure; called by `tokenizer`.
"""

import functools
from collections.abc import Callable, Sequence

from astraflow.errors import RecipeError
from astraflow.plugins import Message, Tool

_SAMPLED = "|what the policy sampled|"
_QUESTION, _ANSWER = Message("user", "question"), Message("assistant", _SAMPLED)
_CACHED_TOOLS = 64
_CHATS = (
    (_QUESTION, _ANSWER),
    (_QUESTION, Message("assistant", "answer"), _QUESTION, _ANSWER),
    (Message("system", "instruction"), _QUESTION, _ANSWER),
)


class Continuation:
    """Continues conversations of one template; `render` applies it and adds the generation prompt."""

    def __init__(self, render: Callable[[Sequence[Message], Sequence[Tool]], str]) -> None:
        self._render = render
        self._chats = functools.lru_cache(maxsize=_CACHED_TOOLS)(self._find_chats)

    def text(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> str:
        """Return the end of the assistant's turn, `messages` and the generation prompt.

        Raises RecipeError for a template that writes them differently after different conversations, or changes
        what stands before them.
        """
        texts = set()
        for chat, usual_head in self._chats(tuple(tools)):
            head, text = self._split((*chat, *messages), tools)
            if head != usual_head:
                raise _unstable(f"a message of role {messages[-1].role!r} changes what stands before it")
            texts.add(text)
        if len(texts) > 1:
            raise _unstable("it writes a message differently after different conversations")
        return texts.pop()

    def _find_chats(self, tools: Sequence[Tool]) -> list[tuple[tuple[Message, ...], str]]:
        """Conversations that the template takes, and what it writes before the last answer."""
        found: list[tuple[tuple[Message, ...], str]] = []
        for chat in _CHATS:
            try:
                found.append((chat, self._split((*chat, _QUESTION), tools)[0]))
            except RecipeError:
                if chat[0].role != "system":  # which some templates do not take
                    raise
        return found

    def _split(self, chat: Sequence[Message], tools: Sequence[Tool]) -> tuple[str, str]:
        head, _, tail = self._render(chat, tools).partition(_SAMPLED)
        if not tail or _SAMPLED in tail:
            raise _unstable("it does not write an assistant's message once and as it is")
        return head, tail


def _unstable(why: str) -> RecipeError:
    return RecipeError(
        f"the model's chat template cannot continue a conversation token by token: {why}; return a trajectory for each "
        "turn, or use a model whose template only appends"
    )
