"""How busy an engine says it is, in SGLang's words (/v1/loads), checked.

Invariant: figures that cannot be true never count: `read_load` refuses the whole report and says which one. Pure;
called by `http`.
"""

import math
from collections.abc import Mapping

from astraflow_raas.engine.base import EngineFaulty, EngineLoad
from astraflow_raas.engine.transport import brief

_MOST = 1e9


def read_load(answer: object, *, where: str) -> EngineLoad:
    """The load of all data-parallel ranks together. Raises EngineFaulty; `where` names the engine in the message."""
    ranks = answer.get("loads") if isinstance(answer, Mapping) else None
    if not isinstance(ranks, list) or not ranks or not all(isinstance(rank, Mapping) for rank in ranks):
        raise EngineFaulty(f"{where} reports no load: {brief(answer)}")

    def figures(name: str, *, most: float = _MOST) -> list[float]:
        found = [rank.get(name) for rank in ranks]
        for value in found:
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not (is_number and math.isfinite(value) and 0 <= value <= most):
                raise EngineFaulty(f"{where} reports {name} {brief(value)}, which no load has")
        return found

    return EngineLoad(
        running=sum(figures("num_running_reqs")),
        waiting=sum(figures("num_waiting_reqs")),
        # The fullest rank decides: the node sends each call to the one with most free places, not most memory.
        kv_usage=max(figures("token_usage", most=1.01)),
        tokens_per_s=sum(figures("gen_throughput")),
    )
