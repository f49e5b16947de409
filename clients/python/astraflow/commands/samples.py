"""`astraflow samples`: what was trained on and what was dropped, from the archive of a run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from astraflow.client import Client
from astraflow.columns import decode_columns
from astraflow.commands.options import grouped_options
from astraflow.commands.server import RunOptions
from astraflow.commands.token_texts import TokenTexts
from astraflow.commands.wording import as_json, console, print_json, table
from astraflow.dataflow.v1 import sample_service_pb2 as pb
from astraflow.errors import InvalidArgumentError

if TYPE_CHECKING:
    from astraflow.dataflow.v1.sample_pb2 import Sample

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Look at what was trained on or dropped.")

_PAGE = 200
_TIMEOUT_S = 120.0
_DEEPEST = 3.0
"""Natural log of the least likely token that colours still tell apart."""


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
    """Show the tokens of one sample; those that are trained on by how likely the engine found them."""
    texts = None if tokenizer is None else TokenTexts.read(tokenizer)
    with options.client() as client:
        request = pb.GetSamplesRequest(run_id=options.run_id, sample_ids=[sample])
        (content,) = client.call(client.samples.GetSamples, request, timeout_s=_TIMEOUT_S).samples
    if options.json_:
        print_json(_content(content, texts))
        return
    item = content.sample.item
    typer.echo(
        f"{item.trajectory_id} of {content.sample.policy_id}, step {content.sample.step}: {content.sample.reason}, "
        f"reward {item.reward:g}, task {item.task_id}, versions {item.min_version} to {item.max_version}"
    )
    console().print(coloured(content, texts))


def coloured(content: pb.SampleContent, texts: TokenTexts | None) -> Text:
    """Return the tokens: dim where they are not trained on, else redder the less likely they were."""
    columns, shown = decode_columns(content.trajectory), Text()
    for token_id, is_trained, logprob in zip(
        columns.token_ids.tolist(), columns.loss_mask.tolist(), columns.logprobs.tolist(), strict=True
    ):
        text = f"{token_id} " if texts is None else texts.of(token_id)
        faded = round(255 * (1 - min(-logprob, _DEEPEST) / _DEEPEST))
        shown.append(text, style=f"rgb(255,{faded},{faded})" if is_trained else "dim")
    return shown


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


def _content(content: pb.SampleContent, texts: TokenTexts | None) -> dict[str, Any]:
    columns = decode_columns(content.trajectory)
    ids = columns.token_ids.tolist()
    return as_json(content.sample) | {
        "token_ids": ids,
        "texts": None if texts is None else [texts.of(token_id) for token_id in ids],
        "loss_mask": columns.loss_mask.tolist(),
        "logprobs": columns.logprobs.tolist(),
        "version_spans": columns.version_spans,
    }
