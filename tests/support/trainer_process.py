"""Trainers as real processes over a recorded log of batches: to be killed, frozen and started again.

A process that has imported torch forks the trainers, so that each starts in well under a second. `push_groups`
plays the nodes: the same groups in the same order for every run of one seed, so two trainers that consume them
must end with the same bits. Used by the tests of resume and of epochs.
"""

import asyncio
import json
import multiprocessing
import multiprocessing.forkserver
import os
import signal
import sys
import warnings
from collections.abc import AsyncIterator, Container, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors

from astraflow.columns import Columns, encode_columns
from astraflow.dataflow.v1 import run_pb2, run_service_pb2
from astraflow.errors import UnavailableError
from astraflow.recipe.file import parse_recipe
from astraflow.rollout.v1 import trajectory_pb2
from astraflow_kit.lifecycle import read_address_file
from astraflow_weights.store import open_store
from support import store_census
from support.dataflow_world import World, until
from support.valkey import ValkeyServer

POLICY = "solver"
VOCAB = 32
GROUPS_PER_STEP = 2
GROUP_SIZE = 2
KILLED = -9
RECIPE = """
run: {{name: {name}, dataset: "support.dataflow_world:Empty", steps: {steps}}}
policies:
  solver: {{model: {{path: "{model}"}}, sampling: {{max_new_tokens: 16}}}}
dataflow:
  group_size: {group_size}
  groups_per_step: {groups_per_step}
  max_staleness: {steps}
  evaluation: {{every_versions: 0, num_samples: 1, final_samples: 1}}
raas: {{reward: "support.dataflow_world:Zero"}}
trainer:
  checkpoint_every_steps: {checkpoint_every_steps}
  optimizer: {{learning_rate: 0.01, warmup_steps: 2}}
  publish: {{snapshot_every_versions: 3}}
"""


class TrainerProcess:
    """One trainer: a work folder over any number of lives."""

    def __init__(
        self, address: str, folder: Path, *, name: str = "trainer", run_id: str = "run", policy: str = POLICY
    ) -> None:
        self.work_dir = folder / name
        self.ledger = self.work_dir / "ledger.jsonl"
        """What it recorded that it trained on."""
        self.failpoints_log = folder / f"{name}.failpoints.jsonl"
        self._log = folder / f"{name}.log"
        self._address_file = folder / f"{name}.json"
        self._options = {"join": address, "run_id": run_id, "policy": policy}
        self._process: ForkServerProcess | None = None

    @property
    def log(self) -> str:
        """The end of its log."""
        return self._log.read_text()[-6000:] if self._log.exists() else ""

    @property
    def grpc_address(self) -> str | None:
        """Where this life answers TrainerService; None until it does."""
        addresses = read_address_file(self._address_file)
        return addresses.grpc if addresses is not None else None

    def start(self, *, failpoints: str = "", **options: object) -> None:
        """Start another life with these failpoints armed, and these settings; returns at once."""
        self._address_file.unlink(missing_ok=True)
        given = (
            self._options
            | options
            | {
                "work_dir": str(self.work_dir),
                "failpoints": failpoints,
                "failpoints_log": str(self.failpoints_log),
                "log_format": "json",
                "address_file": str(self._address_file),
            }
        )
        self._process = _forking_context().Process(target=_live, args=(given, str(self._log)))
        self._process.start()

    async def exits_with(self, status: int) -> None:
        """Wait for its end; the status of a signal is a negative number."""
        process = self._running()
        # In a thread: the server that it asks may live in this loop.
        await asyncio.to_thread(process.join, 150.0)
        assert process.exitcode == status, f"{process.exitcode} is not {status}: {self.log}"

    async def lives(self, *, failpoints: str = "", status: int = 0, **options: object) -> None:
        """Start another life, with these settings, and wait for its end."""
        self.start(failpoints=failpoints, **options)
        await self.exits_with(status)

    async def frozen(self) -> None:
        """Wait until a failpoint has frozen it."""
        process = psutil.Process(self._running().pid)

        async def is_stopped() -> bool:
            return process.status() == psutil.STATUS_STOPPED

        await until(is_stopped, within_s=120)

    def is_alive(self) -> bool:
        """Whether it lives, frozen or not."""
        return self._process is not None and self._process.is_alive()

    def go_on(self) -> None:
        """Let a frozen one continue."""
        os.kill(self._running().pid or 0, signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL, frozen or not, started or not."""
        if self._process is not None and self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _running(self) -> ForkServerProcess:
        assert self._process is not None, "start the trainer first"
        return self._process


@pytest.fixture(scope="module")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServer]:
    """One kind of Redis is enough for what trainers do; imported by test modules in place of the shared one."""
    with ValkeyServer(tmp_path_factory.mktemp("valkey")) as server:
        yield server


@pytest.fixture(scope="module", autouse=True)
def forking() -> Iterator[None]:
    """The process that forks a module's trainers is ready before a server lives in the test's loop, which it would hold
    up; afterwards it is gone.
    """
    first = _forking_context().Process(target=_nothing)
    first.start()
    first.join()
    yield
    # There is no public way to end it before this process ends.
    server: Any = vars(multiprocessing.forkserver)["_forkserver"]
    if server._forkserver_pid is not None:
        # It holds nothing; an orderly end runs through torch's finalizers, which take long on a busy machine.
        os.kill(server._forkserver_pid, signal.SIGKILL)
    server._stop()


def _forking_context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "astraflow_trainer.server"])
    return context


def _nothing() -> None:
    """What the first process does: it has come once everything is imported."""


def _live(options: dict[str, object], log_path: str) -> None:
    log = os.open(log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    from astraflow_kit import lifecycle
    from astraflow_trainer import server
    from astraflow_trainer.settings import RankSettings, TrainerSettings

    settings = TrainerSettings(**options)  # type: ignore[arg-type]
    lifecycle.begin("trainer", settings)
    sys.exit(server.run(settings, RankSettings()))


async def create_run(
    world: World,
    *,
    folder: Path,
    name: str = "run",
    steps: int = 6,
    checkpoint_every_steps: int = 2,
    overrides: Sequence[str] = (),
) -> run_pb2.Run:
    """Create a run over the tiny model of `folder`, with a store of its own."""
    sizes = {"group_size": GROUP_SIZE, "groups_per_step": GROUPS_PER_STEP}
    times = {"steps": steps, "checkpoint_every_steps": checkpoint_every_steps}
    text = RECIPE.format(name=name, model=tiny_model(folder), **sizes, **times)
    loaded, store = parse_recipe(text, overrides=overrides), folder / f"{name}.store"
    run = run_pb2.Run(run_id=name, recipe_yaml=loaded.yaml_text, store_uri=store.as_uri())
    world.run_id = name
    return (await world.ask(run_service_pb2.CreateRunResponse, run=run)).run


@asynccontextmanager
async def recorded(
    world: World, *trainers: TrainerProcess, steps: int, unlikely: Container[int] = ()
) -> AsyncIterator[None]:
    """Inside, groups for so many steps are pushed; leaving well waits for the last. Afterwards no trainer lives."""
    recording = asyncio.create_task(push_groups(world, count=steps * GROUPS_PER_STEP, unlikely=unlikely))
    try:
        yield
        await recording
    finally:
        recording.cancel()
        for trainer in trainers:
            trainer.kill()


async def require_trained(world: World, *, steps: int) -> None:
    """All groups of these steps were trained on, and each was counted once."""
    account = (await world.status()).trajectories
    num_trained = steps * GROUPS_PER_STEP * GROUP_SIZE
    assert (account.trained, account.conservation_error) == (num_trained, 0)


def census_of(run: run_pb2.Run) -> store_census.Census:
    """What the run's store holds."""
    return store_census.take(open_store(run.store_uri), run_id=run.run_id, policy_id=POLICY)


async def push_groups(world: World, *, count: int, seed: int = 0, unlikely: Container[int] = ()) -> None:
    """Once the first version is announced, submit `count` tasks and complete them, one after the other.

    The groups, and so the batches, are the same for every run with this seed, however its trainers fare. Those at the
    places `unlikely` have log-probs below any other.
    """

    async def has_a_version() -> bool:
        with suppress(UnavailableError):  # a busy machine's Redis may be silent for a while
            return (await world.status()).policies[0].HasField("version")
        return False

    await until(has_a_version, within_s=90)
    draw = np.random.default_rng(seed)
    node = await world.node("recorder")
    for index in range(count):
        await world.submit(f"task-{seed}-{index}", group_size=GROUP_SIZE)
        (lease,) = await node.lease(1, wait_s=20)
        for member in lease.members:
            episode = node.episode(lease, member, reward=float(member))
            _resample(episode, draw, mean=-7.0 if index in unlikely else -3.5)
            result = await node.push(episode)
            assert not result.reason, result


def _resample(episode: trajectory_pb2.Episode, draw: np.random.Generator, *, mean: float) -> None:
    """Give a trajectory tokens and log-probs of its own, in the space that its header leaves."""
    (item,) = episode.trajectories
    num_tokens, num_trained = item.header.num_tokens, item.header.num_trainable_tokens
    mask = np.arange(num_tokens) >= num_tokens - num_trained
    logprobs = np.where(mask, mean + 0.3 * draw.standard_normal(num_tokens), 0.0).astype(np.float32)
    columns = Columns(
        token_ids=draw.integers(0, VOCAB, num_tokens).astype(np.int32),
        loss_mask=mask,
        logprobs=np.minimum(logprobs, 0.0),
        version_spans=((num_tokens - num_trained, num_tokens, 0),),
    )
    trajectory = encode_columns(columns, trajectory_id=item.header.trajectory_id)
    trajectory.sampling.temperature = 1.0
    item.body = trajectory.SerializeToString()


def tiny_model(folder: Path, *, seed: int = 0) -> Path:
    """A random model of a few thousand parameters, the same for every seed."""
    from astraflow_trainer.model.model import build_causal_lm, save_causal_lm
    from support.tiny_training import TINY

    directory = folder / "model"
    if not directory.exists():
        directory.mkdir(parents=True)
        save_causal_lm(build_causal_lm(TINY, seed=seed), directory)
    return directory


def newest_checkpoint(work_dir: Path) -> tuple[int, dict[str, torch.Tensor]]:
    """Step and content of the newest checkpoint: masters, moments and random state."""
    path = max((work_dir / "checkpoints").glob("step-*"))
    return int(path.name.removeprefix("step-")), read_checkpoint(path)


def read_checkpoint(path: Path) -> dict[str, torch.Tensor]:
    """Content of a checkpoint."""
    metadata = FileSystemReader(path).read_metadata().state_dict_metadata
    tensors = {}
    for name, entry in metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            tensors[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # DCP warns that one process loads alone, which is the intent
        load_tensors(tensors, storage_reader=FileSystemReader(path), no_dist=True)
    return tensors


def newest_baselines(work_dir: Path) -> dict[str, float]:
    """The running baselines in the newest checkpoint."""
    path = max((work_dir / "checkpoints").glob("step-*")) / "position.json"
    baselines: dict[str, float] = json.loads(path.read_text())["baselines"]
    return baselines
