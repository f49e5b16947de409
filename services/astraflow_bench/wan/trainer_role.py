"""The trainer of the experiment: simulated steps, and publishing with the trainer's own code beside them.

Invariant: what blocks the training thread here is what blocks it in a trainer: copying the weights, handing them
to `PublishWorker`, and waiting while too many versions are unpublished. Started by `experiment`; see `messages`.
"""

import hashlib
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from safetensors.numpy import save

from astraflow_bench.wan import messages
from astraflow_bench.weights.model_pairs import SimulatedTraining
from astraflow_trainer.model.model import PolicyModel
from astraflow_trainer.publish.published import WeightCopies
from astraflow_trainer.publish.publishing import PublishWorker
from astraflow_weights.codec.peers import OnePeer
from astraflow_weights.codec.shards import ShardedModel
from astraflow_weights.publish.compaction import due_merges
from astraflow_weights.publish.compactor import Compactor
from astraflow_weights.publish.shard_publisher import ShardPublisher
from astraflow_weights.publish.version_writer import CommittedVersion, VersionWriter
from astraflow_weights.settings import StoreSettings
from astraflow_weights.store import open_store
from astraflow_weights.versions.log import VersionLog

_MAX_BEHIND = 1
_PRIORITY = -15
_POLL_S = 0.5
_SHIFT = 1_000_003


class SimulatedPolicy:
    """A model of any size out of one block that is trained: further copies hold its weights, each shifted.

    To copying and publishing it is a `PolicyModel`.
    """

    causal_lm = SimpleNamespace(config=SimpleNamespace(model_type="simulated"))

    def __init__(self, *, block_elements: int, copies: int, learning_rate: float, seed: int) -> None:
        self._training = SimulatedTraining(
            num_elements=block_elements, learning_rate=learning_rate, seed=seed
        )
        self._copies = copies
        self._parameters = {
            f"copy.{copy:02d}.{name}": torch.nn.Parameter(
                torch.empty(bits.shape, dtype=torch.bfloat16), requires_grad=False
            )
            for name, bits in self._training.published().items()
            for copy in range(copies)
        }
        self._fill()

    def step(self) -> None:
        """Train one step."""
        self._training.step()
        self._fill()

    def hf_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Parameters by name."""
        yield from self._parameters.items()

    def bits(self) -> dict[str, np.ndarray[Any, np.dtype[np.uint16]]]:
        """The weights, sharing memory with the parameters."""
        return {name: value.data.view(torch.uint16).numpy() for name, value in self._parameters.items()}

    def _fill(self) -> None:
        mine = self.bits()
        for name, bits in self._training.published().items():
            flat = bits.reshape(-1)
            for copy in range(self._copies):
                shift, target = copy * _SHIFT % flat.size, mine[f"copy.{copy:02d}.{name}"].reshape(-1)
                target[: flat.size - shift], target[flat.size - shift :] = flat[shift:], flat[:shift]


class Trainer:
    """Trains and publishes on request. Use as a context manager."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._run, self._policy_id = settings["run_id"], settings["policy_id"]
        self._policy = SimulatedPolicy(
            block_elements=settings["block_elements"],
            copies=settings["copies"],
            learning_rate=settings["learning_rate"],
            seed=settings["seed"],
        )
        self._copies = WeightCopies(cast("PolicyModel", self._policy))
        self._store = open_store(settings["store"], settings=StoreSettings(**settings["store_settings"]))
        self._step = self._epoch = 0
        self._submitted_s: dict[int, float] = {}
        self._stack = ExitStack()

    def __enter__(self) -> "Trainer":
        self._open(base=None, context=False)
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: Any) -> None:
        self._stack.__exit__(kind, *rest)

    def use_codec(self, *, codec: str) -> None:
        """Go on as a trainer that was started again with another codec in its recipe."""
        self._worker.wait_until_done()
        self._stack.close()
        newest = self._copies.take()
        self._open(base=newest.open(), context=codec == "rice_ctx")
        newest.published(b"")
        messages.say("using", codec=codec)

    def _open(self, *, base: ShardedModel | None, context: bool) -> None:
        self._epoch += 1
        writer = VersionWriter.open(
            self._store, run_id=self._run, policy_id=self._policy_id, epoch=self._epoch
        )
        publisher = ShardPublisher(
            writer,
            uploads=writer.uploads,
            peers=OnePeer(),
            base=base,
            inline_snapshots=False,
            context=context,
        )
        compactor = Compactor(self._store, run_id=self._run, policy_id=self._policy_id, kept=publisher.kept)
        self._compactor = self._stack.enter_context(compactor)
        worker = PublishWorker(
            publisher,
            None,
            policy_id=self._policy_id,
            max_behind=_MAX_BEHIND,
            published=self._published,
        )
        self._worker = self._stack.enter_context(worker)

    def train(self, *, steps: int, step_s: float) -> None:
        """Take steps of at least `step_s` seconds and publish after each."""
        for _ in range(steps):
            started = time.monotonic()
            if self._step:
                self._policy.step()
            time.sleep(max(0.0, started + step_s - time.monotonic()))
            self._publish()

    def compact(self) -> None:
        """Wait until the paths that are due are published."""
        self._worker.wait_until_done()
        log = VersionLog(self._store, run_id=self._run, policy_id=self._policy_id)
        while log.refresh() is not None and next(due_merges(log.records), None):
            self._compactor.notify()
            time.sleep(_POLL_S)
        messages.say("compacted")

    def upload(self) -> None:
        """Store the whole model as one safetensors file, as systems without versions do."""
        self._worker.wait_until_done()
        started = time.monotonic()
        data = save(dict(self._policy.bits()))
        key = f"files/{hashlib.sha256(data).hexdigest()}"
        self._store.put_if_absent(key, data)
        messages.say("uploaded", key=key, size_bytes=len(data), seconds=time.monotonic() - started)

    def _publish(self) -> None:
        """What the training loop does after a step, timed."""
        started, cpu = time.monotonic(), time.thread_time()
        model = self._copies.take()
        copied, copy_cpu_s = time.monotonic(), time.thread_time() - cpu
        self._submitted_s[self._step] = copied
        self._worker.submit(self._step, model)
        self._worker.wait_for_room(waiting=lambda: None)
        ended = time.monotonic()
        self._step += 1
        messages.say(
            "blocked",
            blocked_s=ended - started,
            copy_s=copied - started,
            wait_s=ended - copied,
            copy_cpu_s=copy_cpu_s,
        )

    def _published(self, committed: CommittedVersion) -> None:
        now = time.monotonic()
        self._compactor.notify()
        messages.say(
            "committed",
            version=committed.version,
            at_s=now,
            publish_s=now - self._submitted_s.pop(committed.step),
            size_bytes=committed.delta_bytes or committed.snapshot_bytes,
            density=committed.density,
        )


def main() -> None:
    """Work until the orders end."""
    messages.take_stdout()
    # Nodes and store would have machines of their own: they must not take the training thread's core.
    os.nice(_PRIORITY)
    # Several threads would wait for each other at every tensor, and so for whoever else has the other cores.
    torch.set_num_threads(1)
    orders = messages.orders()
    with Trainer(next(orders)) as trainer:
        messages.say("ready")
        for order in orders:
            getattr(trainer, order.pop("do"))(**order)


if __name__ == "__main__":
    main()
