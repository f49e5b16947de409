"""Samples as a Parquet file. Needs the extra `archive`.

Called by `astraflow samples export` and by the dashboard.
"""

import io
from collections.abc import Sequence
from typing import Any

from astraflow.errors import InvalidArgumentError

_FLAT = ("trajectory_id", "task_id", "role", "source", "member", "turn", "reward", "group_id")


def parquet(samples: Sequence[dict[str, Any]]) -> bytes:
    """Return a file with a row for each of these `sample_values`. Raises InvalidArgumentError without pyarrow."""
    try:
        import pyarrow as pa
        from pyarrow import parquet as files
    except ModuleNotFoundError as error:
        raise InvalidArgumentError(
            "Parquet is written with pyarrow, which is not installed; run: pip install 'astraflow[archive]', "
            "or export jsonl"
        ) from error
    file = io.BytesIO()
    files.write_table(pa.Table.from_pylist([_row(sample) for sample in samples]), file, compression="zstd")
    return file.getvalue()


def _row(sample: dict[str, Any]) -> dict[str, Any]:
    """The item's fields beside the sample's, the text as one string."""
    flat = {name: value for name, value in sample.items() if name != "item"}
    flat |= {name: sample["item"][name] for name in _FLAT if name in sample["item"]}
    flat["text"] = None if sample["texts"] is None else "".join(sample["texts"])
    flat["version_spans"] = [list(span) for span in sample["version_spans"]]
    return flat
