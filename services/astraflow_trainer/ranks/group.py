"""How the ranks of one trainer find each other, and what each of its threads may use to talk.

Invariant: collectives of different threads run in different process groups, so they never mix; a rank that
was started again joins only ranks of its own start. One process is a group of one and opens no port. The
trainer's server joins at start.
"""

import json
import math
import secrets
import socket
import time
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore

from astraflow.errors import InternalError, UnavailableError
from astraflow_kit.log import get_logger
from astraflow_trainer.ranks.device import CPU, device_fault
from astraflow_trainer.ranks.reductions import GroupRanks, OneRank, Ranks
from astraflow_trainer.ranks.watch import RankLostError, RankWatch
from astraflow_trainer.settings import RankSettings
from astraflow_weights.codec.peers import Peers

log = get_logger(__name__)

_POLL_S = 0.1
_FAREWELL_S = 3.0  # a connection may break before its last message is read


@dataclass(frozen=True, kw_only=True)
class RankGroup:
    """What the threads of one rank use to agree with the others, and what it computes on."""

    device: torch.device
    """Where this rank's part of the model lives."""
    training: Ranks
    """For the training thread."""
    publishing: Peers
    """For the publishing thread."""
    snapshots: Peers
    """For the thread that makes snapshots of what is published."""
    saving: Ranks
    """For writing and reading checkpoints."""
    saving_group: dist.ProcessGroup | None
    """The process group of `saving`; None with one rank."""
    store: Store
    watch: RankWatch | None
    """None with one rank."""

    @property
    def index(self) -> int:
        """This rank, from 0."""
        return self.training.index

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.training.size

    def explain(self, error: BaseException) -> BaseException:
        """Why this rank ends: `error`, unless that is only what another rank's end, or the GPU's, led to."""
        fault = device_fault(error, device=self.device, rank=self.index)
        if fault is not None:
            return fault
        if self.watch is None or not _is_of_an_exchange(error):
            return error
        lost = self.watch.failure(wait_s=_FAREWELL_S)
        return lost or RankLostError(f"the other ranks of {self.size} do not answer: {error}")

    def farewell(self, error: BaseException | None) -> None:
        """Tell the other ranks that this one ends, and why; None when training is over."""
        if self.watch is not None:
            self.watch.farewell(error)

    def set_value(self, key: str, value: str) -> None:
        """Set a value that the other ranks wait for, once."""
        self.store.set(f"value/{key}", value)

    def wait_for_value(self, key: str) -> str:
        """Wait for what the first rank sets, however long that takes it; its death ends the wait.

        Raises what ended it.
        """
        while not self.store.check([f"value/{key}"]):
            failure = self.watch.failure(wait_s=_POLL_S) if self.watch else None
            if failure is not None:
                raise failure
        return str(self.store.get(f"value/{key}").decode())


def _is_of_an_exchange(error: BaseException) -> bool:
    """Whether a collective failed, in gloo's words or in NCCL's."""
    if isinstance(error, dist.DistBackendError):
        return True
    said = str(error).lower()
    return type(error) is RuntimeError and ("gloo" in said or "nccl" in said)


def join_rank_group(
    settings: RankSettings, *, timeout_s: float, silence_s: float = math.inf, device: torch.device = CPU
) -> RankGroup:
    """Meet the other ranks; with one rank, return at once.

    Tensors on the CPU are exchanged by gloo, those on a GPU by NCCL. `timeout_s` bounds the meeting and every later
    collective; a rank that stands still for `silence_s` is lost. Raises UnavailableError when the others do
    not come, or ranks of an earlier start are still there.
    """
    if settings.world_size == 1:
        return _alone(device)
    deadline = time.monotonic() + timeout_s
    try:
        store = _rendezvous(settings, timeout_s=timeout_s)
        watch = _open_watch(settings, store, deadline=deadline, silence_s=silence_s)
        dist.init_process_group(
            _backends(device),
            store=store,
            rank=settings.rank,
            world_size=settings.world_size,
            timeout=timedelta(seconds=timeout_s),
        )
        publishing, snapshots, saving = (_another_group(timeout_s) for _ in range(3))
    except (RuntimeError, OSError) as error:
        raise UnavailableError(
            f"rank {settings.rank} of {settings.world_size} did not meet the others at "
            f"{settings.master_addr}:{settings.master_port} within {timeout_s:.0f} s: {error}; start all ranks "
            "with the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE"
        ) from error
    default = dist.group.WORLD
    if default is None:
        raise InternalError("there is no process group after joining one")
    log.info("ranks.joined", rank=settings.rank, world_size=settings.world_size)
    return RankGroup(
        device=device,
        training=GroupRanks(default),
        publishing=GroupRanks(publishing),
        snapshots=GroupRanks(snapshots),
        saving=GroupRanks(saving),
        saving_group=saving,
        store=store,
        watch=watch,
    )


def _backends(device: torch.device) -> str:
    return "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:nccl"


def _alone(device: torch.device) -> RankGroup:
    # A mesh of one needs a group too; this store never leaves the process.
    store = HashStore()
    if not dist.is_initialized():
        dist.init_process_group(_backends(device), store=store, rank=0, world_size=1)
    return RankGroup(
        device=device,
        training=OneRank(),
        publishing=OneRank(),
        snapshots=OneRank(),
        saving=OneRank(),
        saving_group=None,
        store=store,
        watch=None,
    )


def _another_group(timeout_s: float) -> dist.ProcessGroup:
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
    assert isinstance(group, dist.ProcessGroup)
    return group


def _rendezvous(settings: RankSettings, *, timeout_s: float) -> Store:
    """The store at MASTER_ADDR:MASTER_PORT, which the first rank opens unless `torchrun` has done so."""
    opens = settings.rank == 0 and not settings.torchelastic_use_agent_store
    timeout = timedelta(seconds=timeout_s)
    if opens:
        # torch would listen on every address of the machine.
        listener = socket.create_server((settings.master_addr, settings.master_port))
        store = TCPStore(
            settings.master_addr,
            settings.master_port,
            is_master=True,
            wait_for_workers=False,
            timeout=timeout,
            master_listen_fd=listener.detach(),
        )
    else:
        store = TCPStore(settings.master_addr, settings.master_port, wait_for_workers=False, timeout=timeout)
    mine = PrefixStore(f"start-{settings.torchelastic_restart_count}", store)
    _take_place(settings, mine)
    return mine


def _take_place(settings: RankSettings, store: Store) -> None:
    nonce = secrets.token_hex(16)
    if store.compare_set(f"place/{settings.rank}", "", nonce).decode() != nonce:
        raise UnavailableError(
            f"rank {settings.rank} of the group at {settings.master_addr}:{settings.master_port} is taken: "
            "ranks of an earlier start are still ending; start this one again"
        )


def _open_watch(settings: RankSettings, store: Store, *, deadline: float, silence_s: float) -> RankWatch:
    if settings.rank != 0:
        port, nonce = store.get("watch").decode().split()
        connection = socket.create_connection((settings.master_addr, int(port)), timeout=_left_s(deadline))
        connection.sendall(json.dumps({"rank": settings.rank, "nonce": nonce}).encode() + b"\n")
        return RankWatch(settings.rank, settings.world_size, {0: connection}, silence_s)
    nonce = secrets.token_hex(16)
    with socket.create_server((settings.master_addr, 0)) as listener:
        store.set("watch", f"{listener.getsockname()[1]} {nonce}")
        connections: dict[int, socket.socket] = {}
        while len(connections) < settings.world_size - 1:
            listener.settimeout(_left_s(deadline))
            connection, _ = listener.accept()
            index = _introduced(connection, nonce=nonce, timeout_s=_left_s(deadline))
            if index is not None:
                connections[index] = connection
    return RankWatch(0, settings.world_size, connections, silence_s)


def _introduced(connection: socket.socket, *, nonce: str, timeout_s: float) -> int | None:
    """The rank that connected; None, and its connection closed, for a stranger."""
    connection.settimeout(min(5.0, timeout_s))
    try:
        with connection.makefile("rb") as lines:
            hello = json.loads(lines.readline(1024))
        if hello["nonce"] == nonce:
            return int(hello["rank"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("ranks.stranger", error=str(error))
    connection.close()
    return None


def _left_s(deadline: float) -> float:
    return max(0.1, deadline - time.monotonic())
