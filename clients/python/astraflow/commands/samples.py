"""`astraflow samples`: what was trained on and what was dropped, from the archive of a run."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from astraflow.client import Client
from astraflow.columns import decode_columns
from astraflow.commands.options import grouped_options
from astraflow.commands.server import RunOptions
from astraflow.commands.wording import as_json, console, print_json, say, table
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
    role: Annotated[str, typer.Option(help="Of this role.")] = ""
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
    min_tokens: Annotated[int | None, typer.Option(min=0, help="With at least so many tokens.")] = None
    max_tokens: Annotated[int | None, typer.Option(min=0, help="With at most so many tokens.")] = None
    text: Annotated[
        str, typer.Option(help="With this in its text, whatever its case; needs --tokenizer.")
    ] = ""

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
            role=self.role,
            min_tokens=self.min_tokens,
            max_tokens=self.max_tokens,
            page_size=_PAGE,
        )


@app.command("list")
@grouped_options
def list_(
    options: RunOptions,
    chosen: Chosen,
    limit: Annotated[int, typer.Option(min=1, help="Show at most this many.")] = 50,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Folder with the policy's tokenizer.json, for --text.")
    ] = None,
) -> None:
    """List samples by policy, step and time."""
    texts = None if tokenizer is None else TokenTexts.read(tokenizer)
    with options.client() as client:
        found = list(islice(_found(client, chosen, run_id=options.run_id, texts=texts), limit + 1))
    shown, more = found[:limit], len(found) > limit
    if options.json_:
        print_json([as_json(sample) for sample in shown])
        return
    if not shown:
        say("the archive has no such sample (yet)")
        return
    right = ("step", "reward", "tokens", "versions")
    rows = table("sample", "step", "reason", "reward", "tokens", "versions", "task", "source", right=right)
    for sample in shown:
        rows.add_row(*_cells(sample))
    console().print(rows)
    if more:
        say(f"and more; --limit shows more than {limit}")


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
        advantage = _advantage(client, content.sample, run_id=options.run_id)
    if options.json_:
        print_json(sample_values(content, texts))
        return
    item = content.sample.item
    say(
        f"{item.trajectory_id} of {content.sample.policy_id}, step {content.sample.step}: {content.sample.reason}, "
        f"reward {item.reward:g}{advantage}, task {item.task_id}, versions {item.min_version} to {item.max_version}"
    )
    screen, compares = console(), bool(content.trainer_logprobs)
    say(_BY_DIFFERENCE if compares else _BY_ENGINE)
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
        found = _found(client, chosen, run_id=options.run_id, texts=texts)
        ids = [sample.sample_id for sample in islice(found, limit)]
        samples = [sample_values(content, texts) for content in _contents(client, options.run_id, ids)]
    if to.suffix == ".jsonl":
        to.write_text("".join(f"{json.dumps(sample, ensure_ascii=False)}\n" for sample in samples))
    else:
        to.write_bytes(parquet(samples))
    say(f"{len(samples)} samples are in {to}")


def _found(client: Client, chosen: Chosen, *, run_id: str, texts: TokenTexts | None) -> Iterator[Sample]:
    """The samples that were chosen; where a text is wanted, the tokens of all others are read for it."""
    listed = _listed(client, chosen.request(run_id))
    if not chosen.text:
        return listed
    if texts is None:
        raise InvalidArgumentError("--text needs --tokenizer FOLDER: what is in the archive are token ids")
    wanted, ids = chosen.text.casefold(), (sample.sample_id for sample in listed)
    return (
        content.sample
        for part in iter(lambda: list(islice(ids, _READ_AT_ONCE)), [])
        for content in _contents(client, run_id, part)
        if wanted in "".join(map(texts.of, decode_columns(content.trajectory).token_ids.tolist())).casefold()
    )


def _advantage(client: Client, sample: Sample, *, run_id: str) -> str:
    """How far the reward is from the mean of those of its group that the archive has, or nothing."""
    same = pb.ListSamplesRequest(
        run_id=run_id, policy_id=sample.policy_id, task_id=sample.item.task_id, page_size=_PAGE
    )
    rewards = [
        each.item.reward
        for each in client.call(client.samples.ListSamples, same, timeout_s=_TIMEOUT_S).samples
        if each.item.group_id == sample.item.group_id
    ]
    if len(rewards) < 2:
        return ""
    return f" ({sample.item.reward - fmean(rewards):+.3g} over the mean of {len(rewards)} of its group)"


def _contents(client: Client, run_id: str, sample_ids: Sequence[str]) -> Iterator[pb.SampleContent]:
    left = list(sample_ids)
    while left:
        request = pb.GetSamplesRequest(run_id=run_id, sample_ids=left[:_READ_AT_ONCE])
        found = client.call(client.samples.GetSamples, request, timeout_s=_TIMEOUT_S).samples
        yield from found
        left = left[len(found) :]


def coloured(content: pb.SampleContent, texts: TokenTexts | None) -> Text:
    """Return the tokens: dim where nothing is known, else by trainer less engine where the trainer's part is there,
    and by the engine alone where not. Turns begin with their role, and `[v12]` stands where version 12 begins.
    """
    shown, compares = Text(), bool(content.trainer_logprobs)
    turns, versions = _begins(content)
    for place, token in enumerate(_tokens(content, texts)):
        if place in turns:
            shown.append(f"\n{turns[place]}\n" if place else f"{turns[place]}\n", style="bold")
        if place in versions:
            shown.append(f"[v{versions[place]}]", style="bold")
        value = token.difference if compares else token.engine
        shown.append(
            f"{token.text} " if texts is None else token.text, style=_style(value, compares=compares)
        )
    return shown


def differences(content: pb.SampleContent, texts: TokenTexts | None) -> Table:
    """Return a line for each token: what engine and trainer made of it, in columns; for where there are no colours."""
    figures = ("version", "engine", "trainer", "trainer - engine")
    rows = table("token", *figures, right=figures)
    (turns, versions), version = _begins(content), ""
    for place, token in enumerate(_tokens(content, texts)):
        if place in turns:
            rows.add_row(Text(turns[place], style="bold"))
        version = str(versions.get(place, version))
        values = (token.engine, token.trainer, token.difference)
        cells = ["" if value is None else f"{value:.4f}" for value in values]
        shown = Text(token.text if texts is None else repr(token.text))
        rows.add_row(shown, version if token.engine is not None else "", *cells)
    return rows


def _begins(content: pb.SampleContent) -> tuple[dict[int, str], dict[int, int]]:
    """Which turn, by role and reward, and which version begins at which token."""
    turns = {
        span.start: f"{span.role or 'turn'}{f', reward {span.reward:g}' if span.reward else ''}:"
        for span in content.trajectory.turn_spans
    }
    return turns, {span.start: span.version for span in content.trajectory.version_spans}


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
