"""Running one lease: its missing episodes side by side, each isolated, each pushed as soon as it is finished.

Invariant: whatever a plug-in does (raise, hang, return nonsense) ends as a named failure of its own episode
and of nothing else; a lease ends in exactly one of: every member answered by the server, or one failure that
says why not. Called by `worker`, which reports the failure and renews the lease meanwhile.
"""

import asyncio
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TypeAlias

from astraflow import plugins
from astraflow.dataflow.v1 import trajectory_service_pb2
from astraflow.environments import EnvironmentFailed
from astraflow.errors import AstraflowError, InvalidArgumentError
from astraflow.recipe import ResolvedRole, RowLimits
from astraflow.rollout.v1 import blob_pb2, task_pb2, trajectory_pb2
from astraflow.trajectories import BadTrajectory
from astraflow_kit import traces
from astraflow_kit.clock import Clock, SystemClock
from astraflow_kit.ids import IdSource
from astraflow_kit.log import correlated, get_logger
from astraflow_kit.metrics import Metrics
from astraflow_kit.plugins import RAISED, describe
from astraflow_raas.engine.base import EngineFaulty, EngineRefused
from astraflow_raas.environments.remote import EnvironmentUnavailable
from astraflow_raas.policies.external_model import ExternalModel
from astraflow_raas.policies.served_policy import ServedPolicy, VersionUnavailable
from astraflow_raas.push.pushing import Pusher
from astraflow_raas.work.episode import EpisodeIds, VersionMoved, build_episode
from astraflow_raas.work.expert_records import ExpertBlobs, ExpertRecord
from astraflow_raas.work.external_handle import ExternalHandle
from astraflow_raas.work.lease import complete_lease, is_evaluation
from astraflow_raas.work.policy_handle import PolicyHandle

log = get_logger(__name__)

Handle: TypeAlias = PolicyHandle | ExternalHandle
MISSING_CAPABILITY = "missing_capability"
ENGINE_DOWN = "engine_down"
_MAX_DETAIL_BYTES = 2048
_MAX_TEXT_CHARS = 500
_SHOW_EVERY_S = 0.5
_MAX_SUSPECTS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a lease, or one member of it, yielded nothing. `reason` is a slug of the contract's
    LeaseFailure."""

    reason: str
    detail: str
    retryable: bool

    @property
    def clipped_detail(self) -> str:
        """`detail` within the contract's 2 KiB; a long one loses its middle, as its end says where it was raised."""
        text = self.detail.encode()
        if len(text) <= _MAX_DETAIL_BYTES:
            return self.detail
        head, tail = text[: _MAX_DETAIL_BYTES * 3 // 4], text[-_MAX_DETAIL_BYTES // 5 :]
        return f"{head.decode(errors='ignore')} … {tail.decode(errors='ignore')}"


@dataclass(frozen=True, kw_only=True)
class SessionSettings:
    """What a session needs to know of the recipe and the node."""

    node_id: str
    episode_timeout_s: float
    coalesce_max_new_tokens: int
    sampling: Mapping[str, task_pb2.SamplingParams]
    """The recipe's sampling of each policy, for leases that leave it open."""
    roles: Mapping[str, ResolvedRole]
    """The run's roles by the names that the workflow uses."""
    row_limits: Mapping[str, RowLimits]
    """What the trainer of each policy can train on."""
    snapshots: Collection[str] = ()
    """The policies that are past versions of others."""
    swap_seats: tuple[str, str] | None = None
    """Roles that change places in odd members."""
    run_identity: str = ""
    """What the traces of the run's tasks are computed from."""


class Session:
    """Runs leases against the node's policies. Stateless between leases; shared by all of them."""

    def __init__(
        self,
        workflow: plugins.Workflow,
        *,
        policies: Mapping[str, ServedPolicy],
        externals: Mapping[str, ExternalModel] | None = None,
        pusher: Pusher,
        settings: SessionSettings,
        metrics: Metrics,
        experts: ExpertBlobs | None = None,
        ids: IdSource | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._workflow = workflow
        self._policies = policies
        self._externals = externals or {}
        self._pusher = pusher
        self._settings = settings
        self._metrics = metrics
        self._experts = experts
        self._ids = ids or IdSource()
        self._clock = clock or SystemClock()
        self._show_next_s = 0.0
        self._suspects: set[str] = set()
        """Tasks in whose calls an engine was lost."""
        self.num_running = 0
        """Episodes running now."""

    async def run(
        self, lease: task_pb2.Lease, *, member_ended: Callable[[], None] = lambda: None
    ) -> Failure | None:
        """Run the lease's members; None when the server answered for each. Calls `member_ended` at the end of each
        episode. Never raises but for cancellation.
        """
        root = traces.task(self._settings.run_identity, lease.task.task_id)
        is_first = lease.attempt == 1 and not lease.hedge
        named = {"astraflow.run": lease.run_id, "astraflow.task": lease.task.task_id}
        with traces.span(
            "task",
            {**named, "astraflow.attempt": lease.attempt, "astraflow.hedge": lease.hedge},
            at=root if is_first else None,
            under=None if is_first else root,
        ):
            return await self._run(lease, member_ended=member_ended)

    async def _run(self, lease: task_pb2.Lease, *, member_ended: Callable[[], None]) -> Failure | None:
        try:
            task = complete_lease(lease, sampling=self._settings.sampling)
            with ExitStack() as pins:
                for policy_id, version in lease.required_versions.items():
                    pins.enter_context(self._policy(policy_id).pinned(version))
                stem = self._ids.new()
                outcomes = await asyncio.gather(
                    *(
                        self._member(lease, task, member, f"{stem}.{member}", ended=member_ended)
                        for member in lease.members
                    )
                )
        except InvalidArgumentError as error:
            return Failure(reason="workflow_error", detail=error.message, retryable=False)
        except VersionUnavailable as error:
            return Failure(reason="version_unavailable", detail=error.message, retryable=True)
        failures = [outcome for outcome in outcomes if outcome is not None]
        return _worst(failures) if failures else None

    async def close(self) -> None:
        """Close the connections to external policies."""
        for external in self._externals.values():
            await external.close()

    def _policy(self, policy_id: str) -> ServedPolicy:
        if policy_id not in self._policies:
            raise VersionUnavailable(
                f"this node serves no policy {policy_id!r}; it serves {', '.join(self._policies)}"
            )
        return self._policies[policy_id]

    async def _member(
        self,
        lease: task_pb2.Lease,
        task: plugins.TaskSpec,
        member: int,
        episode_id: str,
        *,
        ended: Callable[[], None],
    ) -> Failure | None:
        """Run and push one episode; what stands in the way of the server's answer, if anything does."""
        place = traces.episode(self._settings.run_identity, lease.task.task_id, episode_id)
        named: dict[str, traces.Value] = {
            "gen_ai.operation.name": "invoke_agent",
            "gen_ai.agent.name": type(self._workflow).__name__,
            "gen_ai.conversation.id": episode_id,
            "astraflow.member": member,
        }
        with traces.span("episode", named, at=place) as recorded:
            message, failure = await self._ran(lease, task, member=member, episode_id=episode_id, ended=ended)
            recorded.set_attributes({"astraflow.outcome": failure.reason if failure else "finished"})
            if message is None:
                return failure
            return _of_result(await self._pusher.push(message), member=member)

    async def _ran(
        self,
        lease: task_pb2.Lease,
        task: plugins.TaskSpec,
        *,
        member: int,
        episode_id: str,
        ended: Callable[[], None],
    ) -> tuple[trajectory_pb2.Episode | None, Failure | None]:
        """Run one episode, counted and logged."""
        self.num_running += 1
        started_s = self._clock.monotonic_s()
        try:
            with correlated(episode_id=episode_id):
                message, failure = await self._episode(lease, task, member=member, episode_id=episode_id)
        finally:
            self.num_running -= 1
            ended()
            self._metrics.observe("astraflow_raas_episode_seconds", self._clock.monotonic_s() - started_s)
        self._metrics.increment(
            "astraflow_raas_episodes_total", outcome=failure.reason if failure else "finished"
        )
        if failure is not None:
            log.warning(
                "episode.failed",
                episode_id=episode_id,
                member=member,
                reason=failure.reason,
                detail=failure.detail,
            )
        return message, failure

    async def _episode(
        self, lease: task_pb2.Lease, task: plugins.TaskSpec, *, member: int, episode_id: str
    ) -> tuple[trajectory_pb2.Episode | None, Failure | None]:
        handles = self._handles(lease, member=member, episode_id=episode_id)
        try:
            async with asyncio.timeout(self._settings.episode_timeout_s):
                episode = await self._workflow.run(task, self._seated(handles, member=member))
            ids = EpisodeIds(episode_id=episode_id, node_id=self._settings.node_id, member=member)
            message = build_episode(
                episode,
                lease=lease,
                ids=ids,
                roles=self._settings.roles,
                row_limits=self._settings.row_limits,
                experts=await self._expert_refs(episode, handles.values()),
            )
            message.draws.update(self._draws(handles.values()))
            self._show(episode, member=member)
            return message, None
        except TimeoutError as error:
            return None, self._timed_out(error, handles=handles, member=member)
        except RAISED as error:  # a plug-in may raise anything; it must not reach its neighbours
            down = self._engine_down(lease, handles.values(), member=member)
            return None, down or _of_error(error, member=member)

    def _engine_down(
        self, lease: task_pb2.Lease, handles: Iterable[Handle], *, member: int
    ) -> Failure | None:
        """The failure of an episode that ended because a policy has no engine; None when it ended otherwise.

        It costs no attempt, but for a task in whose calls engines are lost again and again.
        """
        own = (handle for handle in handles if isinstance(handle, PolicyHandle))
        handle = next((handle for handle in own if handle.unavailable is not None), None)
        if handle is None:
            return None
        if not handle.wants_trajectory:
            self._policies[handle.name].is_needed = True
        detail = f"member {member}: {handle.unavailable}"
        task_id = lease.task.task_id
        if handle.lost_calls and task_id in self._suspects:
            return Failure(reason="engine_error", detail=detail, retryable=True)
        if handle.lost_calls and len(self._suspects) < _MAX_SUSPECTS:
            self._suspects.add(task_id)
        return Failure(reason=ENGINE_DOWN, detail=detail, retryable=True)

    def _handles(self, lease: task_pb2.Lease, *, member: int, episode_id: str) -> dict[str, Handle]:
        return {
            name: ExternalHandle(
                role, self._externals[role.policy_id], sampling=lease.sampling[role.policy_id]
            )
            if role.policy_id in self._externals
            else PolicyHandle(
                role,
                sampler=self._policies[role.policy_id],
                lease=lease,
                member=member,
                episode_id=episode_id,
                batch_key=self._batch_key(lease, member),
            )
            for name, role in self._settings.roles.items()
        }

    def _seated(self, handles: dict[str, Handle], *, member: int) -> dict[str, Handle]:
        """The handles by the places that they take in this episode."""
        if self._settings.swap_seats is None or member % 2 == 0:
            return handles
        first, second = self._settings.swap_seats
        return handles | {first: handles[second], second: handles[first]}

    def _draws(self, handles: Iterable[Handle]) -> dict[str, int]:
        """The draw of each snapshot policy that answered all calls of an episode."""
        seen: dict[str, set[int]] = {}
        for handle in handles:
            if isinstance(handle, PolicyHandle) and handle.name in self._settings.snapshots:
                seen.setdefault(handle.name, set()).update(handle.versions)
        return {name: min(versions) for name, versions in seen.items() if len(versions) == 1}

    async def _expert_refs(
        self, episode: plugins.Episode, handles: Iterable[Handle]
    ) -> Sequence[blob_pb2.BlobRef | None]:
        """What refers to the experts of each of its trajectories; empty where nothing was recorded."""
        records: dict[str, list[ExpertRecord]] = {}
        for handle in handles:
            if isinstance(handle, PolicyHandle) and handle.experts is not None:
                records.setdefault(handle.name, []).append(handle.experts)
        if self._experts is None or not records:
            return ()
        return await self._experts.refs(episode.trajectories, records)

    def _show(self, episode: plugins.Episode, *, member: int) -> None:
        """Log what a policy said, a few times a second at most: people look at samples."""
        now_s = self._clock.monotonic_s()
        if now_s < self._show_next_s:
            return
        self._show_next_s = now_s + _SHOW_EVERY_S
        for trajectory in episode.trajectories:
            if trajectory.policy not in self._policies:
                continue
            trained = [
                token
                for token, chosen in zip(trajectory.token_ids, trajectory.loss_mask, strict=True)
                if chosen
            ]
            log.info(
                "episode.sample",
                policy_id=trajectory.policy,
                role=trajectory.role,
                member=member,
                reward=trajectory.reward,
                finish_reason=trajectory.finish_reason,
                tokens=len(trained),
                text=self._policies[trajectory.policy].tokenizer.decode(trained)[:_MAX_TEXT_CHARS],
            )

    def _batch_key(self, lease: task_pb2.Lease, member: int) -> Callable[[int], Hashable]:
        """Which calls share an engine request: the short ones of all training tasks, or of all evaluations.

        A shared request is answered when its longest call is. While calls are short that costs less than a
        request of their own would; long calls go alone, else one would delay its neighbours' next turn.
        """
        shared: Hashable = "evaluation" if is_evaluation(lease) else "training"
        limit = self._settings.coalesce_max_new_tokens
        return lambda max_new_tokens: shared if max_new_tokens <= limit else (lease.lease_id, member)

    def _timed_out(self, error: TimeoutError, *, handles: Mapping[str, Handle], member: int) -> Failure:
        limit = f"episode_timeout_s {self._settings.episode_timeout_s}"
        if any(handle.waiting_for_engine for handle in handles.values()):
            detail = f"member {member}: no engine answered within {limit}"
            return Failure(reason="engine_error", detail=detail, retryable=True)
        detail = f"member {member}: the workflow did not return within {limit}; shorten it ({error})"
        return Failure(reason="timeout", detail=detail, retryable=True)


def _of_error(error: BaseException, *, member: int) -> Failure:
    """The failure that stands for an exception of a workflow or of what it returned."""
    text = f"{type(error).__name__}: {error}" if isinstance(error, AstraflowError) else describe(error)
    detail = f"member {member}: {text}"
    if isinstance(error, plugins.MissingCapability):
        return Failure(reason=MISSING_CAPABILITY, detail=f"member {member}: {error}", retryable=True)
    if isinstance(error, EnvironmentFailed):
        return Failure(reason="environment_failed", detail=f"member {member}: {error}", retryable=True)
    if isinstance(error, EnvironmentUnavailable):
        return Failure(reason="environment_unavailable", detail=f"member {member}: {error}", retryable=True)
    if isinstance(error, plugins.RewardFailed):
        return Failure(reason=error.reason, detail=f"member {member}: {error}", retryable=True)
    if isinstance(error, VersionMoved):
        return Failure(reason="version_unavailable", detail=detail, retryable=True)
    if isinstance(error, EngineFaulty):
        return Failure(reason="engine_error", detail=detail, retryable=True)
    if isinstance(error, EngineRefused):
        return Failure(reason="workflow_error", detail=detail, retryable=False)
    if not isinstance(error, AstraflowError):
        # The whole traceback is in this node's log only.
        log.error("workflow.raised", member=member, exc_info=error)
    return Failure(reason="workflow_error", detail=detail, retryable=not isinstance(error, BadTrajectory))


def _of_result(result: trajectory_service_pb2.PushResult, *, member: int) -> Failure | None:
    """POISON leaves the member open, so the lease must be given back; every other outcome closes it."""
    if result.outcome != trajectory_service_pb2.OUTCOME_POISON:
        return None
    log.error("episode.poison", member=member, reason=result.reason, detail=result.detail)
    detail = f"member {member}: the server refused the episode: {result.reason}: {result.detail}"
    return Failure(reason="workflow_error", detail=detail, retryable=True)


def _worst(failures: Sequence[Failure]) -> Failure:
    """The failure reported for the lease: one that no retry mends wins, then one that only another node mends,
    then one that costs an attempt, then the first."""
    order = {MISSING_CAPABILITY: 0, ENGINE_DOWN: 2}
    chosen = min(failures, key=lambda failure: (failure.retryable, order.get(failure.reason, 1)))
    more = f" (and {len(failures) - 1} more members)" if len(failures) > 1 else ""
    return replace(chosen, detail=f"{chosen.detail}{more}")
