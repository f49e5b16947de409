"""Settings of the engine process: what to serve, where, and how much of the machine it may take.

Invariant: what passes here can be served; bounds that depend on the model (context length) are checked once
more against its config in `assembly.py`. Options come from the command line, then from `ASTRAFLOW_*`
variables.
"""

from pathlib import Path
from typing import Annotated

from pydantic import Field

from astraflow_kit.settings import DaemonSettings, Port


class EngineSettings(DaemonSettings):
    """One engine process. Names follow SGLang's options where SGLang has the option."""

    model_path: Path
    """Folder of a Hugging Face checkpoint: config.json and safetensors."""
    port: Port = 30000
    """Port of the HTTP API; 0 takes a free one and reports it in the address file."""
    weight_version: str = "default"
    """Name that tokens carry until the first weight update."""
    context_length: Annotated[int, Field(ge=0)] = 0
    """Largest prompt plus generated tokens; 0 takes the model's, at most 4096."""
    max_running_requests: Annotated[int, Field(ge=1, le=4096)] = 128
    """Slots: requests that generate at the same time."""
    max_queued_requests: Annotated[int, Field(ge=1, le=100_000)] = 2048
    """Requests that may wait for a slot before more are refused with 503."""
    max_prefill_tokens: Annotated[int, Field(ge=1)] = 8192
    """Prompt tokens taken in at once, padding included."""
    seed: int = 0
    """Seed of all draws; with a request's own sampling_seed the request repeats exactly."""
    num_threads: Annotated[int, Field(ge=1, le=256)] = 1
    """Torch threads of a pass. More than one pays only for models far beyond a few million parameters."""
    request_timeout_s: Annotated[float, Field(gt=0, le=86_400)] = 600.0
    """A request older than this is aborted and answered 504, queueing and pauses included."""
