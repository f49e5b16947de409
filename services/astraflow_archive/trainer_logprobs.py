"""What trainers made of the tokens that they trained on: Parquet files of each step, beside the run's samples.

Invariant: a file is created once, under a name that follows from the trajectories in it, so a step that is replayed
adds none. Trainers write (`logprob_writer`), each rank for its rows; `archive` reads. Blocking.
"""

import hashlib
from collections.abc import Mapping, Sequence
from itertools import islice

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from astraflow.dataflow.v1.sample_pb2 import Sample
from astraflow_archive.columns import flat, lists
from astraflow_archive.layout import SCHEMA_VERSION, logprobs_prefix
from astraflow_archive.parquet_files import ParquetObject, encoded
from astraflow_weights.errors import ObjectNotFound
from astraflow_weights.store import ObjectStore

MAX_FILES_PER_STEP = 1024
"""That are read: one of each rank."""
_SCHEMA = pa.schema(
    [("trajectory_id", pa.string()), ("logprobs", pa.list_(pa.float32()))],
    metadata={"astraflow.archive": str(SCHEMA_VERSION)},
)


def write(
    store: ObjectStore, run_id: str, *, policy_id: str, step: int, logprobs: Mapping[str, NDArray[np.float32]]
) -> None:
    """Write float32[T] of each trajectory, NaN where it was not trained on."""
    ids = sorted(logprobs)
    columns = [pa.array(ids, pa.string()), lists([logprobs[name] for name in ids], np.dtype(np.float32))]
    name = hashlib.sha256("\n".join(ids).encode()).hexdigest()[:32]
    key = f"{logprobs_prefix(run_id, policy_id=policy_id, step=step)}{name}.parquet"
    table = pa.Table.from_arrays(columns, schema=_SCHEMA)
    store.put_if_absent(key, encoded(table, use_dictionary=False))


class TrainerLogprobs:
    """Those of one run. What it found out about the files of a step holds for one answer."""

    def __init__(self, store: ObjectStore, run_id: str) -> None:
        self._store, self._run_id = store, run_id
        self._files: dict[tuple[str, int], Sequence[tuple[ParquetObject, Mapping[str, int]]]] = {}

    def of(self, sample: Sample) -> bytes:
        """float32[T] of its tokens, little-endian; empty where nothing was written, or not any more."""
        if not sample.batch_id:
            return b""
        step = (sample.policy_id, sample.step)
        try:
            if step not in self._files:
                self._files[step] = self._of_step(*step)
            for file, rows in self._files[step]:
                if (row := rows.get(sample.item.trajectory_id)) is not None:
                    table, position = file.group_of(row)
                    return bytes(flat(table.column("logprobs")[position], "<f4").tobytes())
        except ObjectNotFound:
            pass  # collected since it was listed
        return b""

    def _of_step(self, policy_id: str, step: int) -> list[tuple[ParquetObject, Mapping[str, int]]]:
        """Each file, with the row of each trajectory in it."""
        found: list[tuple[ParquetObject, Mapping[str, int]]] = []
        listed = self._store.list(logprobs_prefix(self._run_id, policy_id=policy_id, step=step))
        for info in islice(listed, MAX_FILES_PER_STEP):
            file = ParquetObject(self._store, info.key)
            ids = file.table(["trajectory_id"]).column(0).to_pylist()
            found.append((file, {trajectory_id: row for row, trajectory_id in enumerate(ids)}))
        return found
