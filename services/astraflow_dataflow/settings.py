"""Settings of the dataflow server: its Redis, and the few times that no recipe decides.

Nothing about a run is set here; that comes from the run's recipe. `__main__` builds them from options and `ASTRAFLOW_*`
variables, `server` passes the parts on.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field, FilePath, field_validator

from astraflow_dataflow.records import Level
from astraflow_kit.settings import CommandOption, DaemonSettings


class DataflowServerSettings(DaemonSettings):
    """What a dataflow server can be told. Only `redis` is required."""

    redis: Annotated[
        str,
        Field(pattern=r"^(redis|rediss|unix)://"),
        CommandOption("The data", metavar="redis://HOST:PORT/DB"),
    ]
    """Redis 7.0 or newer, or Valkey, with an append-only file."""
    redis_password_file: FilePath | None = None
    """File holding its password; read again at every connection."""
    allow_volatile: bool = False
    """Accept a Redis without an append-only file: what was acknowledged is lost when it restarts."""
    durability: Level = Level.MEMORY
    """What acknowledgements wait for: `memory`, the Redis host's disk (`fsynced`) or a replica (`replicated`)."""
    allow_recipe_code: bool = False
    """Run the Python files that come with a recipe (data set, curators, filters, selector). They may do anything this
    user may do.
    """
    work_dir: Path = Path("~/.cache/astraflow/dataflow")
    """Folder for the code of recipes."""
    batch_lease_s: Annotated[float, Field(ge=1, le=86_400)] = 120.0
    """Time in which a trainer renews the batch it holds; expiry raises an alarm and never unbinds."""
    evaluation_patience_s: Annotated[float, Field(ge=0, le=86_400)] = 45.0
    """Time without progress after which an evaluation of a superseded version is given up."""

    @property
    def capabilities(self) -> list[str]:
        """Optional features that are on, as `GetServerInfo` names them."""
        on = {
            "durable_acknowledgements": self.durability is not Level.MEMORY,
            "recipe_code": self.allow_recipe_code,
        }
        return [name for name, is_on in on.items() if is_on]

    @field_validator("work_dir")
    @classmethod
    def _expand_home(cls, path: Path) -> Path:
        return path.expanduser()
