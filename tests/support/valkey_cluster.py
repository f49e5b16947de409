"""A real Valkey cluster on loopback ports: three primaries, replicas where a test wants them.

The nodes are made a cluster as an operator would, and can be killed, started again and asked to hand slots over. Used
by the tests of the dataflow server on a cluster.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import redis

from astraflow_dataflow.store.homes.slots import NUM_SLOTS, slot_of
from astraflow_dataflow.store.keys import RUNS_KEY, Keys
from astraflow_kit.ports import free_port
from support.valkey import ValkeyServer

OPTIONS = [
    "--cluster-enabled",
    "yes",
    "--cluster-require-full-coverage",
    "no",
    "--cluster-node-timeout",
    "1000",
]
"""A primary that is away stops its own slots only, and its replica takes over within seconds."""


class ValkeyNode(ValkeyServer):
    """A node; its bus has a free port as well."""

    def __init__(self, folder: Path) -> None:
        self.bus_port = free_port()
        super().__init__(folder, options=[*OPTIONS, "--cluster-port", str(self.bus_port)])

    def ask(self, *command: str | int) -> Any:
        """Send a command of an operator."""
        with redis.Redis(port=self.port, socket_timeout=5, decode_responses=True) as client:
            client.response_callbacks.clear()
            return client.execute_command(*command)

    @property
    def node_id(self) -> str:
        """Its name in the cluster."""
        return str(self.ask("CLUSTER", "MYID"))

    def has(self, line: str) -> bool:
        """Whether it says this of its replication."""
        return line in str(self.ask("INFO", "replication"))

    def has_written(self) -> bool:
        """Whether its file has all that it answered, as far as its process goes."""
        return "aof_buffer_length:0\r" in str(self.ask("INFO", "persistence"))

    def knows_all(self, count: int) -> bool:
        """Whether it sees so many nodes, and all slots."""
        info = str(self.ask("CLUSTER", "INFO"))
        return "cluster_state:ok" in info and f"cluster_known_nodes:{count}\r" in info


class ValkeyCluster:
    """Three primaries, and a replica for each of those that `replicated` names. The run `run`, which most tests use,
    lives on another one than the registry.
    """

    def __init__(self, folder: Path, *, replicated: Sequence[int] = ()) -> None:
        self.nodes = [ValkeyNode(folder / f"node-{number}") for number in range(3 + len(replicated))]
        self._replicated = replicated

    @property
    def url(self) -> str:
        """The address of all of it, by the primaries."""
        return "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in self.nodes[:3])

    def join(self) -> None:
        """Make one cluster of the nodes, which run."""
        first, count = self.nodes[0], len(self.nodes)
        bounds = [0, 2048, NUM_SLOTS // 2, NUM_SLOTS]
        for number, node in enumerate(self.nodes[:3]):
            node.ask("CLUSTER", "ADDSLOTSRANGE", bounds[number], bounds[number + 1] - 1)
        for number, node in enumerate(self.nodes, start=1):
            node.ask("CLUSTER", "SET-CONFIG-EPOCH", number)
        for node in self.nodes[1:]:
            node.ask("CLUSTER", "MEET", "127.0.0.1", first.port, first.bus_port)
        wait_until(lambda: all(node.knows_all(count) for node in self.nodes))
        for replica, number in zip(self.nodes[3:], self._replicated, strict=True):
            replica.ask("CLUSTER", "REPLICATE", self.nodes[number].node_id)
            wait_until(partial(replica.has, "master_link_status:up"))

    def owner(self, slot: int) -> ValkeyNode:
        """The primary that has a slot now."""
        living = next(node for node in self.nodes if node.is_running)
        for first, last, (_, port, *_), *_ in living.ask("CLUSTER", "SLOTS"):
            if first <= slot <= last:
                return next(node for node in self.nodes if node.port == port)
        raise AssertionError(f"nobody has slot {slot}")

    def home(self, run_id: str) -> ValkeyNode:
        """The primary that has a run now, or for '' the registry."""
        return self.owner(slot_of(Keys(run_id).prefix if run_id else RUNS_KEY))

    @contextmanager
    def without(self, *nodes: ValkeyNode) -> Iterator[None]:
        """Primaries are killed for the block, and begin again from their files after it. While a disk is busy they hold
        back what they answered; that is waited for, as it is nothing that is to be lost here.
        """
        for node in nodes:
            wait_until(node.has_written)
            node.kill()
        try:
            yield
        finally:
            for node in nodes:
                node.start()
            wait_until(lambda: all(each.knows_all(len(self.nodes)) for each in self.nodes))

    def move(self, run_id: str, to: ValkeyNode) -> None:
        """Hand the run's slot over at one moment."""
        slot = slot_of(Keys(run_id).prefix)
        self.owner(slot).ask("CLUSTER", "MIGRATESLOTS", "SLOTSRANGE", slot, slot, "NODE", to.node_id)
        wait_until(lambda: self.owner(slot) is to)

    @contextmanager
    def moving(self, run_id: str, to: ValkeyNode) -> Iterator[None]:
        """Hand the run's slot over key by key: during the block every second key is on either node."""
        slot = slot_of(Keys(run_id).prefix)
        source = self.owner(slot)
        to.ask("CLUSTER", "SETSLOT", slot, "IMPORTING", source.node_id)
        source.ask("CLUSTER", "SETSLOT", slot, "MIGRATING", to.node_id)
        keys = source.ask("CLUSTER", "GETKEYSINSLOT", slot, 10_000)
        source.ask("MIGRATE", "127.0.0.1", to.port, "", 0, 5000, "KEYS", *keys[::2])
        yield
        left = source.ask("CLUSTER", "GETKEYSINSLOT", slot, 10_000)
        source.ask("MIGRATE", "127.0.0.1", to.port, "", 0, 5000, "KEYS", *left)
        for node in (to, source):
            node.ask("CLUSTER", "SETSLOT", slot, "NODE", to.node_id)

    def all_keys(self) -> set[str]:
        """Every key on any primary."""
        return {key for node in self.nodes[:3] for key in node.ask("KEYS", "*")}

    def flush(self) -> None:
        """Empty all of it."""
        for node in self.nodes[:3]:
            node.ask("FLUSHALL")


def run_on(cluster: ValkeyCluster, node: ValkeyNode) -> str:
    """The name of a run that lives on this primary."""
    return next(name for number in range(1000) if cluster.home(name := f"run-{number}") is node)


def wait_until(holds: Callable[[], bool], *, within_s: float = 30.0) -> None:
    """Wait for what nodes do on their own."""
    deadline_s = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline_s, f"not so after {within_s:g} s"
        time.sleep(0.05)


@contextmanager
def running_cluster(folder: Path, *, replicated: Sequence[int] = ()) -> Iterator[ValkeyCluster]:
    """A cluster that runs and is whole."""
    cluster = ValkeyCluster(folder, replicated=replicated)
    with ExitStack() as running:
        for node in cluster.nodes:
            running.enter_context(node)
        cluster.join()
        yield cluster
