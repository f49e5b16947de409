"""Starting an environment service and keeping it until a signal.

Invariant: it listens from the first moment on, and is ready when a worker is loaded; an environment that cannot be
loaded ends it with status 2 and the reason. `__main__` calls `run` and `check`.
"""

from collections.abc import Mapping
from functools import partial

from astraflow.raas.v1 import environment_service_pb2_grpc
from astraflow_environment.servicer import EnvironmentServicer
from astraflow_environment.sessions import Sessions
from astraflow_environment.settings import EnvironmentSettings
from astraflow_environment.worker import Specification
from astraflow_environment.workers import WorkerPool
from astraflow_kit import lifecycle
from astraflow_kit.lifecycle import Addresses, Lifecycle
from astraflow_kit.log import get_logger
from astraflow_kit.metrics import Metrics
from astraflow_kit.pages import Pages
from astraflow_kit.serve import GrpcServer

log = get_logger(__name__)


def run(settings: EnvironmentSettings) -> int:
    """Serve until a signal; the exit code for `sys.exit`."""
    return lifecycle.run(partial(serve, settings), drain_timeout_s=settings.drain_timeout_s)


def check(settings: EnvironmentSettings) -> Mapping[str, object]:
    """Load the environment here, then exit. Raises PluginError."""
    folder = str(settings.recipe.resolve()) if settings.recipe else ""
    Specification(use=settings.use, settings=settings.with_, recipe=folder).maker()
    sessions = settings.workers * settings.sessions_per_worker
    return {"environment": settings.served_name, "use": settings.use, "sessions": sessions}


async def serve(settings: EnvironmentSettings, life: Lifecycle) -> None:
    """Start, serve, stop."""
    metrics = Metrics()
    pool = WorkerPool(settings, metrics=metrics)
    sessions = Sessions(pool, settings=settings, metrics=metrics)
    add = environment_service_pb2_grpc.add_EnvironmentServiceServicer_to_server
    server = GrpcServer([(add, EnvironmentServicer(sessions))], settings=settings, metrics=metrics)

    async def status() -> Mapping[str, object]:
        return {
            "environment": settings.served_name,
            "use": settings.use,
            "workers": {"wanted": settings.workers, "ready": pool.num_ready},
            "sessions": {"limit": settings.workers * settings.sessions_per_worker, "open": sessions.num_open},
        }

    async def workers() -> str | None:
        return None if pool.num_ready else "no worker is loaded yet; the log says why"

    pages = Pages(settings, life=life, metrics=metrics, status=status, readiness={"workers": workers})

    def publish() -> None:
        addresses = Addresses(grpc=server.address, http=pages.address, probe=pages.probe_address)
        lifecycle.write_address_file(settings.address_file, addresses)
        log.info("environment.started", name=settings.served_name, grpc=addresses.grpc, http=addresses.http)

    await lifecycle.run_services([pages, pool, sessions, server], lifecycle=life, on_started=publish)
