"""Every engine keeps the contract that nodes rely on: the embedded one, and SGLang as it is released.

The table is `support.engine_contract.CHECKS`; it runs unchanged against both, so that one can be swapped for the other.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from astraflow.recipe import LoraSettings
from astraflow_raas.engine.command import ATTENTION, lora_args
from support.engine_contract import CHECKS, EngineUnderTest, make_client
from support.engine_process import EngineProcess, running_engine
from support.sglang_server import needs_sglang, running_sglang
from support.tiny_models import TinyShape, save_tiny_adapter, save_tiny_model

CONTEXT_LENGTH = 4_096

pytestmark = [pytest.mark.slow, pytest.mark.integration, pytest.mark.timeout(400)]

Start = Callable[..., AbstractContextManager[EngineProcess]]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(running_engine, id="embedded"),
        pytest.param(running_sglang, id="sglang", marks=[pytest.mark.ci, needs_sglang]),
    ],
)
def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineUnderTest]:
    start: Start = request.param
    root: Path = tmp_path_factory.mktemp("engine")
    # On a CPU SGLang pads the feed-forward layers to multiples of 64, and adapters not.
    shape = TinyShape(max_positions=CONTEXT_LENGTH, intermediate_size=64)
    first, second = (save_tiny_model(root / f"model{seed}", seed=seed, shape=shape) for seed in (0, 1))
    adapters = (
        save_tiny_adapter(root / "all", model=first, seed=1),
        save_tiny_adapter(root / "attention", model=first, seed=2, target_modules=list(ATTENTION)),
    )
    options = ["--weight-version", "0", "--max-running-requests", "8"]
    if start is running_sglang:
        options += [*lora_args([LoraSettings(of="base", rank=4)] * 2), "--lora-backend", "torch_native"]
    with start(first, *options, folder=root) as process, make_client() as client:
        yield EngineUnderTest(
            url=process.url,
            first=first,
            second=second,
            adapters=adapters,
            vocab_size=shape.vocab_size,
            context_length=CONTEXT_LENGTH,
            client=client,
        )


@pytest.mark.parametrize("check", CHECKS)
def test_the_engine_keeps_its_contract(engine: EngineUnderTest, check: str) -> None:
    CHECKS[check](engine)
