"""`astraflow samples`: what was trained on and what was dropped, from the archive of a run."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from astraflow.client import Client
from astraflow.columns import decode_columns
from astraflow.commands.options import grouped_options
from astraflow.commands.server import RunOptions
from astraflow.commands.wording import as_json, console, print_json, table
from astraflow.dataflow.v1 import sample_service_pb2 as pb
from astraflow.errors import InvalidArgumentError
from astraflow.samples.content import sample_values, trainer_logprobs
from astraflow.samples.parquet import parquet
from astraflow.samples.token_texts import TokenTexts

if TYPE_CHECKING:
    from rich.table import Table

    from astraflow.dataflow.v1.sample_pb2 import Sample

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Look at what was trained on or dropped.")

_PAGE = 200
_READ_AT_ONCE = 32
_TIMEOUT_S = 120.0
_DEEPEST = 3.0
"""Natural log of the least likely token that colours still tell apart."""
_DEEPEST_DIFFERENCE = math.log(2)
"""Largest distance between trainer and engine that colours still tell apart: a ratio of 2."""
_BY_ENGINE = "by the engine's log-prob: redder the less likely it found a token, deepest from -3 on"
_BY_DIFFERENCE = (
    "by trainer's less engine's log-prob: red where the trainer found a token less likely, blue where more, deepest "
    "from a ratio of 2 on"
)


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """Which samples are listed."""

    policy: Annotated[str, typer.Option(help="Of this policy.")] = ""
    steps: Annotated[
        str, typer.Option(metavar="FIRST:LAST", help="Of these steps; `12`, `12:` and `:12`, too.")
    ] = ""
    reason: Annotated[
        list[str] | None, typer.Option(help="`trained`, or why it was dropped; repeatable.")
    ] = None
    source: Annotated[str, typer.Option(help="Of this source.")] = ""
    task: Annotated[str, typer.Option(metavar="TASK_ID", help="Of this task.")] = ""
    version: Annotated[int | None, typer.Option(min=0, help="Sampled, at least partly, by this version.")] = (
        None
    )
    min_reward: Annotated[float | None, typer.Option(help="With at least this reward.")] = None
    max_reward: Annotated[float | None, typer.Option(help="With at most this reward.")] = None

    def request(self, run_id: str) -> pb.ListSamplesRequest:
        """What to ask for. Raises InvalidArgumentError for steps that are none."""
        first, last = _range(self.steps)
        return pb.ListSamplesRequest(
            run_id=run_id,
            policy_id=self.policy,
            min_step=first,
            max_step=last,
            reasons=self.reason or [],
            source=self.source,
            task_id=self.task,
            version=self.version,
            min_reward=self.min_reward,
            max_reward=self.max_reward,
            page_size=_PAGE,
        )


@app.command("list")
@grouped_options
def list_(
    options: RunOptions,
    chosen: Chosen,
    limit: Annotated[int, typer.Option(min=1, help="Show at most this many.")] = 50,
) -> None:
    """List samples by policy, step and time."""
    request = chosen.request(options.run_id)
    with options.client() as client:
        found = list(islice(_listed(client, request), limit + 1))
    shown, more = found[:limit], len(found) > limit
    if options.json_:
        print_json([as_json(sample) for sample in shown])
        return
    if not shown:
        typer.echo("the archive has no such sample (yet)")
        return
    right = ("step", "reward", "tokens", "versions")
    rows = table("sample", "step", "reason", "reward", "tokens", "versions", "task", "source", right=right)
    for sample in shown:
        rows.add_row(*_cells(sample))
    console().print(rows)
    if more:
        typer.echo(f"and more; --limit shows more than {limit}")


@app.command()
@grouped_options
def show(
    options: RunOptions,
    sample: Annotated[str, typer.Argument(metavar="SAMPLE", help="Sample, as `list` shows it.")],
    tokenizer: Annotated[
        Path | None, typer.Option(help="Folder with the policy's tokenizer.json; ids are shown without it.")
    ] = None,
) -> None:
    """Show the tokens of one sample; those that are trained on by what trainer and engine made of them."""
    texts = None if tokenizer is None else TokenTexts.read(tokenizer)
    with options.client() as client:
        request = pb.GetSamplesRequest(run_id=options.run_id, sample_ids=[sample])
        (content,) = client.call(client.samples.GetSamples, request, timeout_s=_TIMEOUT_S).samples
    if options.json_:
        print_json(sample_values(content, texts))
        return
    item = content.sample.item
    typer.echo(
        f"{item.trajectory_id} of {content.sample.policy_id}, step {content.sample.step}: {content.sample.reason}, "
        f"reward {item.reward:g}, task {item.task_id}, versions {item.min_version} to {item.max_version}"
    )
    screen, compares = console(), bool(content.trainer_logprobs)
    typer.echo(_BY_DIFFERENCE if compares else _BY_ENGINE)
    screen.print(
        differences(content, texts)
        if compares and (screen.no_color or not screen.color_system)
        else coloured(content, texts)
    )


@app.command()
@grouped_options
def export(
    options: RunOptions,
    chosen: Chosen,
    to: Annotated[
        Path, typer.Option("--to", metavar="FILE", help="New file that ends with .jsonl or .parquet.")
    ],
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="Folder with the policy's tokenizer.json; texts are left out without it."),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Write at most this many.")] = 1000,
) -> None:
    """Write samples with their tokens, as `show --json` has them: a line or a row each."""
    if to.suffix not in (".jsonl", ".parquet"):
        raise InvalidArgumentError(f"--to {to}: a file ends with .jsonl or .parquet")
    if to.exists():
        raise InvalidArgumentError(f"--to {to}: it exists already; name a new file")
    texts = None if tokenizer is None else TokenTexts.read(tokenizer)
    with options.client() as client:
        request = chosen.request(options.run_id)
        ids = [sample.sample_id for sample in islice(_listed(client, request), limit)]
        samples = [sample_values(content, texts) for content in _contents(client, request.run_id, ids)]
    if to.suffix == ".jsonl":
        to.write_text("".join(f"{json.dumps(sample, ensure_ascii=False)}\n" for sample in samples))
    else:
        to.write_bytes(parquet(samples))
    typer.echo(f"{len(samples)} samples are in {to}")


def _contents(client: Client, run_id: str, sample_ids: Sequence[str]) -> Iterator[pb.SampleContent]:
    left = list(sample_ids)
    while left:
        request = pb.GetSamplesRequest(run_id=run_id, sample_ids=left[:_READ_AT_ONCE])
        found = client.call(client.samples.GetSamples, request, timeout_s=_TIMEOUT_S).samples
        yield from found
        left = left[len(found) :]


def coloured(content: pb.SampleContent, texts: TokenTexts | None) -> Text:
    """Return the tokens: dim where nothing is known, else by trainer less engine where the trainer's part is there,
    and by the engine alone where not.
    """
    shown, compares = Text(), bool(content.trainer_logprobs)
    for token in _tokens(content, texts):
        value = token.difference if compares else token.engine
        shown.append(
            f"{token.text} " if texts is None else token.text, style=_style(value, compares=compares)
        )
    return shown


def differences(content: pb.SampleContent, texts: TokenTexts | None) -> Table:
    """Return a line for each token: what engine and trainer made of it, in columns; for where there are no colours."""
    figures = ("engine", "trainer", "trainer - engine")
    rows = table("token", *figures, right=figures)
    for token in _tokens(content, texts):
        values = (token.engine, token.trainer, token.difference)
        cells = ["" if value is None else f"{value:.4f}" for value in values]
        rows.add_row(Text(token.text if texts is None else repr(token.text)), *cells)
    return rows


@dataclass(frozen=True, kw_only=True)
class _Token:
    text: str
    engine: float | None
    """Log-prob; None where it was not sampled."""
    trainer: float | None
    """Log-prob; None where it was not trained on, or that is not known."""

    @property
    def difference(self) -> float | None:
        return None if self.engine is None or self.trainer is None else self.trainer - self.engine


def _tokens(content: pb.SampleContent, texts: TokenTexts | None) -> list[_Token]:
    columns = decode_columns(content.trajectory)
    ids, mask = columns.token_ids.tolist(), columns.loss_mask.tolist()
    engine = [value if held else None for value, held in zip(columns.logprobs.tolist(), mask, strict=True)]
    trainer = trainer_logprobs(content) or [None] * len(ids)
    return [
        _Token(text=str(token_id) if texts is None else texts.of(token_id), engine=behind, trainer=ahead)
        for token_id, behind, ahead in zip(ids, engine, trainer, strict=True)
    ]


def _style(value: float | None, *, compares: bool) -> str:
    if value is None:
        return "dim"
    deepest = _DEEPEST_DIFFERENCE if compares else _DEEPEST
    faded = round(255 * (1 - min(abs(value), deepest) / deepest))
    return f"rgb({faded},{faded},255)" if compares and value > 0 else f"rgb(255,{faded},{faded})"


def _listed(client: Client, request: pb.ListSamplesRequest) -> Iterator[Sample]:
    while True:
        page = client.call(client.samples.ListSamples, request, timeout_s=_TIMEOUT_S)
        yield from page.samples
        request.page_token = page.next_page_token
        if not page.next_page_token:
            return


def _range(steps: str) -> tuple[int, int]:
    first, colon, last = steps.partition(":")
    try:
        return int(first or 0), int(last or 0) if colon else int(first or 0)
    except ValueError as error:
        raise InvalidArgumentError(
            f"--steps {steps!r} is no range of steps; give 12, 12:, :12 or 10:20"
        ) from error


def _cells(sample: Sample) -> tuple[str, ...]:
    item = sample.item
    versions = "–".join(str(version) for version in sorted({item.min_version, item.max_version}))
    figures = (f"{item.reward:g}", str(item.num_tokens), versions)
    return (sample.sample_id, str(sample.step), sample.reason, *figures, item.task_id, item.source)
