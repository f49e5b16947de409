"""A Ceph radosgw with the one monitor and one OSD that it needs, as unprivileged processes.

Invariant: everything lies in one private folder and ends with the block, or with this process; no service of the
machine is touched, and no manager runs (nothing here needs one). The gateway listens on `host`, the rest on loopback.
Where a Debian package is missing, `missing_programs` says so. The WAN experiment's store, and a store in tests.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import shutil
import subprocess
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Sequence
from email.utils import formatdate
from pathlib import Path
from types import TracebackType
from typing import IO

from astraflow.errors import UnavailableError
from astraflow_kit.parent import dying_with_us
from astraflow_kit.ports import free_port
from astraflow_weights.settings import StoreSettings

PACKAGES = "radosgw ceph-mon ceph-osd"
_PROGRAMS = ("ceph", "ceph-authtool", "ceph-mon", "ceph-osd", "monmaptool", "radosgw", "radosgw-admin")
_START_S = 240.0
_KEYS = ("testtesttest", "secretsecretsecret")
_CONF = """\
[global]
fsid = {fsid}
mon host = {addresses}
mon initial members = a
ms bind ipv4 = true
auth cluster required = cephx
auth service required = cephx
auth client required = cephx
keyring = {folder}/keyring
run dir = {folder}
admin socket = {folder}/$name.asok
pid file = {folder}/$name.pid
log file = {folder}/$name.log
crash dir = {folder}
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 2
osd pool default pgp num = 2
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
mon allow pool size one = true
mon max pg per osd = 2000
mon data = {folder}/mon
mon osd full ratio = 0.99
mon data avail crit = 1
osd data = {folder}/osd
osd objectstore = bluestore
bluestore block size = 6442450944
osd memory target = 1073741824
rgw data = {folder}/rgw
rgw frontends = beast endpoint={host}:{port} tcp_nodelay=1
rgw thread pool size = 16
rgw enable usage log = false
rgw crypt require ssl = false
"""


def missing_programs() -> str:
    """What must be installed before one can start; empty when nothing."""
    missing = [program for program in _PROGRAMS if shutil.which(program) is None]
    return f"{', '.join(missing)} not found; apt-get install {PACKAGES}" if missing else ""


class RadosGateway:
    """One gateway with empty buckets. Use as a context manager."""

    def __init__(self, folder: Path, *, host: str = "127.0.0.1") -> None:
        """`host` is the address to listen on; `url` is on loopback, which 0.0.0.0 includes."""
        self._folder = folder
        self._host = host
        self.port = 0
        self._deadline = 0.0
        self._processes: list[subprocess.Popen[bytes]] = []
        self._logs: list[IO[bytes]] = []
        self.credentials_file = folder / "credentials"
        self.url = ""

    def __enter__(self) -> RadosGateway:
        self._deadline = time.monotonic() + _START_S
        try:
            self._write_configuration()
            self._start_monitor()
            self._start_osd()
            self._start_gateway()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end()

    def settings(self, *, endpoint_url: str = "") -> StoreSettings:
        """How to talk to it."""
        return StoreSettings(
            endpoint_url=endpoint_url or self.url,
            region="us-east-1",
            credentials_file=self.credentials_file,
        )

    def create_bucket(self, name: str) -> str:
        """Make a bucket and return its name."""
        date = formatdate(usegmt=True)
        # Signature version 2, which this gateway takes: one request needs no S3 library.
        signature = hmac.new(_KEYS[1].encode(), f"PUT\n\n\n{date}\n/{name}".encode(), hashlib.sha1).digest()
        headers = {"Date": date, "Authorization": f"AWS {_KEYS[0]}:{base64.b64encode(signature).decode()}"}
        request = urllib.request.Request(f"{self.url}/{name}", method="PUT", headers=headers)
        with urllib.request.urlopen(request, timeout=_START_S):
            return name

    def _write_configuration(self) -> None:
        for name in ("mon", "osd", "rgw"):
            (self._folder / name).mkdir()
        self._fsid = str(uuid.uuid4())
        v2, v1, self.port = free_port(), free_port(), free_port()
        self._addresses = f"[v2:127.0.0.1:{v2},v1:127.0.0.1:{v1}]"
        self.url = f"http://127.0.0.1:{self.port}"
        conf = _CONF.format(
            fsid=self._fsid,
            addresses=self._addresses,
            folder=self._folder,
            host=self._host,
            port=self.port,
        )
        (self._folder / "ceph.conf").write_text(conf)
        self.credentials_file.write_text(
            f"[default]\naws_access_key_id = {_KEYS[0]}\naws_secret_access_key = {_KEYS[1]}\n"
        )

    def _start_monitor(self) -> None:
        every = {"mon": "allow *", "osd": "allow *", "mgr": "allow *"}
        keys = {
            "mon.": {"mon": "allow *"},
            "client.admin": every,
            "client.rgw.a": {"mon": "allow rw", "osd": "allow rwx"},
            "osd.0": {"mon": "allow profile osd", "osd": "allow *"},
        }
        keyring, monmap = str(self._folder / "keyring"), str(self._folder / "monmap")
        self._run("ceph-authtool", "--create-keyring", keyring)
        for name, capabilities in keys.items():
            caps = [word for service, cap in capabilities.items() for word in ("--cap", service, cap)]
            self._run("ceph-authtool", keyring, "--gen-key", "-n", name, *caps)
        self._run("monmaptool", "--create", "--fsid", self._fsid, "--addv", "a", self._addresses, monmap)
        self._run("ceph-mon", "--mkfs", "-i", "a", "--monmap", monmap, "--keyring", keyring, conf=True)
        self._start("ceph-mon", "-i", "a", "-f")
        self._run("ceph", "--connect-timeout", str(int(_START_S)), "auth", "import", "-i", keyring, conf=True)

    def _start_osd(self) -> None:
        osd = str(uuid.uuid4())
        self._run("ceph", "osd", "new", osd, "0", conf=True)
        self._run("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", osd, conf=True)
        self._start("ceph-osd", "-i", "0", "-f")

    def _start_gateway(self) -> None:
        user = ("user", "create", "--uid", "test", "--display-name", "test")
        self._run(
            "radosgw-admin",
            "-n",
            "client.rgw.a",
            *user,
            "--access-key",
            _KEYS[0],
            "--secret-key",
            _KEYS[1],
            conf=True,
        )
        self._start("radosgw", "-n", "client.rgw.a", "-f")
        self._wait_until_it_answers()

    def _wait_until_it_answers(self) -> None:
        while True:
            try:
                with urllib.request.urlopen(self.url, timeout=5):
                    return
            except (urllib.error.URLError, OSError) as error:
                self._check(str(error))
            time.sleep(0.2)

    def _check(self, what: str) -> None:
        ended = [process.args for process in self._processes if process.poll() is not None]
        if ended or time.monotonic() > self._deadline:
            raise UnavailableError(
                f"no radosgw after its time: {what}; ended: {ended}; logs in {self._folder}"
            )

    def _command(self, words: Sequence[str]) -> list[str]:
        program, *rest = words
        return [program, "-c", str(self._folder / "ceph.conf"), *rest]

    def _run(self, *words: str, conf: bool = False) -> None:
        command = self._command(words) if conf else list(words)
        left = max(1.0, self._deadline - time.monotonic())
        line = dying_with_us(*command)
        done = subprocess.run(line, capture_output=True, timeout=left, cwd=self._folder, check=False)
        if done.returncode:
            raise UnavailableError(f"{command} ended with {done.returncode}: {done.stderr.decode()[-2000:]}")

    def _start(self, *words: str) -> None:
        log = (self._folder / f"{words[0]}.out").open("wb")
        self._logs.append(log)
        self._processes.append(
            subprocess.Popen(
                dying_with_us(*self._command(words)),
                stdout=log,
                stderr=log,
                cwd=self._folder,
                env=os.environ,
            )
        )

    def _end(self) -> None:
        for process in reversed(self._processes):
            process.kill()
            process.wait(timeout=20)
        for log in self._logs:
            log.close()


def version() -> str:
    """Name and version of what is installed, as in `radosgw 16.2.15`."""
    shown = subprocess.run(
        ["radosgw", "--version"], capture_output=True, text=True, timeout=60, check=True
    ).stdout
    return f"radosgw {shown.split()[2]}"
