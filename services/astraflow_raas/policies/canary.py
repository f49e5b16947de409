"""Proof that an engine samples with the weights it was given, asked for after every update before anybody trusts it.

Invariant: an engine whose proof fails is replaced; one that only could not be asked keeps its calls, and whoever
watches its health decides. `weight_sync` takes any `Canary`; `sample_a_little` is the one that needs to know nothing of
the weights.
"""

from typing import Protocol
from uuid import uuid4

from astraflow_kit.log import get_logger
from astraflow_raas.engine.base import (
    ABORTED,
    Engine,
    EngineDoubtful,
    EngineFaulty,
    EngineRefused,
    EngineUnavailable,
    GenerateCall,
)
from astraflow_raas.policies.served_policy import ServedPolicy

log = get_logger(__name__)

_NUM_TOKENS = 4


class Canary(Protocol):
    """Asks an engine for something whose answer is known."""

    async def __call__(self, engine: Engine, policy: ServedPolicy, *, version: int) -> None:
        """Raises EngineDoubtful when the answer is not that of `version`."""


async def sample_a_little(engine: Engine, policy: ServedPolicy, *, version: int) -> None:
    """A few greedy tokens: finite log-probs, known ids, no more than asked for, all under `version`."""
    call = GenerateCall(
        rid=f"canary-{version}-{uuid4().hex};",
        prompt_ids=(0,),
        max_new_tokens=_NUM_TOKENS,
        temperature=0.0,
        top_p=1.0,
        top_k=0,
        seed=0,
    )
    try:
        (generation,) = await engine.generate([call])
        policy.check(call, generation)
    except EngineUnavailable as error:
        log.warning("engine.canary_unanswered", version=version, message=error.message)
        return
    except (EngineFaulty, EngineRefused) as error:
        raise EngineDoubtful(f"after the update to version {version}: {error.message}") from error
    versions = {span.version for span in generation.spans}
    if generation.finish_reason != ABORTED and versions != {version}:
        raise EngineDoubtful(
            f"after the update to version {version} the engine samples as {sorted(versions)}"
        )
