"""A dataflow server as a trainer sees it, following a test's script over real gRPC on loopback.

It hands out one batch of two trajectories per step, answers as told, and writes one event per call
(`intent 3`) into a list that a test may share with its other parts, so that the order across them can be seen.
"""

import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np
from grpc_status import rpc_status

from astraflow._status import to_status
from astraflow.client import Client, RetryPolicy
from astraflow.columns import Columns, encode_columns
from astraflow.dataflow.v1 import admin_service_pb2 as admin
from astraflow.dataflow.v1 import admin_service_pb2_grpc as admin_grpc
from astraflow.dataflow.v1 import batch_pb2, run_pb2, version_pb2
from astraflow.dataflow.v1 import batch_service_pb2 as pb
from astraflow.dataflow.v1 import batch_service_pb2_grpc as batches_grpc
from astraflow.dataflow.v1 import run_service_pb2 as runs
from astraflow.dataflow.v1 import run_service_pb2_grpc as runs_grpc
from astraflow.dataflow.v1 import version_service_pb2 as versions
from astraflow.dataflow.v1 import version_service_pb2_grpc as versions_grpc
from astraflow.errors import AstraflowError, NotFoundError
from astraflow.server.v1 import server_info_pb2
from astraflow.trajectories import batch_digest
from astraflow_kit.server_info import server_info
from astraflow_trainer.publish.publishing import ModelBytes
from astraflow_weights.codec.shards import ShardedModel, whole
from astraflow_weights.publish.version_writer import CommittedVersion
from astraflow_weights.versions.probe import Probe
from support.development import wait_for
from support.published_models import committed
from support.scripted_dataflow import POLICY, RUN_ID, a_run, duration, register

PATIENCE_S = 15.0
FAST = RetryPolicy(total_s=10.0, first_wait_s=0.01, max_wait_s=0.05)
BATCH_SIZE = 2


def eventually(holds: Callable[[], object], *, what: str, patience_s: float = PATIENCE_S) -> None:
    """Wait until `holds` is true, for code in other threads; fails naming `what` was waited for."""
    wait_for(holds, what=what, timeout_s=patience_s, period_s=0.005)


@dataclass
class ScriptedBatches(  # type: ignore[misc]  # two services have a Watch
    admin_grpc.AdminServiceServicer,
    batches_grpc.BatchServiceServicer,
    runs_grpc.RunServiceServicer,
    versions_grpc.VersionServiceServicer,
):
    """The script and the record. Fields may be changed at any time."""

    info: server_info_pb2.ServerInfo = field(default_factory=server_info)
    epoch: int = 3
    last_finished_step: int = 0
    """Steps up to this one are handed out as trained by an earlier process."""
    last_durable_step: int = 0
    version: int | None = None
    batch_lease_s: float = 60.0
    data_incarnation: str = "data-1"
    empty_polls: deque[str] = field(default_factory=deque)
    """What the next polls for a batch wait for; afterwards there is one."""
    on_acquire: Callable[[int], object] = lambda _step: None
    """Called while a poll for a batch is under way."""
    reads_ahead: bool = False
    """Hand out the batch after the one in hand, too."""
    renamed: dict[int, str] = field(default_factory=dict)
    """Steps whose batch is another one from now on, and its id."""
    gone: set[str] = field(default_factory=set)
    """Trajectories whose payloads are gone from the server."""
    spoil: dict[str, Callable[[bytes], bytes]] = field(default_factory=dict)
    """What became of the payloads of some trajectories."""
    spoiled_batches: deque[Callable[[batch_pb2.Batch], object]] = field(default_factory=deque)
    """What became of the batches that are handed out next."""
    packs: bool = True
    """False: payloads are sent each alone, as a server of an earlier release does."""
    faults: dict[str, deque[AstraflowError]] = field(default_factory=dict)
    """Rpc name to the errors of its next calls."""
    run: run_pb2.Run = field(default_factory=a_run)

    events: list[str] = field(default_factory=list)
    """What was asked and told, in order."""
    base_versions: list[int] = field(default_factory=list)
    """Of each request for a batch."""
    bases: dict[int, int] = field(default_factory=dict)
    """The newest of each step."""
    acks: list[pb.AckBatchRequest] = field(default_factory=list)
    announced: list[version_pb2.Version] = field(default_factory=list)
    renewals: list[pb.RenewBatchRequest] = field(default_factory=list)
    holds: list[pb.HoldPolicyRequest] = field(default_factory=list)
    fetched: list[list[str]] = field(default_factory=list)
    """Trajectories that each fetch named."""
    epochs: set[int] = field(default_factory=set)
    """Epochs under which a trainer acted."""

    def fail(self, rpc: str, *failures: AstraflowError) -> None:
        """Answer the next calls of `rpc` with these errors."""
        self.faults.setdefault(rpc, deque()).extend(failures)

    # ------------------------------------------------------------------ the contract

    def ClaimPolicy(self, request: pb.ClaimPolicyRequest, context: Any) -> pb.ClaimPolicyResponse:
        self._act("ClaimPolicy", context)
        self.events.append(f"claim {request.run_id} {request.policy_id} {request.trainer_id}")
        return pb.ClaimPolicyResponse(
            trainer_epoch=self.epoch,
            last_finished_step=self.last_finished_step,
            last_durable_step=self.last_durable_step,
            version=self.version,
            batch_lease_duration=duration(self.batch_lease_s),
            data_incarnation=self.data_incarnation,
        )

    def AcquireBatch(self, request: pb.AcquireBatchRequest, context: Any) -> pb.AcquireBatchResponse:
        if request.read_ahead and not self.reads_ahead:
            return pb.AcquireBatchResponse(waiting_for="not_ahead")
        self.on_acquire(request.step)
        self._act("AcquireBatch", context, epoch=request.trainer_epoch)
        self.base_versions.append(request.base_version)
        self.bases[request.step] = request.base_version
        if self.empty_polls:
            return pb.AcquireBatchResponse(waiting_for=self.empty_polls.popleft())
        self.events.append(f"{'ahead' if request.read_ahead else 'acquire'} {request.step}")
        finished = request.step <= self.last_finished_step
        stage = pb.BATCH_STAGE_TRAINED if finished else pb.BATCH_STAGE_UNSPECIFIED
        batch = batch_of(request.step, base_version=request.base_version)
        batch.batch_id = self.renamed.get(request.step, batch.batch_id)
        if self.spoiled_batches:
            self.spoiled_batches.popleft()(batch)
        return pb.AcquireBatchResponse(batch=batch, stage=stage)

    def FetchBatch(self, request: pb.FetchBatchRequest, context: Any) -> Iterator[pb.FetchBatchResponse]:
        self._act("FetchBatch", context, epoch=request.trainer_epoch)
        self.events.append(f"fetch {request.step}")
        self.fetched.append(list(request.trajectory_ids))
        items = batch_of(request.step, base_version=self.bases[request.step]).items
        chosen = [
            item
            for item in items
            if not request.trajectory_ids or item.trajectory_id in request.trajectory_ids
        ]
        for item in chosen:
            if item.trajectory_id in self.gone:
                gone = {"payload_missing": item.trajectory_id}
                error = NotFoundError(f"the payload of {item.trajectory_id} is gone", metadata=gone)
                context.abort_with_status(rpc_status.to_status(to_status(error)))
        # In another order than the batch's: rows must not depend on how payloads travel.
        sent = [
            (item.trajectory_id, self.spoil.get(item.trajectory_id, bytes)(_payload(item)))
            for item in reversed(chosen)
        ]
        if request.pack_bytes and self.packs:
            pack = [pb.FetchedTrajectory(trajectory_id=name, body=body) for name, body in sent]
            yield pb.FetchBatchResponse(trajectories=pack)
        else:
            yield from (pb.FetchBatchResponse(trajectory_id=name, body=body) for name, body in sent)

    def AckBatch(self, request: pb.AckBatchRequest, context: Any) -> pb.AckBatchResponse:
        self._act("AckBatch", context, epoch=request.trainer_epoch)
        self.acks.append(request)
        stage = pb.BatchStage.Name(request.stage).removeprefix("BATCH_STAGE_").lower()
        self.events.append(f"{stage} {request.step}")
        return pb.AckBatchResponse(stage=request.stage)

    def NackBatch(self, request: pb.NackBatchRequest, context: Any) -> pb.NackBatchResponse:
        self._act("NackBatch", context, epoch=request.trainer_epoch)
        self.events.append(f"nack {request.step} {request.batch_id} {request.reason}")
        if not request.quarantine:
            return pb.NackBatchResponse(returned_groups=1)
        return pb.NackBatchResponse(quarantined_trajectories=BATCH_SIZE)

    def RenewBatch(self, request: pb.RenewBatchRequest, context: Any) -> pb.RenewBatchResponse:
        self.renewals.append(request)
        self._act("RenewBatch", context, epoch=request.trainer_epoch)
        return pb.RenewBatchResponse()

    def HoldPolicy(self, request: pb.HoldPolicyRequest, context: Any) -> pb.HoldPolicyResponse:
        self.holds.append(request)
        self._act("HoldPolicy", context)
        return pb.HoldPolicyResponse()

    def ReleasePolicy(self, request: pb.ReleasePolicyRequest, context: Any) -> pb.ReleasePolicyResponse:
        self._act("ReleasePolicy", context)
        self.events.append(f"release {request.trainer_epoch}")
        return pb.ReleasePolicyResponse()

    def MarkDurable(self, request: pb.MarkDurableRequest, context: Any) -> pb.MarkDurableResponse:
        self._act("MarkDurable", context, epoch=request.trainer_epoch)
        self.events.append(f"durable {request.step}")
        return pb.MarkDurableResponse()

    def GetServerInfo(self, request: admin.GetServerInfoRequest, context: Any) -> admin.GetServerInfoResponse:
        return admin.GetServerInfoResponse(server=self.info)

    def GetRun(self, request: runs.GetRunRequest, context: Any) -> runs.GetRunResponse:
        self._act("GetRun", context)
        self.run.run_id = request.run_id or RUN_ID
        return runs.GetRunResponse(run=self.run)

    def Publish(self, request: versions.PublishRequest, context: Any) -> versions.PublishResponse:
        self._act("Publish", context, epoch=request.trainer_epoch)
        self.announced.append(request.version)
        self.events.append(f"announce {request.version.step}")
        return versions.PublishResponse()

    def ListVersions(
        self, request: versions.ListVersionsRequest, context: Any
    ) -> versions.ListVersionsResponse:
        self._act("ListVersions", context)
        return versions.ListVersionsResponse(versions=self.announced[: -request.page_size - 1 : -1])

    def _act(self, rpc: str, context: Any, *, epoch: int | None = None) -> None:
        if epoch is not None:
            self.epochs.add(epoch)
        if self.faults.get(rpc):
            context.abort_with_status(rpc_status.to_status(to_status(self.faults[rpc].popleft())))


def weights_of(step: int) -> ModelBytes:
    """What a trainer submits as its weights after `step`: the number of the step."""
    shards = whole({"weight": np.asarray([step], dtype=np.uint16)})
    return ModelBytes(open=lambda: shards)


@dataclass
class ScriptedStore:
    """Numbers the versions that a trainer commits upwards from `newest`, once per step, while its gate is open."""

    events: list[str]
    versions: dict[int, int] = field(default_factory=dict)
    """Step to the version it already has."""
    newest: int = 0
    gate: threading.Event = field(default_factory=threading.Event)
    failures: deque[Exception] = field(default_factory=deque)
    """What the next commits raise."""
    log: list[CommittedVersion] = field(default_factory=list)
    learning_rates: list[float | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.gate.set()

    def committed_since(self, version: int | None) -> list[CommittedVersion]:
        return [item for item in self.log if version is None or item.version > version]

    def publish(
        self,
        model: ShardedModel,
        *,
        step: int,
        learning_rate: float | None = None,
        probe: Probe | None = None,
    ) -> CommittedVersion:
        assert self.gate.wait(PATIENCE_S)
        if self.failures:
            raise self.failures.popleft()
        assert model.shards["weight"].elements.tolist() == [step]
        existed = step in self.versions
        self.newest = self.versions.setdefault(step, self.newest + 1)
        self.events.append(f"publish {step}")
        self.learning_rates.append(learning_rate)
        self.log.append(committed(self.newest, step=step, existed=existed))
        return self.log[-1]


def batch_of(step: int, *, base_version: int = 0) -> batch_pb2.Batch:
    """The batch of a step, always the same."""
    batch = batch_pb2.Batch(
        batch_id=f"b{step}",
        policy_id=POLICY,
        step=step,
        base_version=base_version,
        items=[
            batch_pb2.BatchItem(
                trajectory_id=f"t{step}-{index}",
                group_id=f"g{step}",
                task_id=f"task-{step}",
                num_tokens=3,
                num_trainable_tokens=2,
                reward=float(index),
                min_version=max(0, base_version - index),
                max_version=base_version,
                role=POLICY,
                source="sums",
                member=1,
                turn=index,
                truncated=index == 1,
                response_digest=zlib.crc32(np.asarray([2, 3], dtype="<i4").tobytes()),
            )
            for index in range(BATCH_SIZE)
        ],
    )
    batch.digest = batch_digest(item.trajectory_id for item in batch.items)
    return batch


@contextmanager
def serving(script: ScriptedBatches) -> Iterator[Client]:
    """A real server on a free loopback port; yields a client of it that retries fast."""
    server = grpc.server(ThreadPoolExecutor(8))
    register(script, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with Client(f"127.0.0.1:{port}", retry=FAST) as client:
            yield client
    finally:
        server.stop(0).wait()


def _payload(item: batch_pb2.BatchItem) -> bytes:
    columns = Columns(
        token_ids=np.asarray([1, 2, 3], dtype=np.int32),
        loss_mask=np.asarray([False, True, True]),
        logprobs=np.asarray([0.0, -1.0, -2.0], dtype=np.float32),
        version_spans=(
            ((1, 2, item.min_version), (2, 3, item.max_version))
            if item.max_version
            else ((1, 3, item.max_version),)
        ),
    )
    trajectory = encode_columns(columns, trajectory_id=item.trajectory_id)
    trajectory.sampling.temperature = 0.5
    trajectory.version_spans[0].recomputed = True
    return trajectory.SerializeToString()
