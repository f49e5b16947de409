"""The archive of a run: what was trained on and what was dropped, as Parquet files in the run's store.

Invariant: a file is created once, under a name that follows from what it holds, so writing it again after a crash adds
no row. The dataflow server writes and reads it (`archive`), trainers add what they made of tokens (`logprob_writer`);
all with the extra `archive`.
docs/archive.md has layout and columns.
"""
