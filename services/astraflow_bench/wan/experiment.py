"""The experiment: builds the network, starts the roles, and asks one thing after the other.

Invariant: everything it makes ends with it; nothing is measured before plain TCP reached the share of the rate that
`links.RATE_SHARE` says. `commands.bench_wan` runs it.
"""

import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from astraflow.errors import PreconditionError
from astraflow_bench.signals import ended_by_sigterm
from astraflow_bench.wan import radosgw, report
from astraflow_bench.wan.links import (
    RATE_SHARE,
    SCALES,
    LinkPlan,
    Place,
    goodput_bits_per_s,
    link_to,
)
from astraflow_bench.wan.messages import Message
from astraflow_bench.wan.network import Network
from astraflow_bench.wan.report import Arrival, WanReport
from astraflow_bench.wan.role_processes import RoleProcesses
from astraflow_kit.parent import python
from astraflow_weights.settings import MirrorSettings

__all__ = ["Options", "run"]

_FOLDER = "astraflow-bench-wan-"
_RUN, _POLICY, _BUCKET = "wan", "policy", "wan-bench"
_RAW_PORT = 7000
_MEASURE_S = 3.0
_LAG = 8
_BLOCK_ELEMENTS = 2**26
_SERVED_OBJECTS = 16
_REMOVALS = 50
Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure."""

    rate_bits_per_s: float
    rtt_s: float
    model_bytes: int
    learning_rate: float
    follow_versions: int
    """Single versions that each node follows."""
    blocked_versions: int
    """Publications per way of following the trainer."""
    join_version: int
    """At which a node begins; 0 leaves it out."""
    step_s: float
    """A training step lasts at least this long."""
    scaling: bool
    """Whether a machine that cannot carry the link may take a share of it, and of the model."""
    time_limit_s: float
    seed: int


def run(options: Options, *, progress: Progress) -> WanReport:
    """Measure. Raises PreconditionError when the machine lacks something or does not carry the link."""
    if missing := radosgw.missing_programs():
        raise PreconditionError(f"the experiment's store is a Ceph radosgw: {missing}")
    started, load = time.monotonic(), os.getloadavg()[0]
    plan = LinkPlan(rate_bits_per_s=options.rate_bits_per_s, rtt_s=options.rtt_s)
    with ended_by_sigterm(), _folder(_temporary()) as folder, _folder(_memory()) as memory:
        network = Network(plan, folder=folder, lifetime_s=options.time_limit_s)
        with (
            network,
            RoleProcesses(network, folder=folder, deadline_s=started + options.time_limit_s) as roles,
        ):
            experiment = _Experiment(
                options, network=network, roles=roles, folder=folder, memory=memory, progress=progress
            )
            found = experiment.run()
    found.machine = {
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "kernel": f"{platform.system()} {platform.release()} {platform.machine()}",
        "load_before": load,
        "load_after": os.getloadavg()[0],
    }
    found.seconds = time.monotonic() - started
    return found


class _Experiment:
    def __init__(
        self,
        options: Options,
        *,
        network: Network,
        roles: RoleProcesses,
        folder: Path,
        memory: Path,
        progress: Progress,
    ) -> None:
        """`memory` is where nodes keep their mirrors."""
        self._options = options
        self._network = network
        self._roles = roles
        self._folder = folder
        self._memory = memory
        self._progress = progress
        self._report = WanReport()
        self._newest = -1
        self._file_s: dict[Place, float] = {}

    def run(self) -> WanReport:
        self._calibrate()
        self._start_store()
        self._start_trainer_and_nodes()
        self._full()
        none_s = self._blocked("no", None, none_s=None, versions=_LAG)
        self._lag()
        self._follow("rice")
        self._blocked("local", Place.LOCAL, none_s=none_s)
        self._blocked("remote", Place.REMOTE, none_s=none_s)
        self._roles.ask("trainer", "using", do="use_codec", codec="rice_ctx")
        self._follow("rice_ctx")
        self._roles.ask("trainer", "using", do="use_codec", codec="rice")
        if self._options.join_version:
            self._join()
        relay = self._network.relay
        assert relay is not None
        counters = relay.counters()
        self._report.link["latest_us"] = max(direction["latest_us"] for direction in counters.values())
        self._report.link["refused_packets"] = sum(direction["refused"] for direction in counters.values())
        return self._report

    # ------------------------------------------------------------ before anything is measured

    def _calibrate(self) -> None:
        """Find the share of the link that this machine carries. Raises PreconditionError."""
        sender = self._network.start(
            Place.STORE, *_python("raw_transfer", "send", str(_RAW_PORT)), stdout=None
        )
        try:
            self._roles.start("probe", Place.REMOTE, "raw_transfer", **self._raw_order(measure=False))
            self._roles.wait("probe", "measured")
            for scale in SCALES if self._options.scaling else SCALES[:1]:
                if self._carries(scale):
                    return
        finally:
            sender.kill()
            sender.wait()
        tries = "; ".join(
            f"{attempt['measured_bits_per_s'] / 1e9:.3f} of {attempt['rate_bits_per_s'] / 1e9:g} Gbit/s"
            for attempt in self._report.tries
        )
        raise PreconditionError(
            f"plain TCP over the long link carried {tries}, less than {RATE_SHARE:.0%} of the rate, so times over "
            "it would say nothing; use a quieter machine or one with more cores, or a lower --rate-gbit"
        )

    def _carries(self, scale: float) -> bool:
        plan = LinkPlan(rate_bits_per_s=self._options.rate_bits_per_s, rtt_s=self._options.rtt_s).scaled(
            scale
        )
        self._network.shape(plan)
        self._progress(f"plain TCP over {plan.rate_bits_per_s / 1e9:g} Gbit/s, {plan.rtt_s * 1000:g} ms")
        found = self._roles.ask("probe", "measured", **self._raw_order(measure=True))
        self._report.tries.append(
            {"rate_bits_per_s": plan.rate_bits_per_s, "measured_bits_per_s": found["bits_per_s"]}
        )
        self._report.scale = scale
        self._report.link = {
            "rate_bits_per_s": plan.rate_bits_per_s,
            "goodput_bits_per_s": goodput_bits_per_s(plan.rate_bits_per_s),
            "rtt_s": plan.rtt_s,
            "measured_bits_per_s": found["bits_per_s"],
            "measured_rtt_s": found["rtt_s"],
            "connections": _connections(),
            "congestion_control": self._network.congestion_control,
            "bdp_bytes": plan.bdp_bytes,
            "socket_bytes": plan.socket_bytes,
        }
        carried: bool = found["bits_per_s"] >= RATE_SHARE * plan.rate_bits_per_s
        return carried

    def _raw_order(self, *, measure: bool) -> Message:
        rtt_s = self._options.rtt_s
        return {
            "address": link_to(self._network.plan, Place.REMOTE).store_address,
            "port": _RAW_PORT,
            "connections": _connections() if measure else 1,
            # A window doubles once per round trip; from ten packets to a full link it takes about 14.
            "warm_up_s": 1 + 16 * rtt_s if measure else 0.0,
            "measure_s": _MEASURE_S if measure else 0.1,
        }

    def _start_store(self) -> None:
        self._progress("starting the store (radosgw)")
        folder = self._folder / "store"
        self._roles.start("store", Place.STORE, "store_role", folder=str(folder), bucket=_BUCKET)
        self._ready = self._roles.wait("store", "ready")
        served = self._roles.ask("store", "served", num_objects=_SERVED_OBJECTS)
        self._report.store = {"name": radosgw.version(), "bytes_per_s": served["bytes_per_s"]}

    def _start_trainer_and_nodes(self) -> None:
        self._progress("starting trainer and nodes")
        elements = max(1, int(self._options.model_bytes * self._report.scale) // 2)
        block = min(elements, _BLOCK_ELEMENTS)
        self._roles.start(
            "trainer",
            Place.TRAINER,
            "trainer_role",
            **self._at(Place.TRAINER),
            block_elements=block,
            copies=max(1, round(elements / block)),
            learning_rate=self._options.learning_rate,
            seed=self._options.seed,
        )
        for place in (Place.LOCAL, Place.REMOTE):
            folder = str(self._memory / place.value)
            self._roles.start(place.value, place, "node_role", **self._at(place), folder=folder)
        for name in ("trainer", "local", "remote"):
            self._roles.wait(name, "ready")
        self._report.model = {"learning_rate": self._options.learning_rate, "trained_elements": block}

    def _at(self, place: Place) -> Message:
        """How a role at a place reaches the store."""
        address = link_to(self._network.plan, place).store_address
        settings = {
            "endpoint_url": f"http://{address}:{self._ready['port']}",
            "region": "us-east-1",
            "credentials_file": self._ready["credentials_file"],
        }
        return {
            "store": f"s3://{_BUCKET}/weights",
            "store_settings": settings,
            "run_id": _RUN,
            "policy_id": _POLICY,
        }

    # ------------------------------------------------------------ what is measured

    def _full(self) -> None:
        """A whole model to each node: as a version, and as a file."""
        self._progress("a whole model, as a version")
        committed = self._publish_one()
        self._report.publish.append(report.publish_figures("snapshot", [committed]))
        for place in (Place.LOCAL, Place.REMOTE):
            self._roles.ask(place.value, "reconnected", do="reconnect")
            self._whole(place, "version", "new", self._advance(place, mirror="first"))
            self._whole(place, "version", "open", self._advance(place))
        self._progress("a whole model, as a safetensors file")
        sent = self._roles.ask("trainer", "uploaded", do="upload")
        file = {"publish_s": sent["seconds"], "size_bytes": sent["size_bytes"]}
        self._report.publish.append(report.publish_figures("safetensors", [file]))
        self._report.model |= {"bytes": sent["size_bytes"], "num_elements": sent["size_bytes"] // 2}
        for place in (Place.LOCAL, Place.REMOTE):
            self._roles.ask(place.value, "reconnected", do="reconnect")
            for connections in ("new", "open"):
                arrival = self._fetch(place, key=sent["key"])
                self._whole(place, "safetensors", connections, arrival)
            self._file_s[place] = arrival.seconds

    def _whole(self, place: Place, method: str, connections: str, arrival: Arrival) -> None:
        rate = self._network.plan.rate_bits_per_s
        figures = report.full_figures(
            place.value, method, arrival, connections=connections, rate_bits_per_s=rate
        )
        self._report.full.append(figures)

    def _lag(self) -> None:
        """Both nodes slept while the trainer published."""
        self._progress(f"nodes that slept through {_LAG} versions")
        self._roles.ask("trainer", "compacted", do="compact")
        for place in (Place.LOCAL, Place.REMOTE):
            since = self._newest - _LAG
            arrival = self._advance(place)
            described = self._roles.ask(
                place.value, "described", do="describe", since=since, version=self._newest
            )
            self._report.lag.append(report.lag_figures(place.value, arrival, described))
            self._report.model["density"] = max(described["density"])

    def _follow(self, codec: str) -> None:
        """Single versions to both nodes, one after the other."""
        self._progress(f"single versions, {codec}")
        arrivals: dict[Place, list[Arrival]] = {Place.REMOTE: [], Place.LOCAL: []}
        for place in arrivals:
            self._advance(place)
        published = []
        for _ in range(self._options.follow_versions):
            published.append(self._publish_one())
            for place, found in arrivals.items():
                found.append(self._advance(place))
        self._report.publish.append(report.publish_figures(codec, published))
        for place, found in arrivals.items():
            self._report.deltas.append(
                report.delta_figures(place.value, codec, found, safetensors_s=self._file_s[place])
            )

    def _blocked(
        self, name: str, follower: Place | None, *, none_s: float | None, versions: int | None = None
    ) -> float:
        """The training thread per publication, while `follower` keeps up as it can; the median."""
        self._progress(f"the trainer, followed by {name} node")
        steps = versions or self._options.blocked_versions
        self._roles.tell("trainer", do="train", steps=steps, step_s=self._options.step_s)
        blocked: list[Message] = []
        last, busy = self._newest + steps, False
        held = last if follower is None else self._newest
        while len(blocked) < steps or self._newest < last or held < last:
            who, message = self._roles.next()
            if message["event"] == "blocked":
                blocked.append(message)
            elif message["event"] == "committed":
                self._newest = message["version"]
            elif message["event"] == "advanced":
                held, busy = message["version"], False
            else:
                raise AssertionError(f"{who} says {message['event']!r}, which nobody asked")
            if follower is not None and not busy and held < self._newest:
                self._roles.tell(follower.value, do="advance", mirror="mirror", version=self._newest)
                busy = True
        figures = report.blocked_figures(name, blocked, none_s=none_s)
        self._report.blocked.append(figures)
        seconds: float = figures["seconds"]
        return seconds

    def _join(self) -> None:
        """A remote node that begins with nothing at a late version."""
        self._progress(f"versions up to {self._options.join_version}, which nobody follows")
        steps = self._options.join_version - self._newest
        if steps > 0:
            self._roles.tell("trainer", do="train", steps=steps, step_s=0.0)
            for _ in range(steps):
                self._roles.wait("trainer", "blocked")
                self._newest = self._roles.wait("trainer", "committed")["version"]
        self._roles.ask("trainer", "compacted", do="compact")
        self._progress(f"a node that begins at version {self._newest}")
        arrival = self._advance(Place.REMOTE, mirror="joined")
        self._report.join.append(report.join_figures("remote", self._newest, arrival))

    def _publish_one(self) -> Message:
        committed = self._roles.ask("trainer", "committed", do="train", steps=1, step_s=0.0)
        self._roles.wait("trainer", "blocked")
        self._newest = committed["version"]
        return committed

    def _advance(self, place: Place, *, mirror: str = "mirror") -> Arrival:
        """Tell a node of the newest version now, and wait until it holds it."""
        received, started = self._network.received_bytes(place), time.monotonic()
        found = self._roles.ask(place.value, "advanced", do="advance", mirror=mirror, version=self._newest)
        return Arrival(
            seconds=found["ended_s"] - started,
            refresh_s=found["refresh_s"],
            advance_s=found["advance_s"],
            fetched_bytes=found["fetched_bytes"],
            received_bytes=self._network.received_bytes(place) - received,
            snapshots=found["snapshots"],
            deltas=found["deltas"],
        )

    def _fetch(self, place: Place, *, key: str) -> Arrival:
        received, started = self._network.received_bytes(place), time.monotonic()
        found = self._roles.ask(place.value, "fetched", do="fetch", key=key)
        seconds = found["ended_s"] - started
        return Arrival(
            seconds=seconds,
            refresh_s=0.0,
            advance_s=seconds,
            fetched_bytes=found["fetched_bytes"],
            received_bytes=self._network.received_bytes(place) - received,
        )


def _connections() -> int:
    """Concurrent requests of one node."""
    return MirrorSettings().fetch_threads


def _python(module: str, *arguments: str) -> tuple[str, ...]:
    return python(f"astraflow_bench.wan.{module}", *arguments)


@contextmanager
def _folder(root: Path) -> Iterator[Path]:
    """A folder for one run; those of runs that were killed are removed first."""
    for left in root.glob(f"{_FOLDER}*"):
        pid = left.name.removeprefix(_FOLDER).partition("-")[0]
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(left, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{_FOLDER}{os.getpid()}-", dir=root))
    try:
        yield folder
    finally:
        _remove(folder)


def _temporary() -> Path:
    return Path(tempfile.gettempdir())


def _memory() -> Path:
    """Where nodes should keep mirrors: shared memory where there is some."""
    shared = Path("/dev/shm")
    return shared if shared.is_dir() else _temporary()


def _remove(folder: Path) -> None:
    """The store's processes were killed a moment ago and may still be writing."""
    for attempt in range(_REMOVALS):
        shutil.rmtree(folder, ignore_errors=attempt < _REMOVALS - 1)
        if not folder.exists():
            return
        time.sleep(0.1)
