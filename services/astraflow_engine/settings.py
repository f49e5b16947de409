"""Settings of the engine process: what to serve, where, and how much of the machine it may take.

Invariant: what passes here can be served; bounds that depend on the model (context length) are checked once
more against its config in `assembly.py`. Options come from the command line, then from `ASTRAFLOW_*`
variables.
"""

from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, FilePath, model_validator

from astraflow.connecting.connection import is_loopback
from astraflow_kit.settings import CommandOption, Port, ProcessSettings


class EngineSettings(ProcessSettings):
    """One engine process. Names follow SGLang's options where SGLang has the option."""

    model_path: Annotated[Path, CommandOption("The model")]
    """Folder of a dense Llama, Qwen2 or Qwen3 checkpoint: config.json and safetensors."""
    weight_version: str = "default"
    """Name that tokens carry until the first weight update."""
    seed: int = 0
    """Seed of all draws; with a request's own sampling_seed the request repeats exactly."""
    context_length: Annotated[int, Field(ge=0), CommandOption("Size and speed")] = 0
    """Largest prompt plus generated tokens; 0 takes the model's, at most 4096."""
    max_running_requests: Annotated[int, Field(ge=1, le=4096)] = 128
    """Slots: requests that generate at the same time."""
    max_queued_requests: Annotated[int, Field(ge=1, le=100_000)] = 2048
    """Requests that may wait for a slot before more are refused with 503."""
    max_prefill_tokens: Annotated[int, Field(ge=1)] = 8192
    """Prompt tokens taken in at once, padding included."""
    num_threads: Annotated[int, Field(ge=1, le=256)] = 1
    """Torch threads of a pass. More than one pays only for models far beyond a few million parameters."""
    request_timeout_s: Annotated[float, Field(gt=0, le=86_400)] = 600.0
    """Age in seconds at which a request is aborted with 504, queueing and pauses included."""
    host: Annotated[str, CommandOption("Serving")] = "127.0.0.1"
    """Address of the HTTP API, which has no login: anything but loopback needs `insecure`."""
    port: Port = 30000
    """Port of the HTTP API; 0 takes a free one and reports it in the address file."""
    api_key_file: FilePath | None = None
    """File with the key that every path but /health asks for, as `Authorization: Bearer`; a node makes one."""
    insecure: bool = False
    """Allow an address that others can reach. For closed test networks only."""

    @model_validator(mode="after")
    def _address_is_safe(self) -> Self:
        if not (is_loopback(self.host) or self.insecure):
            raise ValueError(
                f"host {self.host!r} is reachable from other machines and the HTTP API has no login; "
                "bind 127.0.0.1, or accept the risk with insecure"
            )
        return self
