"""The digests of a version's tensors as its log entry says them: all, or those that another entry does not have.

Invariant: an entry with references is as provable as one without. What it refers to is named by sha256 under its own
seal, and the digests that come of it must make the model root. No table refers to one that refers on, so a reader needs
one other entry at most. `manifest` puts tables into entries, `following` follows them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from astraflow.weights.v1 import manifest_pb2
from astraflow_weights.codec.digest import SHA256_BYTES, TENSOR_DIGEST_BYTES


@dataclass(frozen=True, kw_only=True)
class KeyRef:
    """An older manifest of the same log that has all digests, by its number and its sha256."""

    sequence: int
    sha256: bytes


@dataclass(frozen=True, kw_only=True)
class KeyTable:
    """A key manifest's digests, and how it is referred to."""

    ref: KeyRef
    schema_sha256: bytes
    digests: tuple[bytes, ...]


@dataclass(frozen=True, kw_only=True)
class DigestTable:
    """Digests, in order of their tensors: with a key those of the tensors in `numbers`, else all."""

    key: KeyRef | None
    numbers: tuple[int, ...]
    digests: tuple[bytes, ...]

    @classmethod
    def of(cls, digests: Sequence[bytes], *, key: KeyTable | None) -> "DigestTable":
        """Refers to `key` when half of the digests at least are there."""
        if key is not None and len(key.digests) == len(digests):
            pairs = zip(digests, key.digests, strict=True)
            numbers = tuple(number for number, (ours, theirs) in enumerate(pairs) if ours != theirs)
            if 2 * len(numbers) <= len(digests):
                changed = tuple(digests[number] for number in numbers)
                return cls(key=key.ref, numbers=numbers, digests=changed)
        return cls(key=None, numbers=(), digests=tuple(digests))

    def digests_of(self, num_tensors: int, *, key_digests: Sequence[bytes] | None) -> list[bytes]:
        """Digests of all tensors. Raises ValueError when table, key and number of tensors do not belong together."""
        if self.key is None:
            found = list(self.digests)
        else:
            found = list(key_digests or ())
            if self.numbers and self.numbers[-1] >= len(found):
                raise ValueError(f"it has a digest of tensor {self.numbers[-1]} of {len(found)}")
            for number, digest in zip(self.numbers, self.digests, strict=True):
                found[number] = digest
        if len(found) != num_tensors:
            raise ValueError(f"there are {len(found)} digests of {num_tensors} tensors")
        return found


def table_message(table: DigestTable) -> manifest_pb2.DigestTable:
    """The table for an entry."""
    before = (-1, *table.numbers)
    message = manifest_pb2.DigestTable(
        skipped_tensors=[number - last - 1 for number, last in zip(table.numbers, before, strict=False)],
        digests=b"".join(table.digests),
    )
    if table.key is not None:
        message.key.sequence, message.key.sha256 = table.key.sequence, table.key.sha256
    return message


def read_table(message: manifest_pb2.DigestTable) -> DigestTable:
    """The table in an entry. Raises ValueError for one that is not whole."""
    size = TENSOR_DIGEST_BYTES
    if len(message.digests) % size:
        raise ValueError(f"{len(message.digests)} bytes are no digests of {size} bytes each")
    digests = tuple(message.digests[start : start + size] for start in range(0, len(message.digests), size))
    if not message.HasField("key"):
        if message.skipped_tensors or not digests:
            raise ValueError("a table without a key manifest has a digest of every tensor, and skips none")
        return DigestTable(key=None, numbers=(), digests=digests)
    if len(message.key.sha256) != SHA256_BYTES or len(message.skipped_tensors) != len(digests):
        raise ValueError(
            f"{len(digests)} digests of {len(message.skipped_tensors)} tensors by a key manifest"
        )
    numbers, last = [], -1
    for skipped in message.skipped_tensors:
        last += skipped + 1
        numbers.append(last)
    key = KeyRef(sequence=message.key.sequence, sha256=message.key.sha256)
    return DigestTable(key=key, numbers=tuple(numbers), digests=digests)
