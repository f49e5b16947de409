"""A node as a process with what it needs around it: real weights in a real store, and an end for it in every case.

`WeightPublisher` plays the trainer's side of the store; `node_of` starts `python -m astraflow_raas`. Used by
integration tests against the scripted and against the real dataflow server.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import numpy as np
import psutil
import pytest

from astraflow._status import from_rpc_error
from astraflow.dataflow.v1 import version_pb2
from astraflow.dataflow.v1.version_service_pb2 import PublishResponse
from astraflow.errors import AstraflowError
from astraflow.raas.v1 import node_service_pb2 as nodes
from astraflow.raas.v1.node_service_pb2_grpc import NodeServiceStub
from astraflow_kit.lifecycle import read_address_file
from astraflow_weights.codec.tensors import Array
from astraflow_weights.mirror.checkpoint import map_model
from astraflow_weights.publish.version_writer import VersionWriter
from astraflow_weights.store.file import FileStore
from astraflow_weights.versions.probe import Probe
from support import published_models, raas_parts, scripted_dataflow, tiny_models
from support.dataflow_world import Trainer

START_S = 60.0
_TESTS = str(Path(__file__).parents[1])


def tiny_policy(folder: Path) -> Path:
    """Write a tiny random policy with a tokenizer."""
    tiny_models.save_tiny_model(folder, shape=tiny_models.TinyShape(vocab_size=320))
    return raas_parts.write_tokenizer(folder)


@dataclass
class WeightPublisher:
    """Publishes versions of a tiny model; the test announces them."""

    publisher: published_models.ModelPublisher
    model: dict[str, Array]
    version: int = -1
    policy_id: str = "solver"

    @classmethod
    def open(cls, store: Path, *, run_id: str, policy_id: str, checkpoint: Path) -> WeightPublisher:
        """Open the policy in a store below a folder."""
        writer = VersionWriter.open(FileStore(store), run_id=run_id, policy_id=policy_id, epoch=1)
        names = ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
        publisher = published_models.ModelPublisher(writer, assets=[checkpoint / name for name in names])
        model = {name: np.array(array) for name, array in map_model(checkpoint).items()}
        return cls(publisher, model, policy_id=policy_id)

    def publish(self, *, probe: Callable[[Mapping[str, Array]], Probe] | None = None) -> version_pb2.Version:
        """Commit a version that differs a little from the one before; `probe` computes what it answers."""
        if self.version >= 0:
            for array in self.model.values():
                flat = array.reshape(-1)
                flat[:: max(1, flat.size // 40)] ^= np.uint16(1)
        self.version += 1
        answers = probe(self.model) if probe else None
        committed = self.publisher.publish(self.model, step=self.version, probe=answers)
        named = {name: getattr(committed, name) for name in ("version", "sequence", "manifest_sha256")}
        return version_pb2.Version(policy_id=self.policy_id, **named)


async def announce(trainer: Trainer, weights: WeightPublisher, *, step: int) -> None:
    """Commit what `weights` holds as the version of a step, and tell the server of it."""
    version = await asyncio.to_thread(weights.publish)
    version.step, version.trainer_epoch = step, trainer.epoch
    await trainer.world.ask(
        PublishResponse, as_=trainer.credential, version=version, trainer_epoch=trainer.epoch
    )


@dataclass
class NodeProcess:
    """A started node."""

    process: asyncio.subprocess.Process
    folder: Path
    log: Path

    @property
    def engines(self) -> list[psutil.Process]:
        """Its living engine processes."""
        with contextlib.suppress(psutil.NoSuchProcess):
            children = psutil.Process(self.process.pid).children(recursive=True)
            commands = [(child, child.cmdline()) for child in children]
            # Each has a process beside it that ends with it, of the same words.
            return [
                c for c, words in commands if "--model-path" in words and "astraflow_kit.family" not in words
            ]
        return []

    @asynccontextmanager
    async def channel(self) -> AsyncIterator[grpc.aio.Channel]:
        """A channel to the node's own services."""
        addresses = read_address_file(self.folder / "node.json")
        assert addresses is not None
        async with grpc.aio.insecure_channel(addresses.grpc) as channel:
            yield channel

    async def status(self) -> nodes.StatusResponse:
        """What NodeService says."""
        async with self.channel() as channel:
            rpc = NodeServiceStub(channel).Status
            answer: nodes.StatusResponse = await rpc(nodes.StatusRequest(), timeout=10)
            return answer

    async def versions(self) -> dict[int, tuple[bool, bool, bool]]:
        """Whether each version the node has is (served, mirrored, the newest announced)."""
        async with self.channel() as channel:
            rpc = NodeServiceStub(channel).ListVersions
            answer = await rpc(nodes.ListVersionsRequest(), timeout=10)
        return {v.version: (v.serving, v.mirrored, v.newest_announced) for v in answer.versions}

    async def refuses(self, call: Callable[[grpc.aio.Channel], Awaitable[object]]) -> AstraflowError:
        """The typed error of a call to the node."""
        async with self.channel() as channel:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call(channel)
        return from_rpc_error(refused.value)

    def events(self, name: str) -> list[Mapping[str, object]]:
        """Its log lines of one event, oldest first."""
        text = self.log.read_text()
        whole = text[: text.rfind("\n") + 1].splitlines()  # the last one may still be being written
        lines = [json.loads(line) for line in whole if line.startswith("{")]
        return [line for line in lines if line.get("event") == name]

    def send(self, number: signal.Signals) -> None:
        """Send it a signal."""
        self.process.send_signal(number)

    async def ends_with(self) -> int:
        """The exit code."""
        async with asyncio.timeout(START_S):
            return await self.process.wait()


@asynccontextmanager
async def node_of(
    address: str, folder: Path, *options: str, node_id: str = "node-1", **variables: str
) -> AsyncIterator[NodeProcess]:
    """A node process; whatever the test leaves of it is killed."""
    command = [sys.executable, "-m", "astraflow_raas", "--join", address, "--node-id", node_id]
    command += ["--work-dir", str(folder / "work"), "--address-file", str(folder / "node.json")]
    # Without an option of the test nothing of it stays in shared memory.
    command += [*(() if "--mirror-dir" in options else ("--mirror-dir", str(folder / "mirror"))), *options]
    async with started(command, folder, **variables) as node:
        yield node


@asynccontextmanager
async def started(command: list[str], folder: Path, **variables: str) -> AsyncIterator[NodeProcess]:
    """Any command that becomes a node; it finds the tests' own plug-ins."""
    log = folder / "node.log"
    paths = os.pathsep.join([_TESTS, *filter(None, sys.path)])
    environment = {**os.environ, "PYTHONPATH": paths, "ASTRAFLOW_LOG_FORMAT": "json", **variables}
    with log.open("ab") as output:
        process = await asyncio.create_subprocess_exec(*command, stderr=output, env=environment)
    node = NodeProcess(process, folder, log)
    try:
        yield node
    except BaseException as error:
        error.add_note(log.read_text()[-6000:])
        raise
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        # The engine dies by itself, a moment later.
        await scripted_dataflow.eventually(lambda: not node.engines, what="no engine is left")
