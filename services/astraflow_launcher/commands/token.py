"""`astraflow token`: the keys that sign tokens, tokens themselves, and what a token says."""

import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from astraflow.commands.options import grouped_options
from astraflow.commands.server import ServerOptions
from astraflow.commands.wording import console, print_json, span_text, table
from astraflow.dataflow.v1 import admin_service_pb2 as pb
from astraflow.errors import InvalidArgumentError
from astraflow.join import is_join_string, parse_join
from astraflow_kit.identity.tokens import ROLES
from astraflow_launcher.issuing.keys import create_keys, rotate_keys
from astraflow_launcher.issuing.secret_files import keep_private, require_absent, write_file
from astraflow_launcher.issuing.tokens import (
    Grant,
    describe_join,
    describe_token,
    issue_token,
    read_ttl,
    revoke_in_file,
)

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Make the keys that sign tokens, and tokens; read and revoke them.",
)

OutOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Write it there, readable only by you, and print nothing of it."),
]


@dataclass(frozen=True, kw_only=True)
class GrantOptions:
    """What every command that issues a token takes."""

    role: Annotated[
        str, typer.Option(metavar="ROLE", help=f"What the caller may do: {', '.join(ROLES)}.")
    ] = "rollout"
    runs: Annotated[
        list[str] | None,
        typer.Option("--run", metavar="RUN", help="Run it is for; repeat it, or '*' for all."),
    ] = None
    pools: Annotated[
        list[str] | None,
        typer.Option("--pool", metavar="POOL", help="Pool it is for; repeat it. Default: all."),
    ] = None
    policies: Annotated[
        list[str] | None,
        typer.Option("--policy", metavar="POLICY", help="Policy it is for; repeat it. Default: all."),
    ] = None
    nodes: Annotated[
        list[str] | None,
        typer.Option(
            "--node",
            metavar="PATTERN",
            help="Node that its holder may be, as spot-1 or 'spot-*'; repeat it, or '*' for any. Default: SUBJECT.",
        ),
    ] = None
    subject: Annotated[str, typer.Option(help="Who it is for, as servers log it. Default: its role.")] = ""
    audience: Annotated[str, typer.Option(help="token_audience of the servers it is for.")] = "astraflow"
    ttl: Annotated[str, typer.Option(metavar="30m|12h|30d", help="How long it is valid.")] = "30d"
    key: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Key that signs (`astraflow token keys`).")
    ] = None

    def issue(self) -> str:
        """Issue the token. Raises InvalidArgumentError."""
        if self.key is None:
            raise InvalidArgumentError(
                "give --key FILE, the key that signs; make one: astraflow token keys FILE"
            )
        grant = Grant(
            role=self.role,
            runs=self.runs or (),
            pools=self.pools or ("*",),
            policies=self.policies or ("*",),
            nodes=self.nodes or (),
            subject=self.subject,
            audience=self.audience,
        )
        return issue_token(grant, ttl=read_ttl(self.ttl), key=self.key)


@app.command()
def keys(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The private key.")],
    rotate: Annotated[
        bool, typer.Option("--rotate", help="Replace it; tokens of the key before are still accepted.")
    ] = False,
) -> None:
    """Make the key that signs tokens, and the public keys beside it that servers verify them with (token_keys_file)."""
    public_set = rotate_keys(file) if rotate else create_keys(file)
    typer.echo(f"{public_set}  public keys: token_keys_file of every server")
    typer.echo(f"{file}  the private key: only for whoever issues tokens")


@app.command()
@grouped_options
def create(options: GrantOptions, out: OutOption = None) -> None:
    """Issue a token and print it, or write it to a file. It is a secret until it ends."""
    hand_out(options.issue(), out=out)


@app.command()
def inspect(
    file: Annotated[
        Path | None,
        typer.Argument(metavar="[FILE]", help="A token or a join string. Default: standard input."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what a token or a join string holds; never its signature. Whether a server accepts it only a server knows."""
    found = _described(_read(file))
    if as_json:
        print_json(found)
        return
    shown = table("", "")
    for name, value in found.items():
        shown.add_row(name, ", ".join(map(str, value)) if isinstance(value, list) else str(value))
    console().print(shown)


@app.command()
@grouped_options
def revoke(
    options: ServerOptions,
    file: Annotated[
        Path | None,
        typer.Argument(metavar="[FILE]", help="A token or a join string. Default: standard input."),
    ] = None,
    token_id: Annotated[
        str, typer.Option("--id", metavar="JTI", help="Its id, where the token is not at hand.")
    ] = "",
    revoked_tokens_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Ask no server: append it to the revoked_tokens_file of servers."),
    ] = None,
) -> None:
    """Refuse a token before it ends: at every dataflow server over one Redis, or in a file that servers read."""
    said = {"jti": token_id} if token_id else _described(_read(file))
    if not said.get("jti"):
        raise InvalidArgumentError(
            "the token has no id (jti), by which it could be revoked; replace the key instead"
        )
    if revoked_tokens_file is not None:
        revoke_in_file(revoked_tokens_file, said)
        typer.echo(f"{revoked_tokens_file}  {said['jti']} is refused by servers that read it")
        return
    revoked = pb.RevokedToken(token_id=said["jti"])
    if "exp" in said:
        revoked.expire_time.FromJsonString(said["exp"])
    with options.client() as client:
        answer = client.call(client.admin.RevokeToken, pb.RevokeTokenRequest(token=revoked))
    before = " (as before)" if answer.was_revoked else ""
    options.show(answer, lambda _: f"{said['jti']} is refused by every server of this Redis{before}")


def hand_out(secret: str, *, out: Path | None) -> None:
    """Print a secret, or write it where only its owner reads it, and say for how long it is valid on stderr."""
    described = _described(secret)
    if out is None:
        keep_private(sys.stdout)
        typer.echo(secret)
    else:
        require_absent(out)
        write_file(out, f"{secret}\n".encode())
        typer.echo(f"{out}  {described['role']} for {', '.join(described['runs'])}")
    typer.echo(f"expires {described['expires']} ({described['exp']}), id {described['jti']}", err=True)


def _described(text: str) -> dict[str, Any]:
    """What a token or a join string says, with its end in words."""
    joins = is_join_string(text)
    said = describe_join(parse_join(text)) if joins else {}
    token = parse_join(text).token if joins else text.strip()
    if joins and not token:
        return {**said, "token": "none"}
    claims = describe_token(token)
    if "exp" in claims:
        claims["expires"] = _from_now(datetime.fromisoformat(claims["exp"]))
    return {**said, **claims}


def _from_now(time: datetime) -> str:
    seconds = (time - datetime.now(UTC)).total_seconds()
    days = f"{abs(seconds) / 86_400:.0f} days" if abs(seconds) > 2 * 86_400 else span_text(abs(seconds))
    return f"in {days}" if seconds > 0 else f"{days} ago"


def _read(file: Path | None) -> str:
    if file is None:
        return sys.stdin.read().strip()
    try:
        return file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgumentError(f"{file} cannot be read as text: {error}") from error
