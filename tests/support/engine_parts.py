"""The engine's parts assembled inside the test process, for tests that need to reach behind the HTTP API."""

from pathlib import Path

from astraflow_engine.core import CoreLimits, EngineCore
from astraflow_engine.model_config import load_model_config
from astraflow_engine.requests import GenerateRequest, SamplingParams
from astraflow_engine.scheduler import AdmissionLimits
from astraflow_engine.service import EngineService
from astraflow_engine.weights import load_weights
from astraflow_engine.worker import EngineWorker
from astraflow_kit.clock import SystemClock

DEADLINE_S = 20.0


def make_worker(folder: Path, *, max_in_flight: int = 16, num_slots: int = 4) -> EngineWorker:
    """A worker that is not started yet."""
    config, clock = load_model_config(folder), SystemClock()
    admission = AdmissionLimits(max_waiting=16, max_prefill_tokens=200)
    limits = CoreLimits(num_slots=num_slots, capacity=config.max_positions, admission=admission)
    weights = load_weights(folder, config=config)
    core = EngineCore(config, weights, limits=limits, seed=0, version="0", clock=clock)
    return EngineWorker(core, max_in_flight=max_in_flight, clock=clock)


def make_service(folder: Path, worker: EngineWorker, *, request_timeout_s: float = 20.0) -> EngineService:
    """The service over a worker."""
    config, clock = load_model_config(folder), SystemClock()
    return EngineService(worker, config, model_path=folder, request_timeout_s=request_timeout_s, clock=clock)


def greedy(rid: str, *, max_new_tokens: int = 6) -> GenerateRequest:
    """A greedy request of three prompt tokens that ignores end tokens."""
    params = SamplingParams(max_new_tokens=max_new_tokens, temperature=0.0, ignore_eos=True)
    return GenerateRequest(rid=rid, prompt=(3, 4, 5), params=params)
