"""What an engine says of itself at /server_info: its release, how it schedules, how many sequences it samples at once.

Invariant: an engine whose version spans or prefixes a node could not believe never serves one: `read_server_info`
refuses it and says what to do. The supported releases of SGLang are stated here and nowhere else in the code; pure,
called by `http`.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from astraflow.errors import InvalidArgumentError
from astraflow_raas.engine.base import Arithmetic
from astraflow_raas.engine.changed_elements import LOADER
from astraflow_raas.engine.transport import brief

SUPPORTED_SGLANG = ((0, 5, 19), (0, 5, 23))
"""The first and the last release. Before it an answer names one version for all of its tokens; whoever raises the last
one runs tests/contract against it."""

_EMBEDDED = "astraflow"


class EngineUnsuitable(InvalidArgumentError):
    """This node cannot work with this engine, however often it tries."""

    reason = "ENGINE_UNSUITABLE"


@dataclass(frozen=True, kw_only=True)
class ServerInfo:
    """What matters to a node."""

    is_embedded: bool
    """It is astraflow_engine, whose weights are as they were when it refuses an update."""
    slots_per_rank: int
    """Sequences that each data-parallel rank samples at once."""
    num_ranks: int
    arithmetic: Arithmetic
    keeps_prefixes: bool = True
    """Calls find prefixes that others computed."""
    tp_size: int = 1
    records_experts: bool = False
    """It says which experts tokens went to, where it is asked."""
    why_whole: str = ""
    """Why it can load whole models only; empty when it can do with changed elements."""


def read_server_info(info: object, *, where: str) -> ServerInfo:
    """Raises EngineUnsuitable for an engine that a node cannot use; `where` names it in the message."""
    if not isinstance(info, Mapping):
        raise EngineUnsuitable(f"{where} is no SGLang server: /server_info says {brief(info)}")
    is_embedded = info.get("engine") == _EMBEDDED
    if not is_embedded:
        _require_release(info, where=where)
        _require_exact_spans(info, where=where)
    states = info.get("internal_states")
    try:
        slots = [int(state["effective_max_running_requests_per_dp"]) for state in states or ()]
    except (KeyError, TypeError, ValueError):
        slots = []
    if not slots or min(slots) < 1:
        raise EngineUnsuitable(
            f"{where} does not say how many requests it runs at once (internal_states of /server_info: {brief(states)})"
        )
    return ServerInfo(
        is_embedded=is_embedded,
        slots_per_rank=min(slots),
        num_ranks=len(slots),
        arithmetic=Arithmetic.FLOAT32 if is_embedded else _arithmetic(info),
        keeps_prefixes=not info.get("disable_radix_cache"),
        tp_size=int(info.get("tp_size") or 1),
        records_experts=info.get("enable_return_routed_experts") is True,
        why_whole=_why_whole(info, num_ranks=len(slots)),
    )


def _why_whole(info: Mapping[str, Any], *, num_ranks: int) -> str:
    if LOADER not in (info.get("custom_weight_loader") or ()):
        return f"it was not started with --custom-weight-loader {LOADER}"
    if num_ranks > 1:
        return f"it has {num_ranks} data-parallel ranks, and SGLang updates one from tensors"
    if _arithmetic(info) is Arithmetic.QUANTIZED:
        return "it quantises what it loads"
    if info.get("speculative_algorithm"):
        return "it has a draft model"
    return "" if int(info.get("pp_size") or 1) == 1 else "it is pipeline parallel"


def _arithmetic(info: Mapping[str, Any]) -> Arithmetic:
    stored = str(info.get("kv_cache_dtype", "auto"))
    if info.get("quantization") or stored.startswith(("fp8", "fp4", "int")):
        return Arithmetic.QUANTIZED
    # `auto` is the checkpoint's type, which is bfloat16 for what we publish.
    return Arithmetic.FLOAT32 if info.get("dtype") in ("float32", "float") else Arithmetic.HALF


def _require_release(info: Mapping[str, Any], *, where: str) -> None:
    named = re.match(r"(\d+)\.(\d+)\.(\d+)", str(info.get("version")))
    first, last = SUPPORTED_SGLANG
    if named is None or not first <= tuple(map(int, named.groups())) <= last:
        low, high = (".".join(map(str, release)) for release in SUPPORTED_SGLANG)
        raise EngineUnsuitable(
            f"{where} is SGLang {info.get('version', 'of an unknown release')}, this node works with {low} to {high}; "
            f"install one of them where it runs: pip install sglang=={high}"
        )


def _require_exact_spans(info: Mapping[str, Any], *, where: str) -> None:
    if info.get("disable_overlap_schedule") is not True:
        # The token that is in flight when weights are swapped would be labelled with the next version.
        raise EngineUnsuitable(
            f"{where} overlaps scheduling with sampling, so it labels one token of each sequence wrongly at every "
            "change of weights; start it with --disable-overlap-schedule"
        )
