"""Samples as columns of a Parquet table, and back.

Invariant: what a trajectory's body held comes back exactly, log-probs as float32; nothing is re-tokenised or rounded.
Columns that say what a sample is come first, so that a reader of these alone reads one short range of a file. Pure;
called by `archive` and `trainer_logprobs`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from astraflow.columns import decode_columns, pack_mask
from astraflow.dataflow.v1.batch_pb2 import BatchItem
from astraflow.dataflow.v1.sample_pb2 import Sample
from astraflow.rollout.v1.trajectory_pb2 import LOGPROB_DTYPE_F32, Trajectory, TurnSpan, VersionSpan
from astraflow_archive.layout import SCHEMA_VERSION, Place

_VERSION_SPAN = pa.struct(
    [("start", pa.int32()), ("end", pa.int32()), ("version", pa.int64()), ("recomputed", pa.bool_())]
)
_TURN_SPAN = pa.struct(
    [("start", pa.int32()), ("end", pa.int32()), ("role", pa.string()), ("reward", pa.float64())]
)
_OF_ITEM = {
    "trajectory_id": pa.string(),
    "group_id": pa.string(),
    "task_id": pa.string(),
    "role": pa.string(),
    "source": pa.string(),
    "member": pa.int32(),
    "turn": pa.int32(),
    "reward": pa.float64(),
    "num_tokens": pa.int32(),
    "num_trainable_tokens": pa.int32(),
    "min_version": pa.int64(),
    "max_version": pa.int64(),
    "truncated": pa.bool_(),
}
SUMMARY = pa.schema(
    [
        *_OF_ITEM.items(),
        ("reason", pa.string()),
        ("batch_id", pa.string()),
        ("episode_id", pa.string()),
        ("end_time", pa.timestamp("ms", tz="UTC")),
    ]
)
"""What a sample is, without its tokens. Policy and step are in the name of its folder."""
SCHEMA = pa.schema(
    [
        *SUMMARY,
        ("token_ids", pa.list_(pa.int32())),
        ("logprobs", pa.list_(pa.float32())),
        ("loss_mask", pa.list_(pa.bool_())),
        ("version_spans", pa.list_(_VERSION_SPAN)),
        ("turn_spans", pa.list_(_TURN_SPAN)),
        ("rest", pa.binary()),
    ],
    metadata={"astraflow.archive": str(SCHEMA_VERSION)},
)
"""All columns; `rest` is what the `Trajectory` held besides, serialized: sampling, media, expert routing."""


@dataclass(frozen=True)
class Row:
    """One sample with the body of its trajectory, as it was pushed."""

    sample: Sample
    body: bytes


def table_of(rows: Sequence[Row]) -> pa.Table:
    """Return the table of these rows."""
    messages = [Trajectory.FromString(row.body) for row in rows]
    columns = [decode_columns(message) for message in messages]
    samples = [row.sample for row in rows]
    of_item = {name: [getattr(sample.item, name) for sample in samples] for name in _OF_ITEM}
    arrays: list[Any] = [pa.array(of_item[name], kind) for name, kind in _OF_ITEM.items()]
    arrays += [
        pa.array([sample.reason for sample in samples], pa.string()),
        pa.array([sample.batch_id for sample in samples], pa.string()),
        pa.array([sample.episode_id for sample in samples], pa.string()),
        pa.array([sample.end_time.ToMilliseconds() for sample in samples], pa.timestamp("ms", tz="UTC")),
        lists([column.token_ids for column in columns], np.dtype(np.int32)),
        lists([column.logprobs for column in columns], np.dtype(np.float32)),
        lists([column.loss_mask for column in columns], np.dtype(np.bool_)),
        _spans([message.version_spans for message in messages], _VERSION_SPAN),
        _spans([message.turn_spans for message in messages], _TURN_SPAN),
        pa.array([_rest(message) for message in messages], pa.binary()),
    ]
    return pa.Table.from_arrays(arrays, schema=SCHEMA)


def lists(values: Sequence[Any], dtype: np.dtype[Any]) -> pa.ListArray:
    """A column of lists, made of numpy arrays without a loop over their elements."""
    offsets = np.cumsum([0, *map(len, values)], dtype=np.int32)
    flat = np.concatenate(values).astype(dtype, copy=False) if values else np.zeros(0, dtype)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(flat))


def samples_in(table: pa.Table, place: Place, *, first_row: int = 0) -> Iterator[Sample]:
    """The samples of a table with the columns of `SUMMARY`, whose first row is row `first_row` of its file."""
    for number, row in enumerate(table.select(SUMMARY.names).to_pylist(), start=first_row):
        sample = Sample(
            sample_id=place.sample_id(number),
            policy_id=place.policy_id,
            step=place.step,
            reason=row["reason"],
            batch_id=row["batch_id"],
            episode_id=row["episode_id"],
            item=BatchItem(**{name: row[name] for name in _OF_ITEM}),
        )
        sample.end_time.FromDatetime(row["end_time"])
        yield sample


def trajectory_in(table: pa.Table, row: int) -> Trajectory:
    """The trajectory of one row of a table with all columns."""

    def column(name: str) -> Any:  # noqa: ANN401 - pyarrow has no types
        return table.column(name)[row]

    message = Trajectory.FromString(column("rest").as_py())
    message.token_ids = flat(column("token_ids"), "<i4").tobytes()
    message.logprobs = flat(column("logprobs"), "<f4").tobytes()
    message.logprob_dtype = LOGPROB_DTYPE_F32
    message.loss_mask = pack_mask(flat(column("loss_mask"), "?"))
    message.version_spans.extend(VersionSpan(**span) for span in column("version_spans").as_py())
    message.turn_spans.extend(TurnSpan(**span) for span in column("turn_spans").as_py())
    return message


def flat(value: Any, dtype: str) -> Any:  # noqa: ANN401
    """The numpy array of one list of a column."""
    return value.values.to_numpy(zero_copy_only=False).astype(dtype, copy=False)


def _rest(message: Trajectory) -> bytes:
    rest = Trajectory()
    rest.CopyFrom(message)
    for name in ("token_ids", "logprob_dtype", "logprobs", "loss_mask", "version_spans", "turn_spans"):
        rest.ClearField(name)
    return rest.SerializeToString(deterministic=True)


def _spans(values: Sequence[Sequence[Any]], kind: pa.StructType) -> pa.Array:
    names = [field.name for field in kind]
    dicts = [[{name: getattr(span, name) for name in names} for span in spans] for spans in values]
    return pa.array(dicts, pa.list_(kind))
