"""The same batch moved by Ray's object store, and by TransferQueue over Ray, which verl has.

`python -m` this module is the program that moves it: Ray starts daemons and workers, and they end with it. One process
puts a batch, group by group, and another takes all of it. Invariant: arrays as long as our payloads' tokens and
log-probs; each is measured where it is installed, and named where it is not. Called by `pushing`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import numpy as np

from astraflow_bench.dataflow.sizes import GROUP
from astraflow_bench.figures import Figure
from astraflow_kit.parent import dying_with_us, python

_PACKAGES = {"Ray's object store": ("ray", "ray"), "TransferQueue": ("transfer_queue", "TransferQueue")}
"""Whose figure: the module that it needs, and the package that brings it."""
_REPEATS = 3
_MOST_S = 300
_PLACES = 8
"""Processors that Ray believes in: each worker of TransferQueue wants one to itself."""


def measure_peers(*, count: int, tokens: int) -> list[Figure]:
    """Milliseconds to put and to take `count` trajectories of so many tokens; the best of several."""
    return [figure for peer in _PACKAGES for figure in _figures(peer, count=count, tokens=tokens)]


def _figures(peer: str, *, count: int, tokens: int) -> list[Figure]:
    module, package = _PACKAGES[peer]
    row = partial(Figure, what=f"batch of {count} × 2k", subject=peer)
    if find_spec(module) is None:
        return [row(value=None, unit=f"not installed: pip install {package}")]
    try:
        found = _moved(module, count=count, tokens=tokens)
    except (subprocess.SubprocessError, ValueError) as error:
        return [row(value=None, unit=f"failed: {error}")]
    put = row(what=f"pushes of {count} × 2k, in groups of {GROUP}", value=1e3 * found["put_s"], unit="ms")
    return [put, row(value=1e3 * found["take_s"], unit="ms")]


def _moved(module: str, *, count: int, tokens: int) -> Mapping[str, float]:
    """What its program measured. Raises SubprocessError, ValueError with the end of its own words."""
    command = dying_with_us(*python(__name__, module, str(count), str(tokens)))
    quiet = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=_MOST_S, check=False, env={**os.environ, **quiet}
    )
    if done.returncode:
        raise ValueError(" ".join(done.stderr.split()[-30:]) or f"status {done.returncode}")
    found: Mapping[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


class _Peer(Protocol):
    """What is measured; `put` here, `take` in a process of its own."""

    def put(self, group: int, tokens_GT: np.ndarray[Any, Any], logprobs_GT: np.ndarray[Any, Any]) -> object:
        """Hand in a group and return by what it is asked for."""

    def take(self, groups: list[Any]) -> None:
        """Hold all that was handed in as these groups."""


class _Ray:
    def __init__(self) -> None:
        self._ray = import_module("ray")

    def put(self, group: int, tokens_GT: np.ndarray[Any, Any], logprobs_GT: np.ndarray[Any, Any]) -> object:
        del group
        return [self._ray.put(row) for row in zip(tokens_GT, logprobs_GT, strict=True)]

    def take(self, groups: list[Any]) -> None:
        self._ray.get([reference for group in groups for reference in group])


class _TransferQueue:
    def __init__(self) -> None:
        self._queue, self._torch = import_module("transfer_queue"), import_module("torch")
        self._dict = import_module("tensordict").TensorDict
        self._queue.init()

    def put(self, group: int, tokens_GT: np.ndarray[Any, Any], logprobs_GT: np.ndarray[Any, Any]) -> object:
        keys = [f"{group}-{row}" for row in range(len(tokens_GT))]
        arrays = {"tokens": tokens_GT, "logprobs": logprobs_GT}
        columns = {name: self._torch.from_numpy(array) for name, array in arrays.items()}
        fields = self._dict(columns, batch_size=[len(keys)])
        self._queue.kv_batch_put(keys=keys, partition_id="bench", fields=fields)
        return keys

    def take(self, groups: list[Any]) -> None:
        self._queue.kv_batch_get(keys=[key for group in groups for key in group], partition_id="bench")


_PEERS: Mapping[str, type[_Peer]] = {"ray": _Ray, "transfer_queue": _TransferQueue}


@dataclass
class _Taker:
    """The other process."""

    module: str

    def __post_init__(self) -> None:
        self._peer = _PEERS[self.module]()

    def seconds(self, groups: list[Any]) -> float:
        began_s = time.perf_counter()
        self._peer.take(groups)
        return time.perf_counter() - began_s


def _main(module: str, count: int, tokens: int) -> None:
    ray = import_module("ray")
    with TemporaryDirectory(prefix="ray-") as folder:
        ray.init(
            num_cpus=_PLACES,
            include_dashboard=False,
            log_to_driver=False,
            _node_ip_address="127.0.0.1",
            _temp_dir=folder,
        )
        try:
            here, there = _PEERS[module](), ray.remote(num_cpus=0)(_Taker).remote(module)
            group = np.ones((GROUP, tokens), np.int32), np.ones((GROUP, tokens), np.float32)
            put_s, take_s = [], []
            for repeat in range(_REPEATS):
                began_s = time.perf_counter()
                handed = [here.put(repeat * count + number, *group) for number in range(count // GROUP)]
                put_s.append(time.perf_counter() - began_s)
                take_s.append(ray.get(there.seconds.remote(handed)))
        finally:
            ray.shutdown()
    sys.stdout.write(json.dumps({"put_s": min(put_s), "take_s": min(take_s)}) + "\n")


if __name__ == "__main__":
    _main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
