"""What a node offers a workflow whose agent is written against the OpenAI API: an address, a key, what came of it.

Invariant: a key opens the policies of one episode, from `open` until the block ends, and nothing else. A workflow names
`endpoint` in its constructor and gets the node's `AgentEndpoint`; standard library only, as `plugins`.
"""

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from astraflow.plugins import Episode, Policy

__all__ = ["AgentEndpoint", "AgentLimits", "AgentSession"]


@dataclass(frozen=True, kw_only=True)
class AgentLimits:
    """What one agent may ask for in one episode; beyond it calls are refused with status 429."""

    max_calls: int = 256
    """Answers sampled; a request with n counts n. An agent that was refused as often again fails the episode."""
    max_concurrent_calls: int = 32
    """Requests worked on at once; others wait."""
    max_sampled_tokens: int = 262_144
    """Tokens sampled by all calls together."""


class AgentSession(Protocol):
    """The calls of one agent in one episode."""

    @property
    def base_url(self) -> str:
        """What `OPENAI_BASE_URL` must be: an address on this machine, ending in `/v1`."""

    @property
    def api_key(self) -> str:
        """What `OPENAI_API_KEY` must be: random, valid until the block ends."""

    @property
    def answer(self) -> str:
        """The text of the newest answer; empty before the first."""

    def episode(self, *, reward: float, metrics: Mapping[str, float] | None = None) -> Episode:
        """Return every conversation as a trajectory with `reward`; calls in flight are left out."""


class AgentEndpoint(Protocol):
    """The node's OpenAI-compatible endpoint."""

    def open(
        self, policies: Mapping[str, Policy], *, limits: AgentLimits | None = None
    ) -> AbstractAsyncContextManager[AgentSession]:
        """Serve `policies`, each as the model of its name in the mapping, while the block runs.

        The block is cancelled, and raises why, when an engine's answer cannot be used or the agent floods.
        """
