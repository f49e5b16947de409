"""Tokens of one development run: its server answers nobody else, and would run the code of whoever may create a run.

Invariant: made anew at each start, readable by their owner only, and signed by a key that is gone when they are made.
"""

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Self

from astraflow.commands.server import OPERATOR_TOKEN
from astraflow_kit.identity.tokens import ALL
from astraflow_launcher.issuing.keys import create_keys
from astraflow_launcher.issuing.secret_files import write_file
from astraflow_launcher.issuing.tokens import Grant, issue_token

_LIFE = timedelta(days=365)


@dataclass(frozen=True)
class RunTokens:
    """Where the tokens of a run's folder lie, by role, and the keys that its server verifies them with."""

    folder: Path

    @property
    def keys(self) -> Path:
        """What `token_keys_file` of the server names."""
        return self.folder / OPERATOR_TOKEN.with_name("signing.jwks.json")

    def of(self, role: str) -> Path:
        """The file of a role's token: `operator`, `viewer`, `trainer` or `rollout`."""
        return self.folder / OPERATOR_TOKEN.with_name(f"{role}.token")

    @classmethod
    def make(cls, folder: Path) -> Self:
        """Make keys and tokens in a run's folder, in place of those of its last start. Raises InvalidArgumentError."""
        tokens = cls(folder)
        tokens.remove()
        signing = tokens.keys.with_name("signing.pem")
        create_keys(signing)
        for role in ("operator", "viewer", "trainer", "rollout"):
            grant = Grant(role=role, runs=(ALL,), nodes=(ALL,), subject=f"{role} of {folder.name}")
            write_file(tokens.of(role), issue_token(grant, ttl=_LIFE, key=signing).encode() + b"\n")
        signing.unlink()
        return tokens

    def remove(self) -> None:
        """Remove them: the server of this start, if there is one, knows nothing of them."""
        for path in self.keys.parent.glob("*"):
            path.unlink()
