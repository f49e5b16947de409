"""Parquet files in an object store: written whole, read by ranges.

Invariant: the same table always becomes the same bytes under the same release. Called by `archive`.
"""

import io
from collections.abc import Sequence

import pyarrow as pa
import pyarrow.parquet as pq

from astraflow_weights.store import ObjectStore

ROWS_PER_GROUP = 128
"""Rows that are read together: those of one answer are in one or a few groups."""


def encoded(table: pa.Table, *, use_dictionary: bool = True) -> bytes:
    """The file of a table; a dictionary of values makes columns larger in which few values repeat."""
    sink = io.BytesIO()
    pq.write_table(
        table, sink, compression="zstd", row_group_size=ROWS_PER_GROUP, use_dictionary=use_dictionary
    )
    return sink.getvalue()


class ParquetObject:
    """A Parquet file in a store. Each read asks the store; raises ObjectNotFound and what a store raises."""

    def __init__(self, store: ObjectStore, key: str) -> None:
        self._file = pq.ParquetFile(
            pa.PythonFile(_Ranges(store, key, store.head(key).size_bytes), mode="r"), pre_buffer=True
        )

    @property
    def num_rows(self) -> int:
        """Rows of the file."""
        return int(self._file.metadata.num_rows)

    def table(self, columns: Sequence[str]) -> pa.Table:
        """These columns of all rows."""
        return self._file.read(columns=list(columns), use_threads=False)

    def group_of(self, row: int) -> tuple[pa.Table, int]:
        """All columns of the group that the row is in, and the row's position there."""
        number, position = divmod(row, ROWS_PER_GROUP)
        return self._file.read_row_group(number, use_threads=False), position


class _Ranges(io.RawIOBase):
    """An object as a file that pyarrow reads from."""

    def __init__(self, store: ObjectStore, key: str, size: int) -> None:
        self._store, self._key, self._size, self._position = store, key, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = offset + (0, self._position, self._size)[whence]
        return self._position

    def read(self, size: int = -1, /) -> bytes:
        wanted = self._size - self._position if size < 0 else size
        read = self._store.get_range(self._key, start=self._position, length=wanted)
        self._position += len(read)
        return read
