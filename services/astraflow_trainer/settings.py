"""Settings of a trainer: whom to join, which policy, where to keep checkpoints.

Invariant: how to train is never set here; that comes from the recipe, which the dataflow server hands out.
`__main__` builds them from options and `ASTRAFLOW_*` variables.
"""

import os
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from astraflow.connecting.connection import Connection
from astraflow_kit.join_settings import JoinSettings
from astraflow_kit.making import MakingSettings
from astraflow_kit.settings import CommandOption, SettingsError
from astraflow_weights.daemon_settings import StoreAccess


class TrainerSettings(JoinSettings, StoreAccess, MakingSettings):
    """What a trainer can be told. Only `join` or `join_file` is required."""

    run_id: Annotated[str, CommandOption("The run")] = ""
    """Run to join; empty means the only run."""
    policy: str | None = None
    """Policy to train; unset means the only one."""
    steps: Annotated[int, Field(ge=0, le=10_000_000)] = 0
    """Last step to take, to continue a run beyond its recipe or to end early; 0 takes the recipe's run.steps."""
    recipe: Path | None = None
    """YAML file of the run's recipe with other settings of what only the trainer reads, to train by from the next step
    on; `WORK_DIR/recipe_changes.jsonl` keeps what differs, who started it so, and from which step."""
    recipe_overrides: Annotated[tuple[str, ...], CommandOption(names=("--set",), metavar="KEY=VALUE")] = ()
    """Override a key of the recipe; of what only the trainer reads, or any with `--plan`."""
    accept_data_loss: bool = False
    """Go on from the newest checkpoint although the server's Redis is older than that, or another one: what only that
    Redis had is given up. Take it away again once it has trained on."""
    plan: Annotated[bool, CommandOption(names=("--plan",))] = False
    """Print how many bytes a rank needs to train the policy of `--recipe` by these settings, and end: nothing is
    joined, loaded or begun."""
    plan_ranks: Annotated[int, Field(ge=1, le=65_536)] = 1
    """Ranks that `--plan` reckons with."""
    plan_on: Literal["gpu", "cpu"] = "gpu"
    """What they compute on."""
    plan_memory_gib: Annotated[float, Field(ge=0, le=1_000_000)] = 0.0
    """GiB of memory that a rank has, of a GPU or of its share of the host; a plan that needs more ends with status 2.
    0: any."""
    plan_json: Annotated[bool, CommandOption(names=("--json",))] = False
    """Print the plan as JSON."""
    source_work_dir: Path | None = None
    """Work folder of the trainer of the run that this one was forked from: with its checkpoint of that step the
    optimizer goes on, too, where it would start fresh."""
    work_dir: Annotated[Path, CommandOption("Folders and limits")] = Path("~/.cache/astraflow/trainer")
    """Folder for checkpoints, the ledger and the recipe's code."""
    cache_dir: Path | None = None
    """Folder for warm starts, which runs may share; unset keeps them in the work folder."""
    allow_recipe_code: bool = False
    """Import the Python files that come with the recipe. They may do anything this user may do."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """What this rank computes on: `auto` is the GPU that LOCAL_RANK counts to where there is one, else the CPU."""
    replicas: Annotated[int, Field(ge=1, le=65_536)] = 1
    """Into how many copies of the model the ranks are cut, each spread over as many: HSDP, for ranks on machines that
    are slow to reach. Ranks of one copy follow one another; the first copy publishes."""
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """What of a decoder layer the backward pass computes again instead of keeping it: nothing, all but matrix products
    and attention, everything. Saves memory, costs time, changes no bit of a step."""
    offload: bool = False
    """Keep masters, moments and gradients in host memory, from where weights cross to the GPU layer by layer."""
    attention: Literal["auto", "mask"] = "auto"
    """How attention keeps the rows of a lane apart: `auto` takes flash-attn, or torch's own kernel for rows of many
    lengths, on a GPU that computes in bf16; `mask` never does."""
    compile: bool = False
    """Let torch compile the decoder layers, which takes a minute at the first step; it needs a C++ compiler, and triton
    on a GPU. Without them layers run as they are, and the log says so."""
    threads: Annotated[int, Field(ge=1, le=1024)] = 1
    """torch threads of a training step."""
    warm_start_threads: Annotated[int, Field(ge=0, le=1024)] = 0
    """torch threads of the warm start, while no engine runs yet; 0 takes every core."""
    publish_snapshot: Literal["device", "host"] = "device"
    """Where a trainer on a GPU keeps the bits of the last version, which the next is compared with: `host` saves 2
    bytes of GPU memory per weight of this rank and sends them to the GPU at every step."""
    rank_timeout_s: Annotated[float, Field(gt=0, le=86_400)] = 600.0
    """Longest time a rank waits for the others in one exchange; a rank that died is noticed at once."""
    rank_silence_s: Annotated[float, Field(ge=0.3, le=86_400)] = 30.0
    """Time without a beat of another rank, which is there and stands still, after which all ranks start again."""
    training_stall_s: Annotated[float, Field(ge=0, le=86_400)] = 300.0
    """Time in which a step's computing must begin another micro-batch, or be over; a trainer that stands still longer
    ends with status 75, to be started again. Shown as `trainer_hung` from half of it on. 0: never."""
    drain_timeout_s: Annotated[float, Field(gt=0, le=86_400)] = 120.0
    """Seconds between the first stop signal, which ends training after the step in progress, and a hard
    stop.
    """

    @field_validator("work_dir", "cache_dir", "source_work_dir")
    @classmethod
    def _expand_home(cls, path: Path | None) -> Path | None:
        return None if path is None else path.expanduser()

    @property
    def connection(self) -> Connection:
        """How to reach the server; a plan is made without one."""
        return Connection("127.0.0.1:1") if self.plan else super().connection

    @property
    def cache(self) -> Path:
        """Where warm starts are kept."""
        return self.cache_dir or self.work_dir / "cache"

    @property
    def warm_start_cores(self) -> int:
        """torch threads of the warm start."""
        return self.warm_start_threads or len(os.sched_getaffinity(0))


class RankSettings(BaseSettings):
    """Which rank of how many this process is, from the variables that `torchrun` sets. One rank without them."""

    model_config = SettingsConfigDict(env_prefix="", frozen=True, extra="ignore", env_ignore_empty=True)

    rank: Annotated[int, Field(ge=0)] = 0
    """RANK."""
    local_rank: Annotated[int, Field(ge=0)] | None = None
    """LOCAL_RANK: which of the ranks of its machine or pod; `torchrun` sets it."""
    world_size: Annotated[int, Field(ge=1, le=65_536)] = 1
    """WORLD_SIZE."""
    master_addr: str = "127.0.0.1"
    """MASTER_ADDR: where the first rank is found; an address of its machine."""
    master_port: Annotated[int, Field(ge=0, le=65_535)] = 0
    """MASTER_PORT; needed with more than one rank."""
    torchelastic_use_agent_store: bool = False
    """Set by `torchrun`, which then keeps the store of the meeting itself."""
    torchelastic_restart_count: Annotated[int, Field(ge=0)] = 0
    """Set by `torchrun`: which start of the whole group this is."""

    @model_validator(mode="after")
    def _has_a_place(self) -> Self:
        if self.rank >= self.world_size:
            raise ValueError(f"RANK {self.rank} must be below WORLD_SIZE {self.world_size}")
        if self.world_size > 1 and not self.master_port:
            raise ValueError(
                f"WORLD_SIZE {self.world_size} needs MASTER_PORT, a free port of the first rank's machine; "
                "`torchrun` sets it"
            )
        return self


def load_rank_settings() -> RankSettings:
    """Read the variables. Raises SettingsError listing every problem."""
    try:
        return RankSettings()
    except ValidationError as error:
        problems = [
            f"{'.'.join(map(str, detail['loc'])).upper()}: {detail['msg']}".removeprefix(": ")
            for detail in error.errors(include_url=False)
        ]
        raise SettingsError("; ".join(problems)) from error
