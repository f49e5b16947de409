"""What a recipe says of a version of another run that a policy starts with: `policies.NAME.model.from_version`."""

from __future__ import annotations

from pydantic import Field

from astraflow.recipe.roles import PolicyName
from astraflow.recipe.section import Section

__all__ = ["StoredVersionSettings"]


class StoredVersionSettings(Section):
    """A weight version of another run, in its store. `astraflow runs fork` writes it."""

    store: str = Field(pattern=r"^(file|s3)://\S+$", max_length=1024)
    """The other run's store; trainers read it with the credentials of their own."""
    run: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")
    """The other run."""
    policy: PolicyName
    """Its policy."""
    version: int = Field(ge=0, lt=2**21)
    """The version; pinned there, or it may be collected before a trainer has it."""
    step: int | None = Field(default=None, ge=0)
    """The step after which the policy had these weights; a checkpoint of it has the optimizer that belongs to them."""
    manifest_sha256: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$")
    """Digest of the version's manifest; what the store has under that number is refused when it is another."""
