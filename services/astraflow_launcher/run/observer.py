"""Asks the daemons, over their contracts, what they do, and keeps the answers in an `Observation`.

Invariant: a daemon that does not answer is recorded as unreachable and asked again; observing never fails a
run and never changes one. One task per source, all owned by `Observer.run`.
"""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import grpc
import grpc.aio

from astraflow._status import from_rpc_error
from astraflow.client import AsyncClient, RetryPolicy, channel_options
from astraflow.commands import wording
from astraflow.commands.waits import server_wait
from astraflow.dataflow.v1 import (
    admin_service_pb2,
    evaluation_service_pb2,
    version_pb2,
    version_service_pb2,
)
from astraflow.errors import AstraflowError, DeadlineError, UnavailableError
from astraflow.raas.v1 import node_service_pb2, node_service_pb2_grpc
from astraflow.trainer.v1 import trainer_service_pb2, trainer_service_pb2_grpc
from astraflow_kit.log import get_logger
from astraflow_launcher.run.child_watch import ChildWatch
from astraflow_launcher.run.processes import Child
from astraflow_launcher.view.observation import Observation
from astraflow_launcher.view.totals import StepPoint

log = get_logger(__name__)

_ONCE = RetryPolicy(total_s=0.0)
_AT_THE_END = RetryPolicy(total_s=10.0)
_TIMEOUT_S = 3.0
_ALIVE_TIMEOUT_S = 0.9
_UNANSWERED = 2
"""Questions in a row without an answer after which the server counts as away."""
_MAX_PAGE = 1000


@dataclass(frozen=True)
class _Watched:
    name: str
    child: Child
    ask: Callable[[str], Awaitable[None]]


class Observer:
    """Polls the server, the trainers and the nodes of one run.

    Addresses are asked of the supervised children each time, so a restarted daemon is found again at its new address.
    """

    def __init__(self, client: AsyncClient, run_id: str, *, period_s: float = 0.5) -> None:
        self.observation = Observation()
        self.updated = asyncio.Event()
        """Set after every round; whoever waits clears it."""
        self._client = client
        self._run_id = run_id
        self._period_s = period_s
        self._started = time.monotonic()
        self._watched: list[_Watched] = []
        self._trainers: dict[str, Child] = {}
        self._children: list[Child] = []
        self._num_unanswered = 0
        self._answered_s = self._started
        self.child_watch = ChildWatch(grace_s=0.0)
        """Says which children are alive and silent."""

    def resume_after(self, steps: Iterable[StepPoint]) -> None:
        """Take these steps as known: they were finished before this launcher started."""
        for point in steps:
            self.observation.steps.append(point)
            if len(self.observation.steps) >= _MAX_PAGE:
                self.observation.forget()
        self.observation.num_earlier_steps = self.observation.num_steps

    def watch_trainer(self, policy: str, child: Child) -> None:
        """Add a policy's trainer."""
        self._watched.append(_Watched(policy, child, lambda address: self._ask_trainer(policy, address)))
        self._trainers[policy] = child

    def watch_node(self, name: str, child: Child) -> None:
        """Add a node, in place of one that had its name."""
        self._watched = [watched for watched in self._watched if watched.name != name]
        self._watched.append(_Watched(name, child, lambda address: self._ask_node(name, address)))

    def watch_restarts(self, child: Child) -> None:
        """Count a child's restarts."""
        self._children.append(child)

    @property
    def elapsed_s(self) -> float:
        """Seconds since the launcher started."""
        return time.monotonic() - self._started

    async def read_last_evaluation(self, samples: Path) -> None:
        """Take in the scores of the newest evaluation, if there is one, and write its tasks with the result of each
        sample into the file `samples`, as JSON lines.
        """
        if not (self.observation.status and self.observation.status.evaluations):
            return
        request = evaluation_service_pb2.GetEvaluationRequest(run_id=self._run_id, page_size=_MAX_PAGE)
        try:
            with samples.open("w") as file:
                while True:
                    page = await self._client.call(
                        self._client.evaluations.GetEvaluation, request, retry=_AT_THE_END
                    )
                    file.writelines(json.dumps(wording.as_json(task)) + "\n" for task in page.tasks)
                    # What came meanwhile is no page of this evaluation.
                    request.evaluation_id = page.evaluations[0].evaluation_id
                    request.page_token = page.next_page_token
                    if not request.page_token:
                        break
        except AstraflowError as error:
            log.warning("evaluation.not_read", reason=error.reason, message=error.message)
            return
        page.ClearField("tasks")
        self.observation.last_evaluation = page

    async def run(self) -> None:
        """Ask and follow until cancelled."""
        async with asyncio.TaskGroup() as group:
            for policy, child in self._trainers.items():
                group.create_task(self._follow_steps(policy, child), name=f"steps-{policy}")
            while True:
                await self.round()
                await asyncio.sleep(self._period_s)

    async def round(self) -> None:
        """Ask everyone once, all at the same time."""
        questions = [self._guarded("dataflow", self._ask_server)]
        for watched in self._watched:
            addresses = watched.child.addresses
            if watched.child.finished.is_set():  # nobody expects an answer any more
                self.observation.unreachable.pop(watched.name, None)
            elif addresses is not None and watched.child.running:
                questions.append(self._guarded(watched.name, partial(watched.ask, addresses.grpc)))
        await asyncio.gather(*questions)
        self._note_silent()
        self.observation.seconds = self.elapsed_s
        self.observation.restarts = {child.spec.name: child.restarts for child in self._children}
        self.observation.ends = {
            child.spec.name: child.last_end for child in self._children if child.restarts
        }
        self.updated.set()

    def _note_silent(self) -> None:
        """Say of those that are alive and silent for how long, in place of what their call said."""
        shown_as = {watched.child.spec.name: watched.name for watched in self._watched}
        silent = {shown_as.get(name, name): self.child_watch.told(name) for name in self.child_watch.silent}
        for name in self.observation.silent.keys() - silent.keys():
            self.observation.unreachable.pop(name, None)
        self.observation.silent = silent
        self.observation.unreachable |= silent

    async def _guarded(self, name: str, ask: Callable[[], Awaitable[None]]) -> None:
        # A function, not a coroutine: a round that is cancelled before it began would leave that one never awaited.
        try:
            await ask()
            self.observation.unreachable.pop(name, None)
        except AstraflowError as error:
            self.observation.unreachable[name] = error.message
        except grpc.aio.AioRpcError as error:
            self.observation.unreachable[name] = from_rpc_error(error).message

    async def _require_server(self) -> None:
        """Note whether the server answers at all, which it does whatever its Redis does. Raises when it does not."""
        try:
            request, once = admin_service_pb2.GetServerInfoRequest(), _ONCE
            await self._client.call(
                self._client.admin.GetServerInfo, request, timeout_s=_ALIVE_TIMEOUT_S, retry=once
            )
        except (UnavailableError, DeadlineError) as error:
            self._num_unanswered += 1
            if self._num_unanswered >= _UNANSWERED:
                silent_s = time.monotonic() - self._answered_s
                self.observation.server_wait = server_wait(self._client.address, error, silent_s=silent_s)
            raise
        self._num_unanswered, self._answered_s = 0, time.monotonic()
        self.observation.server_wait = None

    async def _ask_server(self) -> None:
        await self._require_server()
        status = await self._client.call(
            self._client.admin.Status,
            admin_service_pb2.StatusRequest(run_id=self._run_id),
            timeout_s=_TIMEOUT_S,
            retry=_ONCE,
        )
        try:
            for policy in status.policies:
                if policy.HasField("version"):
                    await self._collect_versions(policy.policy_id, newest=policy.version.version)
        except (UnavailableError, DeadlineError):
            if not any(wait.stage == "data" for wait in status.waits):
                raise
            # What its Redis lacks must be seen, with whatever else the server remembers.
        # Last: who sees a finished run or an evaluation then knows the versions too.
        self.observation.status = status

    async def _collect_versions(self, policy: str, *, newest: int) -> None:
        known = self.observation.versions.setdefault(policy, [])
        last = known[-1].version if known else -1
        if newest <= last:
            return
        request = version_service_pb2.ListVersionsRequest(
            run_id=self._run_id, policy_id=policy, page_size=min(newest - last, _MAX_PAGE)
        )
        found: list[version_pb2.Version] = []
        # Newest first, and more may be announced while we ask: page on down to the first one missing.
        while True:
            response = await self._client.call(
                self._client.versions.ListVersions, request, timeout_s=_TIMEOUT_S, retry=_ONCE
            )
            found.extend(response.versions)
            request.page_token = response.next_page_token
            if not request.page_token or found[-1].version <= last + 1:
                break
        # Another round may have taken them in meanwhile.
        last = known[-1].version if known else -1
        known.extend(version for version in reversed(found) if version.version > last)

    async def _ask_trainer(self, policy: str, address: str) -> None:
        async with grpc.aio.insecure_channel(address, options=channel_options()) as channel:
            stub = trainer_service_pb2_grpc.TrainerServiceStub(channel)
            self.observation.trainers[policy] = await stub.Status(
                trainer_service_pb2.StatusRequest(), timeout=_TIMEOUT_S
            )

    async def _follow_steps(self, policy: str, child: Child) -> None:
        """Take in every finished step. A stream, not a question: the last steps come just before the trainer
        ends.
        """
        while not child.finished.is_set():
            addresses = child.addresses
            if addresses is not None:
                try:
                    await self._read_steps(policy, addresses.grpc)
                except grpc.aio.AioRpcError as error:
                    self.observation.unreachable[policy] = from_rpc_error(error).message
            await asyncio.sleep(self._period_s)

    async def _read_steps(self, policy: str, address: str) -> None:
        seen = self.observation.last_step(policy)
        request = trainer_service_pb2.WatchMetricsRequest(after_step=seen.step if seen else 0)
        async with grpc.aio.insecure_channel(address, options=channel_options()) as channel:
            async for item in trainer_service_pb2_grpc.TrainerServiceStub(channel).WatchMetrics(request):
                self._add_step(policy, item)

    def _add_step(self, policy: str, item: trainer_service_pb2.WatchMetricsResponse) -> None:
        metrics = {
            **item.metrics,
            "wait_s": item.wait_duration.ToNanoseconds() / 1e9,
            "train_s": item.train_duration.ToNanoseconds() / 1e9,
        }
        self.observation.steps.append(StepPoint(policy, item.step, self.elapsed_s, metrics))
        if self.observation.first_reward_s is None:
            self.observation.first_reward_s = self.elapsed_s

    async def _ask_node(self, name: str, address: str) -> None:
        async with grpc.aio.insecure_channel(address, options=channel_options()) as channel:
            stub = node_service_pb2_grpc.NodeServiceStub(channel)
            self.observation.nodes[name] = await stub.Status(
                node_service_pb2.StatusRequest(), timeout=_TIMEOUT_S
            )
