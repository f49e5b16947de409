"""The conversations of one episode: which call continues which, and the trajectories that they are.

Invariant: tokens are those that were sampled, under the prompts that they were sampled for; every sampled token is
trained on exactly once, in the oldest of the conversations that hold it. A call continues an earlier one only when its
messages begin with exactly that one's messages and answer. Pure; called by `calls`.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate

from astraflow.plugins import GenerateResult, Message, Trajectory, TurnSpan, VersionSpan
from astraflow.trajectories import MAX_TRAJECTORIES
from astraflow_raas.agents.api_errors import over_limit


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """One answer, the tokens given before it, and the turn that it continues."""

    model: str
    parent: "Turn | None"
    given_ids: tuple[int, ...]
    given_role: str
    result: GenerateResult

    @property
    def num_tokens(self) -> int:
        """Tokens to the end of the answer."""
        return sum(len(turn.given_ids) + len(turn.result.token_ids) for turn in self.path())

    def path(self) -> list["Turn"]:
        """The turns from the first of the conversation to this one."""
        turn: Turn | None = self
        path = []
        while turn is not None:
            path.append(turn)
            turn = turn.parent
        return path[::-1]

    def token_ids(self) -> list[int]:
        """All tokens to the end of the answer."""
        return [token for turn in self.path() for token in (*turn.given_ids, *turn.result.token_ids)]


class Conversations:
    """All turns of an episode, of every model."""

    def __init__(self) -> None:
        self._turns: list[Turn] = []
        self._by_end: dict[bytes | str, Turn] = {}
        self._num_expected = 0

    @contextmanager
    def room_for(self, num_answers: int, *, after: Turn | None) -> Iterator[None]:
        """Hold room for answers while they are sampled. Raises ApiError beyond what an episode may hold."""
        leaves = self._leaves()
        num_new = num_answers - (after in leaves)
        if len(leaves) + self._num_expected + num_new > MAX_TRAJECTORIES:
            raise over_limit("conversations that nothing continues", MAX_TRAJECTORIES, remedy="continue one")
        self._num_expected += num_new
        try:
            yield
        finally:
            self._num_expected -= num_new

    def continued(self, ends: Sequence[bytes]) -> tuple[Turn, int] | None:
        """The turn whose conversation is the longest proper beginning, and its number of messages.

        `ends` are the `ends_of` the messages of a call.
        """
        for length in range(len(ends) - 1, 0, -1):
            turn = self._by_end.get(ends[length - 1])
            if turn is not None:
                return turn, length
        return None

    def continued_text(self, text: str) -> tuple[Turn, str] | None:
        """The turn with whose text, the longest, `text` begins, and what follows."""
        found = [end for end in self._by_end if isinstance(end, str) and text.startswith(end)]
        longest = max(found, key=len, default=None)
        return None if longest is None else (self._by_end[longest], text.removeprefix(longest))

    def add(self, turn: Turn, *, end: bytes | str | None) -> None:
        """Keep an answer; `end` stands for all messages up to and with it, or is all text; None continues never.

        Of equal ones the first is continued.
        """
        if not turn.result.token_ids:
            return
        self._turns.append(turn)
        if end is not None:
            self._by_end.setdefault(end, turn)

    def trajectories(self, *, policy_of: dict[str, str], reward: float) -> tuple[Trajectory, ...]:
        """One trajectory for each conversation that nothing continues, oldest first."""
        trained: set[Turn] = set()
        return tuple(
            _trajectory(leaf, trained, policy_of=policy_of, reward=reward) for leaf in self._leaves()
        )

    def _leaves(self) -> list[Turn]:
        continued = {turn.parent for turn in self._turns}
        return [turn for turn in self._turns if turn not in continued]


def ends_of(head: str, messages: Sequence[Message]) -> list[bytes]:
    """For each message a digest of `head` and all messages up to it."""
    begin = hashlib.blake2b(head.encode(), digest_size=16).digest()
    return list(accumulate(messages, _digest, initial=begin))[1:]


def _digest(before: bytes, message: Message) -> bytes:
    # `as_chat` decodes the arguments of calls, which clients write anew with other blanks.
    text = json.dumps(message.as_chat(), sort_keys=True)
    return hashlib.blake2b(before + text.encode(), digest_size=16).digest()


def _trajectory(leaf: Turn, trained: set[Turn], *, policy_of: dict[str, str], reward: float) -> Trajectory:
    token_ids: list[int] = []
    loss_mask: list[bool] = []
    logprobs: list[float] = []
    version_spans: list[VersionSpan] = []
    turn_spans: list[TurnSpan] = []
    for turn in leaf.path():
        result, is_new = turn.result, turn not in trained
        start = len(token_ids) + len(turn.given_ids)
        end = start + len(result.token_ids)
        if turn.given_ids:
            turn_spans.append(TurnSpan(len(token_ids), start, turn.given_role))
        turn_spans.append(TurnSpan(start, end, "assistant"))
        token_ids += (*turn.given_ids, *result.token_ids)
        loss_mask += [False] * len(turn.given_ids) + [is_new] * len(result.token_ids)
        logprobs += [0.0] * len(turn.given_ids)
        logprobs += result.logprobs if is_new else [0.0] * len(result.token_ids)
        version_spans += [span.moved(start) for span in result.version_spans]
        trained.add(turn)
    return Trajectory(
        policy=policy_of[leaf.model],
        token_ids=token_ids,
        loss_mask=loss_mask,
        logprobs=logprobs,
        version_spans=version_spans,
        reward=reward,
        role=leaf.model,
        finish_reason=leaf.result.finish_reason,
        turn_spans=turn_spans,
    )
