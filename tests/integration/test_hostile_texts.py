"""What models sampled, tasks ask and nodes say of failures acts on no terminal, whichever command shows it."""

import asyncio
import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

from astraflow._contract.printable import printable
from astraflow.dataflow.v1 import sample_service_pb2 as pb
from astraflow.dataflow.v1.sample_pb2 import Sample
from support.cli import run
from support.dataflow_world import World, until
from support.hostile_texts import HOSTILE

pytestmark = pytest.mark.integration
OWNED = "owned"
"""What is readable of the text wherever it stands."""
SHOWING: dict[str, tuple[str, ...]] = {
    "why": ("why",),
    "dead letters": ("dead-letters", "list"),
    "a sample with its texts": ("samples", "show", "SAMPLE", "--tokenizer", "TOKENIZER"),
    "why, JSON": ("why", "--json"),
    "dead letters, JSON": ("dead-letters", "list", "--json"),
    "a sample, JSON": ("samples", "show", "SAMPLE", "--tokenizer", "TOKENIZER", "--json"),
    "status, JSON": ("status", "--json"),
}


@pytest.fixture
async def told(world: World, tmp_path: Path) -> dict[str, str]:
    """A run in which a task failed with a hostile text, and another was answered in one; what commands need of it."""
    archive = "{write_every_s: 0.1}"
    await world.create_run(
        store_uri=(tmp_path / "objects").as_uri(), archive=archive, dataset="Unevaluated", max_attempts=1
    )
    trainer, node = await world.trainer(), await world.node()
    await world.submit("t1")
    lease = next(lease for lease in await node.lease(8) if lease.task.task_id == "t1")
    await node.fail(lease, "exception", retryable=False, detail=HOSTILE)
    await node.make_ready(2, version=0)
    await trainer.train(1, base_version=0)
    await trainer.mark_durable(1)
    samples = list[Sample]()

    async def is_written() -> bool:
        samples[:] = (await world.ask(pb.ListSamplesResponse, page_size=1, timeout_s=60)).samples
        return bool(samples)

    await until(is_written)
    words = {f"{HOSTILE}{number}": number for number in range(64)}
    Tokenizer(models.WordLevel(words, unk_token=f"{HOSTILE}0")).save(str(tmp_path / "tokenizer.json"))
    return {"SAMPLE": samples[0].sample_id, "TOKENIZER": str(tmp_path)}


@pytest.mark.parametrize("command", SHOWING.values(), ids=list(SHOWING))
async def test_no_command_lets_a_text_act_on_the_terminal(
    world: World, told: dict[str, str], command: tuple[str, ...]
) -> None:
    words = [told.get(word, word) for word in command]
    shown = await asyncio.to_thread(run, *words, "--join", world.address)
    assert shown.status == 0, shown.errors
    assert OWNED in shown.output, "the text is not shown at all"
    assert printable(shown.output) == shown.output
    if "--json" in command:
        assert json.dumps(HOSTILE)[1:-1] in json.dumps(json.loads(shown.output))
