"""The work folder on its way from the sandbox of the policy into that of the tests.

Invariant: folders, plain files with their bits of permission, and links that stay in the work folder or lead into the
machine's own folders arrive; nothing else does: no device, socket, set-uid bit or link to the tests. Who reads relies
on nothing that who wrote says. Standard library only: both ends run within sandboxes.
"""

import json
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath

_CHUNK = 2**16
_BITS = 0o777
_MAX_LINKS = 40


def packed(folder: Path) -> Iterator[bytes]:
    """What is in the folder: a frame for each thing, and after that of a file those of its content. Raises OSError."""
    for place, names, files in os.walk(folder, onerror=_fail):
        for name in names + files:
            path = Path(place, name)
            found = path.lstat()
            where = path.relative_to(folder).as_posix()
            bits = stat.S_IMODE(found.st_mode) & _BITS
            if stat.S_ISLNK(found.st_mode):
                yield _head(where, "link", target=str(path.readlink()))
            elif stat.S_ISDIR(found.st_mode):
                path.chmod(bits | 0o700)  # it is about to be read
                yield _head(where, "folder", bits=bits)
            elif stat.S_ISREG(found.st_mode):
                path.chmod(bits | 0o400)
                yield _head(where, "file", bits=bits, size=found.st_size)
                yield from _content(path, found.st_size)


def unpack(folder: Path, frames: Iterator[bytes], *, system: Sequence[str]) -> None:
    """Make it anew in an empty folder; `system` are folders that links may lead to. Raises OSError, ValueError."""
    links, folders = dict[Path, str](), list[tuple[Path, int]]()
    for head in frames:
        entry = json.loads(head)
        path = _below(folder, entry["path"])
        match entry["kind"]:
            case "link":
                links[path] = entry["target"]
            case "folder":
                path.mkdir()
                folders.append((path, entry["bits"]))
            case "file":
                _write(path, entry["size"], frames)
                path.chmod(entry["bits"] & _BITS)
    _link(links, [PurePosixPath(each) for each in (str(folder), *system)])
    for path, bits in reversed(folders):
        path.chmod(bits & _BITS)


def _link(links: Mapping[Path, str], allowed: Sequence[PurePosixPath]) -> None:
    """Make all links, for one may lead through another, and take away those that lead elsewhere."""
    for path, target in links.items():
        if path.parent.resolve() != path.parent:
            raise ValueError(f"{str(path)[:100]!r} lies in a link")
        path.symlink_to(target)
    for path in [path for path in links if not _stays(path, allowed)]:
        path.unlink()


def _below(folder: Path, name: str) -> Path:
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or ".." in parts:
        raise ValueError(f"{name[:100]!r} is no path in the work folder")
    return folder.joinpath(*parts)


def _stays(link: Path, allowed: Sequence[PurePosixPath]) -> bool:
    """Whether the link ends in one of the `allowed` folders, and passes through nothing else on its way."""
    at, left, links = PurePosixPath(link.parent), [link.name], 0
    while left:
        name = left.pop(0)
        at = at.parent if name == ".." else at / name
        if Path(at).is_symlink():
            links += 1
            target = PurePosixPath(Path(at).readlink())
            left = [*target.parts[target.is_absolute() :], *left]
            at = PurePosixPath("/") if target.is_absolute() else at.parent
        elif not any(at.is_relative_to(each) or each.is_relative_to(at) for each in allowed):
            return False
        if links > _MAX_LINKS:
            return False
    return any(at.is_relative_to(each) for each in allowed)


def _head(path: str, kind: str, **about: str | int) -> bytes:
    return json.dumps({"path": path, "kind": kind, **about}).encode()


def _content(path: Path, size: int) -> Iterator[bytes]:
    with path.open("rb") as file:
        while size:
            if not (chunk := file.read(min(size, _CHUNK))):
                raise OSError(f"{path} shrank while it was read")
            size -= len(chunk)
            yield chunk


def _write(path: Path, size: int, frames: Iterator[bytes]) -> None:
    with path.open("xb") as file:
        while size > 0:
            chunk = next(frames, b"")
            size -= len(chunk) or size + 1  # nothing more comes
            file.write(chunk)
    if size:
        raise ValueError(f"the content of {path} is not as long as was said")


def _fail(error: OSError) -> None:
    raise error
