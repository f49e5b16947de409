"""Settings of an environment service: which environment, with how many workers, and what one session may take.

Invariant: nothing about runs or nodes is set here; what an environment starts from comes with each task. Options come
from the command line, then from `ASTRAFLOW_*` variables.
"""

import json
from pathlib import Path
from typing import Annotated

from pydantic import Field, field_validator

from astraflow_kit.settings import CommandOption, DaemonSettings


class EnvironmentSettings(DaemonSettings):
    """The options of an environment service. Only `use` is required."""

    use: Annotated[
        str,
        Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$"),
        CommandOption("The environment", metavar="MODULE:CLASS"),
    ]
    """`Environment` plug-in, as a recipe would name it; `recipe:Name` needs `recipe`."""
    with_: Annotated[str, CommandOption(names=("--with",), metavar="JSON")] = "{}"
    """Settings of the plug-in, a JSON object."""
    recipe: Path | None = None
    """Folder whose recipe.py `recipe:Name` means."""
    name: Annotated[str, Field(pattern=r"^$|^[A-Za-z_]\w*$")] = ""
    """Name that nodes ask for; empty takes the class's name."""
    workers: Annotated[int, Field(ge=1, le=1024), CommandOption("Workers and sessions")] = 1
    """Processes that hold environments, started and loaded before they are needed."""
    sessions_per_worker: Annotated[int, Field(ge=1, le=4096)] = 1
    """Sessions that one process holds at once. One is right for whatever is not safe in threads, or blocks."""
    worker_start_timeout_s: Annotated[float, Field(gt=0, le=3600)] = 120.0
    """Seconds a worker may take until the plug-in is loaded."""
    worker_sessions: Annotated[int, Field(ge=0, le=10_000_000)] = 0
    """Sessions after which a worker is replaced by a fresh one, for environments that leak; 0 keeps it."""
    max_turns: Annotated[int, Field(ge=1, le=1_000_000)] = 1000
    """Turns of a session; the last one is truncated."""
    session_timeout_s: Annotated[float, Field(gt=0, le=86_400)] = 3600.0
    """Seconds a session may live."""
    idle_timeout_s: Annotated[float, Field(gt=0, le=86_400)] = 600.0
    """Seconds without a call after which a session ends: its caller is gone."""

    @field_validator("with_")
    @classmethod
    def _is_an_object(cls, text: str) -> str:
        if not isinstance(json.loads(text), dict):
            raise ValueError('must be a JSON object, for example {"level": 3}')
        return text

    @property
    def served_name(self) -> str:
        """The name that nodes ask for."""
        return self.name or self.use.partition(":")[2]
