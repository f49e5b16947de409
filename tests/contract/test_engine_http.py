"""The embedded engine keeps the contract that nodes rely on, and so can be swapped for SGLang.

The table is `support.engine_contract.CHECKS`. To run it against another engine, give `engine` another
parameter: an `EngineUnderTest` with that engine's URL and the folders it can read.
"""

from collections.abc import Iterator

import pytest

from support.engine_contract import CHECKS, EngineUnderTest, make_client
from support.engine_process import running_engine
from support.tiny_qwen import TinyShape, save_tiny_qwen

CONTEXT_LENGTH = 4_096
EMBEDDED = "embedded"

pytestmark = [pytest.mark.slow, pytest.mark.integration, pytest.mark.timeout(180)]


@pytest.fixture(scope="module", params=[EMBEDDED])
def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineUnderTest]:
    if isinstance(request.param, EngineUnderTest):
        yield request.param
        return
    root = tmp_path_factory.mktemp("engine")
    shape = TinyShape(max_positions=CONTEXT_LENGTH)
    first, second = (save_tiny_qwen(root / f"model{seed}", seed=seed, shape=shape) for seed in (0, 1))
    options = ["--weight-version", "0", "--max-running-requests", "8"]
    with running_engine(first, *options, folder=root) as embedded, make_client() as client:
        yield EngineUnderTest(
            url=embedded.url,
            first=first,
            second=second,
            vocab_size=shape.vocab_size,
            context_length=CONTEXT_LENGTH,
            client=client,
        )


@pytest.mark.parametrize("check", CHECKS)
def test_the_engine_keeps_its_contract(engine: EngineUnderTest, check: str) -> None:
    CHECKS[check](engine)
