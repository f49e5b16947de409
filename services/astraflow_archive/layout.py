"""Names of the objects of a run's archive.

Invariant: every key of an archive is made and read here, and begins with `<run>/archive=1/`, which no policy can be
called. Keys sort by policy, step and time; `policy=…/step=…` is how Parquet readers find partitions.

    <run>/archive=1/samples/policy=<policy>/step=<step:020d>/<first entry>_<last entry>_<digest>.parquet
    <run>/archive=1/trainer_logprobs/policy=<policy>/step=<step:020d>/<digest>.parquet
"""

import re
from dataclasses import dataclass
from typing import Self

from astraflow.errors import InvalidArgumentError
from astraflow_weights.store.layout import check_id

SCHEMA_VERSION = 1
"""Version of keys and columns."""

_FILE = re.compile(
    r"(?P<run>[^/]+)/archive=1/samples/policy=(?P<policy>[^/]+)/step=(?P<step>\d{20})/"
    r"(?P<name>(?P<ms>\d{13})[0-9a-f_-]*)\.parquet"
)
_SAMPLE_ID = re.compile(
    r"(?P<policy>[A-Za-z0-9][A-Za-z0-9._-]{0,127})/(?P<step>\d{1,16})/(?P<name>\d{13}[0-9a-f_-]*)/(?P<row>\d{1,9})"
)


@dataclass(frozen=True, kw_only=True)
class Place:
    """One file of an archive."""

    run_id: str
    policy_id: str
    step: int
    name: str
    """Begins with the milliseconds at which its first trajectory left the run; 13 digits."""

    @classmethod
    def at(cls, key: str) -> Self | None:
        """The file under `key`; None when it is none."""
        found = _FILE.fullmatch(key)
        if found is None:
            return None
        return cls(
            run_id=found["run"],
            policy_id=found["policy"],
            step=int(found["step"]),
            name=found["name"],
        )

    @property
    def key(self) -> str:
        """Its key in the store."""
        return f"{prefix(self.run_id, policy_id=self.policy_id, step=self.step)}{self.name}.parquet"

    @property
    def ms(self) -> int:
        """When what it holds began to leave the run."""
        return int(self.name[:13])

    @property
    def beside(self) -> str:
        """The folder of what trainers made of the tokens of its step."""
        return logprobs_prefix(self.run_id, policy_id=self.policy_id, step=self.step)

    def sample_id(self, row: int) -> str:
        """The id of one of its rows."""
        return f"{self.policy_id}/{self.step}/{self.name}/{row}"


def root(run_id: str) -> str:
    """Where all files of a run's archive lie."""
    return f"{check_id(run_id, what='run id')}/archive={SCHEMA_VERSION}/"


def prefix(run_id: str, *, policy_id: str = "", step: int | None = None) -> str:
    """Where files lie: all, those of a policy, or those of one of its steps."""
    of_policy = f"policy={check_id(policy_id, what='policy id')}/" if policy_id else ""
    of_step = f"step={step:020d}/" if step is not None else ""
    return f"{root(run_id)}samples/{of_policy}{of_step}"


def logprobs_prefix(run_id: str, *, policy_id: str, step: int) -> str:
    """Where trainers write what they made of the tokens of a step."""
    return f"{root(run_id)}trainer_logprobs/policy={check_id(policy_id, what='policy id')}/step={step:020d}/"


def located(run_id: str, sample_id: str) -> tuple[Place, int]:
    """The file and the row of a sample. Raises InvalidArgumentError for an id that `ListSamples` never gave."""
    found = _SAMPLE_ID.fullmatch(sample_id)
    if found is None:
        raise InvalidArgumentError(
            f"{sample_id!r} is no sample of an archive; ListSamples (`astraflow samples list`) gives their ids"
        )
    place = Place(run_id=run_id, policy_id=found["policy"], step=int(found["step"]), name=found["name"])
    return place, int(found["row"])
