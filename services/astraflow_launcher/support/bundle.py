"""The support bundle: all that a report about a run needs, in one archive.

Invariant: collecting changes nothing, asks each source once with a short deadline, and never fails because one
source is gone; weights are left out, tasks and trajectories in Redis are not. Made by `astraflow
support-bundle` and, for failing tests, by the hook in tests/conftest.py.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from google.protobuf.message import DecodeError

from astraflow import __version__
from astraflow.client import Client, Connection, RetryPolicy
from astraflow.commands.server import OPERATOR_TOKEN
from astraflow.commands.wording import as_json
from astraflow.dataflow.v1 import admin_service_pb2, run_service_pb2
from astraflow.errors import AstraflowError
from astraflow.weights.v1 import manifest_pb2
from astraflow_kit.lifecycle import read_address_file
from astraflow_kit.settings import load
from astraflow_launcher.run.embedded_redis import find_server
from astraflow_launcher.support.archive import Archive
from astraflow_weights.daemon_settings import StoreAccess
from astraflow_weights.store import open_store

if TYPE_CHECKING:
    from google.protobuf.message import Message

MAX_BINARY_BYTES = 256 * 2**20
_MAX_MANIFESTS = 100
"""As text; all of them are packed as they are."""
_REDIS_LOOKS = 5
_ANSWER_S = 5.0
_MAX_PAGE_BYTES = 16 * 2**20
_ONCE = RetryPolicy(total_s=0.0)
_TEXTS = frozenset({".log", ".jsonl", ".json", ".yaml", ".txt", ".py", ".err", ".out"})
_TEXT_NAMES = frozenset({"stderr", "stdout", "hits", "latest", "lock"})
# Weights and what is made from them: large, and the manifests name their digests.
_LEFT_OUT = frozenset({"parts", "assets", "cache", "checkpoints", "mirror", "published", "tokenizer"})
_VARIABLES = (
    *("ASTRAFLOW_", "AWS_", "CUDA_", "GLOO_", "HF_", "MASTER_", "NCCL_", "OMP_", "PYTHON", "RANK", "TORCH"),
    *("LOCAL_RANK", "WORLD_SIZE", "TOKENIZERS_"),
)
_ABOUT = {
    "run.json": "which run this is",
    "recipe.yaml": "the recipe with every default and override resolved",
    "metrics.jsonl": "one line per step, version and evaluation",
    "summary.json": "the summary of the run",
    "ledger.jsonl": "what the trainer trained on, step by step",
    "hits": "failpoints that were hit",
}


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Where to look. `folders` are run folders, or any folders with logs; the first names the run."""

    folders: tuple[Path, ...] = ()
    server: Connection | None = None
    """Dataflow server to ask, if there is one."""
    run_id: str = ""
    note: str = ""
    """What the maker of the bundle knows: a failed test's report."""


def save_bundle(evidence: Evidence, path: Path) -> list[str]:
    """Write the archive `path`, a .tar.gz; return what could not be had."""
    with Archive(path) as archive:
        if evidence.note:
            archive.add_text("note.txt", evidence.note, about="why this bundle was made")
        # What may be gone soon comes first.
        if evidence.server is not None:
            _add_server(archive, evidence.server, run_id=evidence.run_id)
        _add_machine(archive)
        for number, folder in enumerate(evidence.folders):
            prefix = "" if len(evidence.folders) == 1 else f"folder-{number + 1}/"
            _add_folder(archive, folder, prefix=prefix)
        _add_processes(archive, evidence.folders)
        return archive.missing


# -------------------------------------------------------------------- this machine


def _add_machine(archive: Archive) -> None:
    archive.add_json(
        "versions.json", versions(), about="versions of AstraFlow, Python, the kernel, Redis and packages"
    )
    chosen = {name: value for name, value in sorted(os.environ.items()) if name.startswith(_VARIABLES)}
    text = "".join(f"{name}={value}\n" for name, value in chosen.items())
    archive.add_text("environment.txt", text, about="environment variables that change behaviour")
    hits = chosen.get("ASTRAFLOW_FAILPOINTS_LOG")
    if hits:
        add = partial(archive.add_tail, "hits", Path(hits), about=_ABOUT["hits"])
        archive.attempt(f"failpoint hits {hits}", add, OSError)


def versions() -> dict[str, object]:
    """Versions of everything that takes part on this machine."""
    packages = {
        str(found.metadata["Name"]): found.version
        for found in importlib.metadata.distributions()
        if found.metadata["Name"]
    }
    return {
        "astraflow": __version__,
        "python": sys.version,
        "executable": sys.executable,
        "platform": platform.platform(),
        "kernel": platform.release(),
        "cpus": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "redis": _redis_version(),
        "collected": datetime.now(tz=UTC).isoformat(),
        "packages": dict(sorted(packages.items(), key=lambda item: item[0].lower())),
    }


def _redis_version() -> str:
    binary = find_server()
    if binary is None:
        return "no server found on this machine"
    done = subprocess.run(
        [str(binary), "--version"], capture_output=True, text=True, timeout=_ANSWER_S, check=False
    )
    return done.stdout.strip() or done.stderr.strip()


def _add_processes(archive: Archive, folders: tuple[Path, ...]) -> None:
    """List the living processes that name one of the folders: what hangs is still there."""
    roots = [str(folder.resolve()) for folder in folders]
    lines = []
    for process in psutil.process_iter():
        try:
            command = " ".join(process.cmdline())
            if process.pid == os.getpid() or not any(root in command for root in roots):
                continue
            times, memory = process.cpu_times(), process.memory_info().rss
            figures = f"{process.pid:>8} {process.ppid():>8} {process.status():<10} {times.user + times.system:8.1f}"
            lines.append(f"{figures} {memory // 2**20:6} {command}")
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    if lines:
        header = f"{'pid':>8} {'parent':>8} {'state':<10} {'cpu s':>8} {'MiB':>6} command"
        archive.add_text("processes.txt", "\n".join([header, *lines, ""]), about="the run's processes now")


# -------------------------------------------------------------------- a run's folder


def _add_folder(archive: Archive, folder: Path, *, prefix: str) -> None:
    listing, binary_bytes = [], 0
    for data in sorted(folder.rglob("appendonlydir")):
        archive.attempt(f"Redis' data in {data}", partial(_add_redis, archive, folder, data, prefix), OSError)
    for path in _files(folder):
        name = path.relative_to(folder)
        try:
            facts = path.stat()
        except FileNotFoundError:
            continue  # the run goes on meanwhile
        written = datetime.fromtimestamp(facts.st_mtime, tz=UTC).isoformat(timespec="milliseconds")
        listing.append(f"{facts.st_size:>12} {written} {name}")
        kind = _kind(name)
        if kind is None:
            continue
        if kind == "binary":
            binary_bytes += facts.st_size
            if binary_bytes > MAX_BINARY_BYTES:
                archive.missing.append(
                    f"{name}: {facts.st_size} bytes, beyond the limit of {MAX_BINARY_BYTES} in all"
                )
                continue
        archive.attempt(str(name), _adder(archive, f"{prefix}{name}", path, kind), OSError)
    archive.add_text(
        f"{prefix}files.txt", "\n".join([*listing, ""]), about="every file of the folder: bytes, time, name"
    )
    _add_manifests(archive, folder, prefix=prefix)
    _add_pages(archive, folder, prefix=prefix)


def _add_redis(archive: Archive, folder: Path, data: Path, prefix: str) -> None:
    """Add Redis' append-only files as they were at one moment: a rewrite in between replaces them, so look again."""
    for _ in range(_REDIS_LOOKS):
        try:
            before = sorted(data.iterdir())
            size = sum(path.stat().st_size for path in before)
            if size > MAX_BINARY_BYTES:
                raise OSError(f"{size} bytes, beyond the limit of {MAX_BINARY_BYTES}")
            contents = {path: path.read_bytes() for path in before}
        except FileNotFoundError:
            continue
        if sorted(data.iterdir()) == before:
            break
    else:
        raise OSError(f"it was rewritten during each of {_REDIS_LOOKS} attempts")
    for path, content in contents.items():
        archive.add_bytes(f"{prefix}{path.relative_to(folder)}", content, about=_about(path))


def _files(folder: Path) -> Iterator[Path]:
    if not folder.is_dir():
        return
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.is_symlink():
            yield path


def _kind(name: Path) -> str | None:
    """How a file is packed: as the end of a text, as it is, or not at all."""
    if name.suffix == ".pb" and name.parent.name == "seq":
        return "binary"
    if "appendonlydir" in name.parts:
        return None  # packed together, as of one moment
    if name.suffix == ".rdb":
        return "binary"
    if _LEFT_OUT & set(name.parts[:-1]):
        return None
    return "text" if name.suffix in _TEXTS or name.name in _TEXT_NAMES else None


def _adder(archive: Archive, entry: str, path: Path, kind: str) -> Callable[[], None]:
    about = _about(path)
    if kind == "text":
        return lambda: archive.add_tail(entry, path, about=about)
    return lambda: archive.add_bytes(entry, path.read_bytes(), about=about)


def _about(path: Path) -> str:
    if "appendonlydir" in path.parts or path.suffix == ".rdb":
        return "Redis' data: `valkey-server --dir redis --appendonly yes` opens it"
    if path.parent.name == "seq":
        return "a manifest of the weight store; manifests.json has it as text"
    if path.suffix == ".log":
        return f"log of {path.stem}"
    return _ABOUT.get(path.name, "")


def _add_manifests(archive: Archive, folder: Path, *, prefix: str) -> None:
    """Add the store's manifests as text: one object per entry, by key."""
    newest = sorted(folder.rglob("seq/*.pb"))[-_MAX_MANIFESTS:]
    entries = {str(path.relative_to(folder)): _manifest(path.read_bytes()) for path in newest}
    if entries:
        archive.add_json(f"{prefix}manifests.json", entries, about="the weight store's manifests as text")


def _add_pages(archive: Archive, folder: Path, *, prefix: str) -> None:
    """Add what the living daemons of the folder answer over HTTP."""
    for file in sorted((folder / "addresses").glob("*.json")):
        published = read_address_file(file)
        if published is None or not published.http or not psutil.pid_exists(published.pid):
            archive.missing.append(f"pages of {file.stem}: it has ended")
            continue
        for page in ("metrics", "status"):
            entry, url = f"{prefix}pages/{file.stem}.{page}.txt", f"http://{published.http}/{page}"
            add = partial(_add_page, archive, entry, url, token=folder / OPERATOR_TOKEN)
            archive.attempt(f"{page} of {file.stem}", add, OSError)


def _add_page(archive: Archive, name: str, url: str, *, token: Path) -> None:
    request = urllib.request.Request(url)
    if token.exists():
        request.add_header("Authorization", f"Bearer {token.read_text().strip()}")
    with urllib.request.urlopen(request, timeout=_ANSWER_S) as answer:
        content: bytes = answer.read(_MAX_PAGE_BYTES)
    archive.add_text(name, content.decode(errors="replace"), about=url)


# -------------------------------------------------------------------- the server


def _add_server(archive: Archive, server: Connection, *, run_id: str) -> None:
    with Client(server, retry=_ONCE) as client:
        for name, ask in _questions(client, run_id).items():
            add = partial(_add_answer, archive, name, ask, address=server.address)
            archive.attempt(f"{name} of {server.address}", add, AstraflowError)
        archive.attempt("the weight store", partial(_add_store, archive, client, run_id), AstraflowError)


def _add_store(archive: Archive, client: Client, run_id: str) -> None:
    """Add what an object store elsewhere holds: the names of all objects, and its newest manifests as text."""
    asked = run_service_pb2.GetRunRequest(run_id=run_id)
    run = client.call(client.runs.GetRun, asked, timeout_s=_ANSWER_S).run
    if run.store_uri.startswith("file:"):
        return  # the run's folder has it
    settings = load(StoreAccess).store.model_copy(update={"max_attempts": 2, "read_timeout_s": _ANSWER_S})
    store = open_store(run.store_uri, settings=settings)
    objects = list(store.list(f"{run.run_id}/"))
    listing = "".join(f"{item.size_bytes:>12} {item.key}\n" for item in objects)
    archive.add_text(
        "store/objects.txt", listing, about=f"every object of the run in {run.store_uri}: bytes, name"
    )
    keys = [item.key for item in objects if "/seq/" in item.key]
    entries = {key: _manifest(store.get(key)) for key in keys[-_MAX_MANIFESTS:]}
    archive.add_json("store/manifests.json", entries, about="its newest manifests as text")


def _manifest(content: bytes) -> Mapping[str, object]:
    """A manifest as JSON; what is none is said in its place."""
    try:
        return as_json(manifest_pb2.Entry.FromString(content))
    except DecodeError as error:
        return {"damaged": str(error), "bytes": len(content)}


def _add_answer(archive: Archive, name: str, ask: Callable[[], Message], *, address: str) -> None:
    archive.add_json(f"server/{name}.json", as_json(ask()), about=f"what {address} answered")


def _questions(client: Client, run_id: str) -> Mapping[str, Callable[[], Message]]:
    admin, pb = client.admin, admin_service_pb2
    letters = pb.ListDeadLettersRequest(run_id=run_id, page_size=500, include_tasks=True)

    def asking(method: Any, request: Message) -> Callable[[], Message]:  # noqa: ANN401 - a stub's method
        return partial(client.call, method, request, timeout_s=_ANSWER_S)

    return {
        "status": asking(admin.Status, pb.StatusRequest(run_id=run_id)),
        "why": asking(admin.Why, pb.WhyRequest(run_id=run_id)),
        "nodes": asking(admin.ListNodes, pb.ListNodesRequest(run_id=run_id)),
        "dead_letters": asking(admin.ListDeadLetters, letters),
        "run": asking(client.runs.GetRun, run_service_pb2.GetRunRequest(run_id=run_id)),
    }
