"""One development run from start to summary: `astraflow dev` as a sequence of steps.

Invariant: whatever ends the run (goal, steps, time-out, Ctrl-C, a broken child), it ends in the same order: stop after
the step in progress, final evaluation where there is still a trainer's version to evaluate, children stopped in reverse
order, summary and curves written. Ports are chosen once, so that a restarted daemon is found where it was.
"""

import asyncio
import contextlib
import math
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from pathlib import Path

import grpc.aio

from astraflow.client import AsyncClient, RetryPolicy, channel_options
from astraflow.connecting.connection import Connection
from astraflow.dataflow.v1 import admin_service_pb2, run_pb2, run_service_pb2
from astraflow.errors import AstraflowError
from astraflow.recipe.file import LoadedRecipe
from astraflow.trainer.v1 import trainer_service_pb2, trainer_service_pb2_grpc
from astraflow_kit.log import get_logger
from astraflow_kit.log_files import MAX_BYTES
from astraflow_kit.parent import python
from astraflow_kit.ports import free_port
from astraflow_launcher.run import embedded_redis
from astraflow_launcher.run.child_watch import ChildWatch, serves
from astraflow_launcher.run.dashboard_page import open_page, write_page
from astraflow_launcher.run.folder import RunFolder
from astraflow_launcher.run.memory import PeakMemory
from astraflow_launcher.run.node_pool import NodePool, first_nodes
from astraflow_launcher.run.observer import Observer
from astraflow_launcher.run.processes import Child, ChildSpec, Supervisor
from astraflow_launcher.run.registration import register_run
from astraflow_launcher.run.run_tokens import RunTokens
from astraflow_launcher.scaling.following import PoolFollower
from astraflow_launcher.view.curves import draw_curves
from astraflow_launcher.view.live import View
from astraflow_launcher.view.metrics_file import MetricsFile
from astraflow_launcher.view.observation import Goal, Observation
from astraflow_launcher.view.summary import Summary, summarize

log = get_logger(__name__)

_READY_TIMEOUT_S = 60.0
_FINISH_TIMEOUT_S = 120.0
_IDLE_TIMEOUT_S = 20.0
"""Of a final evaluation after Ctrl-C: with no token and no result for so long, nodes hang, and somebody waits."""
_LEAVE_TIMEOUT_S, _LEAVE_POLL_S = 30.0, 0.5
_MEMORY_PERIOD_S = 2.0
# Whoever joined under the name of a node of ours, while that stood still, ends no launch.
_WAITS_FOR_ITS_NAME = ("--name-patience-s", "86400")
MAX_SILENCE_S = 45.0


class Part(Enum):
    """What `--without` can leave out, to be started by hand under a debugger."""

    DATAFLOW = "dataflow"
    RAAS = "raas"
    TRAINER = "trainer"


@dataclass(frozen=True, kw_only=True)
class Options:
    """How to run a recipe on this machine."""

    loaded: LoadedRecipe
    num_nodes: int = 1
    node_options: tuple[str, ...] = ()
    """Options of every node, as `astraflow raas` takes them."""
    trainer_ranks: int = 1
    """Processes of each policy's trainer."""
    redis_url: str | None = None
    store_uri: str | None = None
    grpc_port: int | None = None
    http_port: int | None = None
    goal: Goal | None = None
    timeout_s: float | None = None
    without: frozenset[Part] = frozenset()
    accept_data_loss: bool = False
    """Go on from the checkpoints although Redis lost what they know."""
    max_restarts: int = 8
    """Restarts of one child within a minute before it counts as broken."""
    max_log_bytes: int = MAX_BYTES
    """At which the log of a child is rotated."""
    opens_dashboard: bool = False
    """Show the dashboard in a browser once its server is ready."""
    traces: bool = False
    """Whether all daemons export spans."""
    max_silence_s: float = MAX_SILENCE_S
    """Time in which a child that is alive may answer nothing before it is replaced; 0: for ever."""


class _Patience:
    """For how long the end of a run is waited for while nothing moves."""

    def __init__(self, interrupted: asyncio.Event) -> None:
        self._interrupted = interrupted
        self._evaluated, self._tokens = -1, -1
        self._evaluated_s = self._moved_s = math.inf

    @property
    def idle_s(self) -> float:
        """Since a result, or tokens of nodes, came last."""
        return time.monotonic() - self._moved_s

    def is_over(self, seen: Observation, *, evaluating: bool) -> bool:
        """Whether to go on without what is waited for."""
        now_s = time.monotonic()
        tokens = sum(node.tokens for node in seen.status.nodes) if seen.status else 0
        if seen.num_evaluated > self._evaluated or tokens > self._tokens:
            self._moved_s = now_s
        if seen.num_evaluated > self._evaluated:
            self._evaluated_s = now_s
        self._evaluated, self._tokens = seen.num_evaluated, tokens
        hurried = evaluating and self._interrupted.is_set() and self.idle_s > _IDLE_TIMEOUT_S
        return hurried or now_s - self._evaluated_s > _FINISH_TIMEOUT_S


class DevelopmentRun:
    """Owns the children of one run and watches it to its end."""

    def __init__(self, options: Options, folder: RunFolder, view: View) -> None:
        self._options = options
        self._view = view
        self._folder, self._run_id = folder, folder.record.run_id
        self._memory = PeakMemory()
        self._interrupted, self._trained = asyncio.Event(), asyncio.Event()
        self._started = time.monotonic()
        self._goal_met = False
        self._trains = options.loaded.recipe.trains  # else it is one evaluation, which ends by itself
        self._address = f"127.0.0.1:{options.grpc_port or free_port()}"
        self._supervisor = Supervisor()
        self._tokens = None if Part.DATAFLOW in options.without else RunTokens(self._folder.root)
        operator = self._tokens.of("operator") if self._tokens else ""
        self._client = AsyncClient(Connection(self._address, token=operator))
        self._observer = Observer(self._client, self._run_id)
        self._child_watch = self._observer.child_watch = ChildWatch(grace_s=options.max_silence_s)
        self._pools: dict[str, NodePool] = {}
        self._trainers: dict[str, Child] = {}
        self._trainer_ranks: list[Child] = []
        self._frozen: dict[str, Child] = {}
        """Trainers that take no step: they end when they have published."""

    async def run(self) -> Summary:
        """Run to the end and return the summary. Raises the failure of a child that cannot be restarted."""
        options, observer = self._options, self._observer
        log.info("run.started", run_id=self._run_id)
        with contextlib.ExitStack() as to_the_end:
            async with self._supervisor, self._client as client:
                await self._start_servers()
                await register_run(
                    client,
                    folder=self._folder,
                    loaded=options.loaded,
                    store_uri=options.store_uri,
                    accept_data_loss=options.accept_data_loss,
                )
                await self._start_workers()
                # Children are stopped and curves drawn under it too: Ctrl-C then ends a run that ends already.
                to_the_end.enter_context(_signals(self._interrupted))
                with MetricsFile(self._folder.metrics, run_id=self._run_id) as metrics:
                    observer.resume_after(metrics.earlier_steps())
                    await self._watch(metrics)
                summary = self._summarize(observer.observation)
            draw_curves(
                observer.observation, self._folder.curves, metrics=self._folder.metrics, title=self._run_id
            )
            return summary

    # ---------------------------------------------------------------- start

    async def _start_servers(self) -> None:
        if self._tokens is None:
            RunTokens(self._folder.root).remove()
            return
        RunTokens.make(self._folder.root)
        redis_url = self._options.redis_url or await self._start_redis()
        child = await self._start(
            self._daemon(
                "dataflow",
                "astraflow_dataflow",
                *("--redis", redis_url, "--grpc-port", self._address.rpartition(":")[2]),
                *("--http-port", str(self._options.http_port or 0)),
                *("--work-dir", str(self._folder.work("dataflow")), "--allow-recipe-code"),
                *("--token-keys-file", str(self._tokens.keys)),
            )
        )
        self._child_watch.add(child, serves)
        pages = (await self._supervisor.wait_ready(child, timeout_s=_READY_TIMEOUT_S)).http
        page = self._tokens.keys.with_name("dashboard.html")
        write_page(page, address=pages, token=self._tokens.of("viewer"))
        at = f"--join {self._address}, tokens: {self._tokens.keys.parent}"
        self._observer.observation.server = (
            f"dashboard: http://{pages}/, signed in by {page.as_uri()}; dataflow server: {at}"
        )
        if self._options.opens_dashboard:
            await asyncio.to_thread(open_page, page)

    async def _start_redis(self) -> str:
        port = free_port()
        command = embedded_redis.server_command(
            embedded_redis.require_server(), port=port, folder=self._folder.redis
        )
        child = await self._supervisor.start(self._spec("redis", command))
        self._child_watch.add(child, lambda _: embedded_redis.answers(port))
        await embedded_redis.require_answering(
            child, port, folder=self._folder.redis, timeout_s=_READY_TIMEOUT_S
        )
        return f"redis://127.0.0.1:{port}/0"

    async def _start_workers(self) -> None:
        if Part.TRAINER not in self._options.without:
            for policy in self._options.loaded.recipe.policies:
                await self._start_trainer(policy)
        if Part.RAAS not in self._options.without:
            options = self._options
            for pool, nodes in first_nodes(options.loaded.recipe, num_nodes=options.num_nodes).items():
                self._pools[pool] = NodePool(pool, partial(self._start_node, pool))
                await self._pools[pool].resize(nodes)

    async def _start_node(self, pool: str, name: str) -> Child:
        child = await self._start(self._node_spec(name, pool))
        self._observer.watch_node(child.spec.name, child)
        self._child_watch.add(child, serves)
        return child

    async def _start_trainer(self, policy: str) -> None:
        """Start all ranks; the first one answers for them. One that takes no step publishes its weights and ends."""
        recipe = self._options.loaded.recipe
        settings = recipe.policy(policy)
        if settings.model.external is not None or policy in recipe.snapshots:
            return
        if not (settings.train and self._trains):
            spec = self._trainer_spec(policy, rank=0, meeting_port=0, size=1)
            self._frozen[policy] = await self._start(spec)
            return
        meeting_port, size = free_port(), self._options.trainer_ranks
        for rank in range(size):
            spec = self._trainer_spec(policy, rank=rank, meeting_port=meeting_port, size=size)
            child = await self._start(spec)
            self._trainer_ranks.append(child)
            if rank == 0:
                self._trainers[policy] = child
                self._observer.watch_trainer(policy, child)
                self._child_watch.add(child, serves)

    async def _start(self, spec: ChildSpec) -> Child:
        child = await self._supervisor.start(spec)
        self._observer.watch_restarts(child)
        return child

    def _trainer_spec(self, policy: str, *, rank: int, meeting_port: int, size: int) -> ChildSpec:
        # The ranks of a trainer share its work folder: checkpoints are written by all of them.
        name = f"trainer-{policy}"
        spec = self._daemon(
            name if rank == 0 else f"{name}-rank-{rank}",
            "astraflow_trainer",
            *("--join", self._address, "--run-id", self._run_id, "--policy", policy),
            *("--work-dir", str(self._folder.work(name)), "--cache-dir", str(self._folder.cache)),
            *("--steps", str(self._options.loaded.recipe.policy(policy).steps)),
            *self._calling_as("trainer"),
            "--allow-recipe-code",
            *(("--recipe", str(recipe)) if (recipe := self._folder.trainer_recipe) else ()),
            *(("--accept-data-loss",) if self._options.accept_data_loss else ()),
        )
        if size == 1:
            return spec
        return replace(spec, group=name, env={**spec.env, **_rank_environment(rank, size, meeting_port)})

    def _node_spec(self, name: str, pool: str) -> ChildSpec:
        spec = self._daemon(
            name,
            "astraflow_raas",
            *("--join", self._address, "--run-id", self._run_id, "--node-id", name, *_WAITS_FOR_ITS_NAME),
            *(("--pool", pool) if pool else ()),
            *("--work-dir", str(self._folder.work(name))),
            # A development run keeps all it has in its folder.
            *("--mirror-dir", str(self._folder.work(name) / "mirror")),
            *(*self._calling_as("rollout"), "--allow-recipe-code", *self._options.node_options),
        )
        return replace(spec, returns_when_fenced=True)

    def _calling_as(self, role: str) -> tuple[str, ...]:
        return ("--token-file", str(self._tokens.of(role))) if self._tokens else ()

    def _daemon(self, name: str, module: str, *arguments: str) -> ChildSpec:
        address_file = self._folder.addresses / f"{name}.json"
        env = _daemon_environment(address_file, traces=self._options.traces)
        return replace(self._spec(name, python(module, *arguments)), address_file=address_file, env=env)

    def _spec(self, name: str, argv: tuple[str, ...]) -> ChildSpec:
        log_path = self._folder.log(name)
        most_bytes, most_restarts = self._options.max_log_bytes, self._options.max_restarts
        return ChildSpec(
            name=name, argv=argv, log_path=log_path, max_log_bytes=most_bytes, max_restarts=most_restarts
        )

    # ---------------------------------------------------------------- watch

    async def _watch(self, metrics: MetricsFile) -> None:
        observer = self._observer
        followers = [
            PoolFollower(self._client, nodes, run_id=self._run_id, pool=pool).run(self._trained)
            for pool, nodes in self._pools.items()
            if pool  # one without a name has as many as were asked for
        ]
        polling = asyncio.gather(observer.run(), self._child_watch.run(), *followers)
        try:
            await self._until(self._training_over, metrics, doing="running")
            self._trained.set()
            await self._stop_trainers()
            await self._until(
                self._trainers_ended, metrics, doing="finishing the step" if self._trains else "ending"
            )
            self._supervisor.raise_failures()  # a trainer that has failed has ended, too
            started_by_hand = Part.RAAS in self._options.without and await self._num_nodes() > 0
            has_nodes = Part.RAAS not in self._options.without or started_by_hand
            if self._trains and has_nodes and observer.observation.versions:
                await self._finish_run()
                await self._until(lambda seen: seen.run_finished, metrics, doing="final evaluation")
            if started_by_hand:
                await self._let_nodes_leave()
            await observer.round()
            await observer.read_last_evaluation(self._folder.samples)
            metrics.write(observer.observation)
        finally:
            polling.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await polling

    async def _until(self, done: Callable[[Observation], bool], metrics: MetricsFile, *, doing: str) -> None:
        """Show every new observation until `done`; everything but training ends when nothing moves for long."""
        observer, observation = self._observer, self._observer.observation
        sampled, patience = 0.0, _Patience(self._interrupted)
        while not done(observation):
            if doing != "running" and patience.is_over(observation, evaluating=doing == "final evaluation"):
                log.warning("run.not_finished", doing=doing, idle_s=round(patience.idle_s, 1))
                return
            self._supervisor.raise_failures()
            await self._publish_again(observation)
            if time.monotonic() - sampled > _MEMORY_PERIOD_S:
                await asyncio.to_thread(self._memory.sample)
                sampled = time.monotonic()
            metrics.write(observation)
            self._view.show(observation, doing=doing)
            observation.forget()
            observer.updated.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(observer.updated.wait(), timeout=2.0)
        metrics.write(observation)
        self._view.show(observation, doing=doing)

    async def _publish_again(self, observation: Observation) -> None:
        """Redis may have lost the announcement of a policy whose trainer has ended already."""
        for policy in observation.status.policies if observation.status else ():
            child = self._frozen.get(policy.policy_id)
            if child is not None and child.finished.is_set() and not policy.HasField("version"):
                log.warning("policy.published_again", policy_id=policy.policy_id)
                self._frozen[policy.policy_id] = await self._start(child.spec)

    def _training_over(self, observation: Observation) -> bool:
        if self._interrupted.is_set() or (self._trainers and self._trainers_ended(observation)):
            return True
        timeout_s = self._options.timeout_s
        if timeout_s is not None and time.monotonic() - self._started > timeout_s:
            log.warning("run.timed_out", timeout_s=timeout_s)
            return True
        self._goal_met = self._options.goal is not None and self._options.goal.met(observation)
        return self._goal_met or observation.run_finished

    def _trainers_ended(self, _: Observation) -> bool:
        return all(child.finished.is_set() for child in self._trainer_ranks)

    async def _stop_trainers(self) -> None:
        for child in self._trainers.values():
            addresses = child.addresses
            if child.finished.is_set() or addresses is None:
                continue
            async with grpc.aio.insecure_channel(addresses.grpc, options=channel_options()) as channel:
                stub = trainer_service_pb2_grpc.TrainerServiceStub(channel)
                with contextlib.suppress(grpc.aio.AioRpcError):  # it may just have ended by itself
                    await stub.StopAfterStep(trainer_service_pb2.StopAfterStepRequest(), timeout=5.0)

    async def _finish_run(self) -> None:
        request = run_service_pb2.UpdateRunRequest(run_id=self._run_id, state=run_pb2.RUN_STATE_FINISHING)
        # It is finished already, or unreachable: `_until` has the deadline.
        with contextlib.suppress(AstraflowError):
            await self._client.call(self._client.runs.UpdateRun, request, retry=RetryPolicy(total_s=10.0))

    async def _num_nodes(self) -> int:
        """Nodes that work on the run now."""
        request = admin_service_pb2.ListNodesRequest(run_id=self._run_id)
        with contextlib.suppress(AstraflowError):
            answer = await self._client.call(
                self._client.admin.ListNodes, request, retry=RetryPolicy(total_s=5.0)
            )
            return sum(node.connected for node in answer.nodes)
        return 0

    async def _let_nodes_leave(self) -> None:
        """Keep the server until the nodes that somebody else started have pushed what they hold and left."""
        give_up_s = time.monotonic() + _LEAVE_TIMEOUT_S
        while await self._num_nodes() and time.monotonic() < give_up_s:  # noqa: ASYNC110 - they tell only the server
            await asyncio.sleep(_LEAVE_POLL_S)

    # ---------------------------------------------------------------- end

    def _summarize(self, observation: Observation) -> Summary:
        self._memory.sample()
        goal = self._options.goal
        return summarize(
            observation,
            wall_s=time.monotonic() - self._started,
            peak_pss_bytes=self._memory.peak_bytes,
            goal_met=None if goal is None else self._goal_met or goal.met(observation),
            data_dir=str(self._folder.root),
        )


@contextlib.contextmanager
def _signals(interrupted: asyncio.Event) -> Iterator[None]:
    """The first Ctrl-C ends the run after the step in progress; the second one stops at once."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()

    def interrupt() -> None:
        if interrupted.is_set() and task is not None:
            task.cancel()
        interrupted.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, interrupt)
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


def _daemon_environment(address_file: Path, *, traces: bool) -> Mapping[str, str]:
    return {
        **({"ASTRAFLOW_TRACES": "true"} if traces else {}),
        "ASTRAFLOW_ADDRESS_FILE": str(address_file),
        "ASTRAFLOW_LOG_FORMAT": "json",
        # What nodes pushed and the server's answers: with the trainer's ledger it is what a run can be audited against.
        "ASTRAFLOW_PUSH_JOURNAL": "true",
        # One thread per process: on two cores the trainer and the engine would otherwise fight for both.
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def _rank_environment(rank: int, size: int, meeting_port: int) -> Mapping[str, str]:
    """What `torchrun` would set; the ranks meet on loopback."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(meeting_port),
        "GLOO_SOCKET_IFNAME": "lo",
    }
