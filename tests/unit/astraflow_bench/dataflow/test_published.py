"""The published system's buffer serves the oldest first, padded, and sleeps after every eight samples."""

import time

import numpy as np

from astraflow_bench.dataflow.published import PublishedBuffer


def test_the_oldest_come_first_padded_to_the_longest() -> None:
    buffer = PublishedBuffer()
    for version, length in ((3, 5), (1, 2), (2, 4)):
        buffer.add(np.full(length, version, np.int32), np.full(length, -version, np.float32), version=version)
    tokens, logprobs = buffer.batch(2)
    assert tokens.tolist() == [[1, 1, 0, 0], [2, 2, 2, 2]]
    assert logprobs.tolist() == [[-1, -1, 0, 0], [-2, -2, -2, -2]]


def test_it_sleeps_after_every_eight_samples() -> None:
    buffer = PublishedBuffer()
    for _ in range(17):
        buffer.add(np.zeros(1, np.int32), np.zeros(1, np.float32), version=0)
    began_s = time.monotonic()
    buffer.batch(17)
    assert time.monotonic() - began_s >= 0.1
