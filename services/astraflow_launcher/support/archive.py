"""An archive of evidence: files and texts under one folder, with an index that says what each is and what is missing.

Invariant: no secret that can be recognised is written in a text; every entry is bounded; a source that cannot
be read is named in the index instead of failing the rest. `support_bundle` fills it.
"""

import io
import json
import re
import tarfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

from astraflow_kit.log import REDACTED, without_secrets

MAX_TEXT_BYTES = 4 * 2**20
"""The end of a text is kept up to this size."""
_LISTED_ONE_BY_ONE = 4
_NAMES = "token|secret|passw(?:or)?d|authorization|signature|cookie|(?:api|secret|access)[_-]?key(?:[_-]?id)?"
_ASSIGNED = re.compile(rf"((?:\b|[_-])(?:{_NAMES})[\"']?\s*[:=]\s*[\"']?)(?!\*\*\*)[^\s\"',;&}}]+", re.I)
_URL_USER = re.compile(r"(://)[^/\s@:]+@", re.I)
PATTERNS = (_ASSIGNED, _URL_USER)


def redacted(text: str) -> str:
    """Return `text` without tokens, passwords, keys and credentials inside URLs."""
    return _ASSIGNED.sub(rf"\1{REDACTED}", _URL_USER.sub(rf"\1{REDACTED}@", without_secrets(text)))


class Archive:
    """A .tar.gz being written; it appears under its name when the block ends without an error."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.missing: list[str] = []
        """What could not be had, and why."""
        self._folder = path.name.removesuffix(".tar.gz")
        self._draft = path.with_name(f".{path.name}.part")
        self._entries: list[tuple[str, str]] = []
        self._tar: tarfile.TarFile | None = None

    def __enter__(self) -> Self:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._tar = tarfile.open(self._draft, "w:gz", compresslevel=6)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._tar is None:
            return
        if kind is None:
            self._write("README.txt", self._index().encode())
        self._tar.close()
        if kind is None:
            self._draft.replace(self.path)
        else:
            self._draft.unlink(missing_ok=True)

    def add_text(self, name: str, text: str, *, about: str) -> None:
        """Add a text without its secrets."""
        self._add(name, redacted(text).encode(), about)

    def add_json(self, name: str, value: object, *, about: str) -> None:
        """Add a value as JSON without its secrets."""
        self.add_text(name, json.dumps(value, indent=2, ensure_ascii=False, default=str) + "\n", about=about)

    def add_tail(self, name: str, path: Path, *, about: str, limit_bytes: int = MAX_TEXT_BYTES) -> None:
        """Add the end of a text file, whole lines only, without its secrets."""
        size = path.stat().st_size
        with path.open("rb") as file:
            file.seek(max(0, size - limit_bytes))
            content = file.read(limit_bytes)
        if size > limit_bytes:
            left_out = size - limit_bytes + content.find(b"\n") + 1
            content = f"… the first {left_out} bytes are left out\n".encode() + content.partition(b"\n")[2]
        self._add(name, redacted(content.decode(errors="replace")).encode(), about)

    def add_bytes(self, name: str, content: bytes, *, about: str) -> None:
        """Add bytes as they are."""
        self._add(name, content, about)

    def attempt(self, what: str, add: Callable[[], None], *failures: type[Exception]) -> None:
        """Run `add`; when it fails with one of `failures`, note that `what` is missing and why."""
        try:
            add()
        except failures as error:
            self.missing.append(redacted(f"{what}: {error}"))

    def _add(self, name: str, content: bytes, about: str) -> None:
        self._write(name, content)
        self._entries.append((name, about))

    def _write(self, name: str, content: bytes) -> None:
        if self._tar is None:
            raise RuntimeError("open the archive before adding to it")
        entry = tarfile.TarInfo(f"{self._folder}/{name}")
        entry.size, entry.mtime, entry.mode = len(content), int(time.time()), 0o644
        self._tar.addfile(entry, io.BytesIO(content))

    def _index(self) -> str:
        lines = _grouped(self._entries)
        width = max((len(name) for name, _ in lines), default=0)
        gaps = [f"- {gap}" for gap in self.missing] or ["- nothing"]
        return "\n".join(
            [
                "Files of an AstraFlow run, collected for a bug report.",
                "Tokens, passwords and keys are blanked in texts; recognisable ones only, so look before you share it.",
                "docs/debugging.md leads from symptoms to causes.\n",
                *(f"{name:<{width}}  {about}".rstrip() for name, about in lines),
                "\nNot in here:",
                *gaps,
                "",
            ]
        )


def _grouped(entries: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """One line for the many files of a folder that are all the same thing."""
    folders: dict[tuple[str, str], list[str]] = {}
    for name, about in entries:
        folders.setdefault((name.rpartition("/")[0], about), []).append(name)
    lines = []
    for (folder, about), names in folders.items():
        if about and len(names) > _LISTED_ONE_BY_ONE:
            lines.append((f"{folder}/ ({len(names)} files)", f"each: {about}"))
        else:
            lines += [(name, about) for name in names]
    return lines
