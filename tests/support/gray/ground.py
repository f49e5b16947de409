"""Where a run lives while it meets faults: its processes, its Redis, and folders and ports that can be taken from it.

The store and the folder of Redis lie on file systems of their own, and the run has a network of its own: the process
that makes a `Ground` must be alone in a mount and a network namespace (`unshare --mount --net`), which end with it.
Each fault is a context manager: done when the block begins, healed when it ends.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import redis

from astraflow_kit.lifecycle import ExitCode
from support.chaos import Monkey, Story
from support.damage import flip_a_byte
from support.development import RunFiles, dev, wait_for
from support.gray.clocks import Clocks

DISK_MIB = 256
_CLOSED_PORT = 1
_FILLER = "filler"


class Ground:
    """One run below `folder`, with what can be done to it."""

    def __init__(self, folder: Path) -> None:
        self.files = RunFiles(folder)
        self.monkey = Monkey(Story(files=self.files))
        self._disks = {name: folder / f"disk-{name}" for name in ("store", "redis")}
        self._clocks = Clocks(folder / "clocks")
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
        for name, disk in self._disks.items():
            disk.mkdir()
            _mount("-t", "tmpfs", "-o", f"size={DISK_MIB}m", "none", str(disk))
            (disk / "data").mkdir()
            self._mount_point(name).mkdir(parents=True)
            self._mount(name)
        self.variables = self._clocks.variables

    # ------------------------------------------------------------- processes

    @contextlib.contextmanager
    def frozen(self, role: str) -> Iterator[None]:
        """A process stands still: SIGSTOP. It goes on, unless somebody has replaced it."""
        pid = self.require_pid(role)
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    @contextlib.contextmanager
    def replaced(self, role: str) -> Iterator[None]:
        """A process stands still for good: somebody must kill it and start another one."""
        first = self.require_pid(role)
        os.kill(first, signal.SIGSTOP)
        wait_for(lambda: self.monkey.pid_of(role) not in (None, first), what=f"another {role}")
        yield

    def require_pid(self, role: str) -> int:
        """The living process of a role; waits for one that is being started."""
        wait_for(lambda: self.monkey.pid_of(role), what=f"a living {role}")
        pid = self.monkey.pid_of(role)
        assert pid is not None
        return pid

    @contextlib.contextmanager
    def reached(self, failpoint: str) -> Iterator[None]:
        """A daemon comes to the moment at which the loop is armed; what it does there is not undone."""
        wait_for(
            lambda: any(hit.acted for hit in self.files.read_hits() if hit.name == failpoint), what=failpoint
        )
        yield

    @contextlib.contextmanager
    def clocks_ahead(self, hours: float, *roles: str) -> Iterator[None]:
        """Wall clocks jump, of all processes or of these."""
        with self._clocks.ahead(3600 * hours, *([roles] if roles else [])):
            yield

    @contextlib.contextmanager
    def second_launch(self) -> Iterator[None]:
        """Another launch over the same data dir; it must end by itself."""
        with dev(self.files.folder, "--steps", "100000", variables=self.variables) as second:
            status = second.wait(timeout=120)
            assert status == ExitCode.SUPERSEDED, f"the second launch ended with status {status}"
            yield

    # ----------------------------------------------------------------- Redis

    def redis(self) -> "redis.Redis":
        """A client of the run's Redis."""
        return redis.Redis(port=self._redis_port(), decode_responses=True, socket_timeout=10)

    def _redis_port(self) -> int:
        return int(self._server_option("--redis").rpartition(":")[2].partition("/")[0])

    def _server_option(self, name: str) -> str:
        words = Path(f"/proc/{self.require_pid('dataflow')}/cmdline").read_text().split("\0")
        return words[words.index(name) + 1]

    @contextlib.contextmanager
    def redis_configured(self, **options: object) -> Iterator[None]:
        """Redis has other settings."""
        with self.redis() as client:
            before = {name: client.config_get(name)[name] for name in options}
            for name, value in options.items():
                client.config_set(name, str(value))
            try:
                yield
            finally:
                for name, value in before.items():
                    client.config_set(name, value)

    @contextlib.contextmanager
    def redis_read_only(self) -> Iterator[None]:
        """Redis was made the replica of one that does not answer, as a failover that went wrong leaves it."""
        with self.redis() as client:
            client.replicaof("127.0.0.1", str(_CLOSED_PORT))
            try:
                yield
            finally:
                client.replicaof("NO", "ONE")

    @contextlib.contextmanager
    def redis_writes_paused(self) -> Iterator[None]:
        """Redis keeps every write waiting, as it does during a failover."""
        with self.redis() as client:
            client.client_pause(3_600_000, all=False)
            try:
                yield
            finally:
                client.client_unpause()

    # ----------------------------------------------------------------- disks

    @contextlib.contextmanager
    def disk_full(self, name: str) -> Iterator[None]:
        """No byte is left on the disk of `store` or `redis`."""
        filler = self._disks[name] / _FILLER
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while file.write(bytes(1 << 20)):
                pass
        try:
            yield
        finally:
            filler.unlink()

    @contextlib.contextmanager
    def store_read_only(self) -> Iterator[None]:
        """The store can be read and not written."""
        self._remount("store", "ro")
        try:
            yield
        finally:
            self._remount("store", "rw")

    @contextlib.contextmanager
    def store_unmounted(self) -> Iterator[None]:
        """The store is not mounted: an empty folder is in its place, which stays empty."""
        point = self._mount_point("store")
        subprocess.run(["umount", "--lazy", str(point)], check=True)
        try:
            yield
            assert list(point.iterdir()) == [], "something was written into the mount point"
        finally:
            self._mount("store")

    @contextlib.contextmanager
    def store_parts_damaged(self) -> Iterator[None]:
        """Every part that is stored meanwhile has a byte changed before anybody fetches it; then all are whole."""
        whole: dict[Path, bytes] = {}
        ended = threading.Event()
        pattern, store = "*/*/parts/*.afwd", self._mount_point("store")
        known = set(store.glob(pattern))

        def damage() -> None:
            while not ended.wait(0.001):
                for path in set(store.glob(pattern)) - known:
                    known.add(path)
                    whole[path] = path.read_bytes()
                    path.chmod(0o644)
                    flip_a_byte(path)

        damaging = threading.Thread(target=damage)
        damaging.start()
        try:
            yield
        finally:
            ended.set()
            damaging.join()
            for path, content in whole.items():
                path.write_bytes(content)

    def _mount(self, name: str) -> None:
        _mount("--bind", str(self._disks[name] / "data"), str(self._mount_point(name)))

    def _remount(self, name: str, mode: str) -> None:
        command = ["mount", "-o", f"remount,bind,{mode}", str(self._mount_point(name))]
        # Busy while somebody has a file of it open for writing.
        wait_for(
            lambda: subprocess.run(command, stderr=subprocess.DEVNULL, check=False).returncode == 0,
            what=" ".join(command),
            period_s=0.01,
        )

    def _mount_point(self, name: str) -> Path:
        return self.files.data_dir / name

    # --------------------------------------------------------------- network

    @contextlib.contextmanager
    def dropped(self, owner: str, *, requests: bool = True, answers: bool = True) -> Iterator[None]:
        """Packets to, or from, the port of `dataflow` or `valkey` vanish."""
        port = self._redis_port() if owner == "valkey" else self._server_option("--grpc-port")
        ends = [end for end, vanish in (("--dport", requests), ("--sport", answers)) if vanish]
        rules = [["INPUT", "-i", "lo", "-p", "tcp", end, str(port), "-j", "DROP"] for end in ends]
        for rule in rules:
            subprocess.run(["iptables", "-A", *rule], check=True)
        try:
            yield
        finally:
            for rule in rules:
                subprocess.run(["iptables", "-D", *rule], check=True)


def missing_tools() -> str:
    """What this machine lacks to be such a ground; empty when nothing."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "namespaces, mounts and a firewall of its own need Linux and root"
    missing = [name for name in ("unshare", "mount", "ip", "iptables", "cc") if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} not found; apt-get install util-linux mount iproute2 iptables gcc libc6-dev"
    probe = "ip link set lo up && mount -t tmpfs none /mnt && iptables -A INPUT -p tcp --dport 9 -j DROP"
    done = subprocess.run(
        ["unshare", "--mount", "--net", "sh", "-c", probe], capture_output=True, timeout=30, check=False
    )
    return done.stderr.decode(errors="replace").strip() if done.returncode else ""


def _mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True)
