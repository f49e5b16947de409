"""Network namespaces with shaped links between them, which end with this process.

Invariant: the namespaces have no name: each lives as long as a process in it, and all of these die with this
one, by the kernel's hand when it is killed. So nothing of a run can be left, and the machine's own network is never
touched. `experiment` owns one.
"""

import os
import platform
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO

from astraflow.errors import PreconditionError, UnavailableError
from astraflow_bench.wan.links import Link, LinkPlan, Place, best_congestion_control
from astraflow_bench.wan.relay import Relay, compiled_relay
from astraflow_kit.parent import dying_with_us

__all__ = ["Network", "missing_tools"]

_PROGRAMS = {
    "ip": "iproute2",
    "tc": "iproute2",
    "nsenter": "util-linux",
    "unshare": "util-linux",
    "sysctl": "procps",
    "cc": "gcc libc6-dev",
}
_COMMAND_S = 30.0
_START_S = 60.0


def missing_tools(*more: str) -> str:
    """What the machine lacks, of these programs too, and how to get it; empty when nothing."""
    if platform.system() != "Linux":
        return f"network namespaces exist on Linux only, this is {platform.system()}; run it on Linux"
    if os.geteuid() != 0:
        return (
            f"making network namespaces needs root, this is user {os.geteuid()}; run the command as root "
            "(in a container also with --privileged)"
        )
    missing = [program for program in (*_PROGRAMS, *more) if shutil.which(program) is None]
    if missing:
        packages = " ".join(dict.fromkeys(_PROGRAMS.get(program, program) for program in missing))
        return f"{', '.join(missing)} not found; apt-get install {packages}"
    if not Path("/dev/net/tun").exists():
        return "/dev/net/tun does not exist; load the kernel module with `modprobe tun`"
    return _refused()


def _refused() -> str:
    """What this machine answers to a namespace with one of each device in it; empty when it makes them."""
    devices = "ip tuntap add mode tun name probe && ip link add one type veth peer name two"
    shaping = "tc qdisc add dev one root tbf rate 1gbit burst 100kb latency 10ms"
    done = subprocess.run(
        ["unshare", "--net", "sh", "-c", f"{devices} && {shaping}"],
        capture_output=True,
        timeout=_COMMAND_S,
        check=False,
    )
    if not done.returncode:
        return ""
    return (
        f"this machine refuses a network namespace with shaped links: {done.stderr.decode(errors='replace').strip()}; "
        "run as root (in a container with --privileged) on a kernel with tun, veth and tbf"
    )


class Network:
    """The places and their links. Use as a context manager, in the main thread."""

    def __init__(self, plan: LinkPlan, *, folder: Path, lifetime_s: float) -> None:
        """`folder` takes the compiled relay. After `lifetime_s` the namespaces end whatever happens."""
        self.plan = plan
        self.congestion_control = ""
        self._folder = folder
        self._lifetime_s = lifetime_s
        self._holders: dict[Place, subprocess.Popen[bytes]] = {}
        self._stack = ExitStack()
        self.relay: Relay | None = None

    def __enter__(self) -> "Network":
        if missing := missing_tools():
            raise PreconditionError(missing)
        with ExitStack() as stack:
            for place in Place:
                self._holders[place] = stack.enter_context(self._holder())
            for place in Place:
                self._wait_for_namespace(place)
                # IPv6 would send packets of its own before both ends of a link are up.
                self.run(place, "sysctl", "-q", "-e", "-w", "net.ipv6.conf.default.disable_ipv6=1")
                self.run(place, "ip", "link", "set", "lo", "up")
            for link in self.plan.links:
                self._connect(link, stack)
            self._tune()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def start(
        self,
        place: Place,
        *command: str,
        stdin: int | None = subprocess.DEVNULL,
        stdout: int | IO[bytes] | None = subprocess.PIPE,
        stderr: int | IO[bytes] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start a program there; whoever calls ends it."""
        line = dying_with_us(*self._inside(place), *command)
        return subprocess.Popen(line, stdin=stdin, stdout=stdout, stderr=stderr, env=env)

    def run(self, place: Place, *command: str) -> str:
        """Run a short program there and return what it prints. Raises UnavailableError when it fails."""
        return _run([*self._inside(place), *command])

    def shape(self, plan: LinkPlan) -> None:
        """Give all links another rate; the round trip stays."""
        assert plan.rtt_s == self.plan.rtt_s
        self.plan = plan
        for link in plan.links:
            for place in (Place.STORE, link.place):
                self.run(place, "tc", *plan.shaping(link))

    def received_bytes(self, place: Place) -> int:
        """Bytes that came to a place over its link, headers included."""
        link = next(link for link in self.plan.links if link.place is place)
        for line in self.run(place, "cat", "/proc/net/dev").splitlines():
            device, _, counters = line.partition(":")
            if device.strip() == link.device:
                return int(counters.split()[0])
        raise AssertionError(f"no device {link.device} at {place.value}")

    def _holder(self) -> subprocess.Popen[bytes]:
        life = str(int(self._lifetime_s) + 1)
        return _Ended(dying_with_us("unshare", "--net", "sleep", life), stdin=subprocess.DEVNULL)

    def _inside(self, place: Place) -> list[str]:
        return ["nsenter", f"--net=/proc/{self._holders[place].pid}/ns/net"]

    def _wait_for_namespace(self, place: Place) -> None:
        holder, ours = self._holders[place], Path("/proc/self/ns/net").readlink()
        deadline = time.monotonic() + _START_S
        while not _is_apart(holder.pid, ours):
            if holder.poll() is not None or time.monotonic() > deadline:
                raise UnavailableError(
                    f"no network namespace for the {place.value}: `unshare --net` ended with "
                    f"{holder.poll()}; run as root, in a container with --privileged"
                )
            time.sleep(0.01)

    def _connect(self, link: Link, stack: ExitStack) -> None:
        store, other = self._holders[Place.STORE].pid, self._holders[link.place].pid
        if link.delay_us:
            relay = compiled_relay(self._folder)
            self.relay = stack.enter_context(
                Relay(dying_with_us(str(relay)), left=store, right=other, link=link, plan=self.plan)
            )
        else:
            ends = ("netns", str(store), "type", "veth", "peer", "name", link.device, "netns", str(other))
            _run(["ip", "link", "add", link.device, *ends])
        for place, own, peer in (
            (Place.STORE, link.store_address, link.address),
            (link.place, link.address, link.store_address),
        ):
            self.run(place, "ip", "address", "add", own, "peer", peer, "dev", link.device)
            self.run(place, "ip", "link", "set", link.device, "txqueuelen", "10000", "up")
            self.run(place, "tc", *self.plan.shaping(link))

    def _tune(self) -> None:
        known = self.run(Place.STORE, "cat", "/proc/sys/net/ipv4/tcp_available_congestion_control").split()
        self.congestion_control = best_congestion_control(known)
        for place in Place:
            for name, value in self.plan.tuning(congestion_control=self.congestion_control):
                # /proc/sys/net shows the namespace of who opens it.
                self.run(place, "sysctl", "-q", "-w", f"{name.replace('/', '.')}={value}")


class _Ended(subprocess.Popen[bytes]):
    """A process that is killed when the block ends, not waited for."""

    def __exit__(self, *_: object) -> None:
        self.kill()
        self.wait(timeout=_COMMAND_S)


def _is_apart(pid: int, ours: Path) -> bool:
    try:
        return Path(f"/proc/{pid}/ns/net").readlink() != ours
    except OSError:
        return False  # it is just being started, or has ended: `poll` tells


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, timeout=_COMMAND_S, check=False)
    if done.returncode:
        raise UnavailableError(
            f"`{' '.join(command)}` ended with {done.returncode}: {done.stderr.decode(errors='replace').strip()}; "
            "the kernel must allow network namespaces, veth, tun and tbf"
        )
    return done.stdout.decode()
