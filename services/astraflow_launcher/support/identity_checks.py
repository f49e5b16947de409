"""The checks of `astraflow doctor` about files that prove who somebody is: do they still, and is the clock right?

Invariant: what is secret in a file is never part of a finding.
"""

from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509

from astraflow.commands.wording import span_text
from astraflow.errors import AstraflowError
from astraflow.join import is_join_string, parse_join
from astraflow_kit.identity.tokens import LEEWAY_S
from astraflow_launcher.issuing.tokens import describe_token, issue_times, read_authorities
from astraflow_launcher.support.checks import Finding, State

_CERTIFICATE_ENDS_SOON = timedelta(days=14)
_TOKEN_ENDS_SOON = timedelta(days=1)


def check_certificate_file(path: Path, *, now: datetime | None = None) -> list[Finding]:
    """Each certificate of a PEM file is valid now, and for a while."""
    try:
        found = read_authorities(path)
    except AstraflowError as error:
        return [Finding("certificate", State.FAILED, error.message, "name a file with certificates in PEM")]
    return [_certificate(der, where=str(path), now=now) for der in found]


def check_token_file(path: Path, *, now: datetime | None = None) -> list[Finding]:
    """A token, or a join string with its authorities, is valid now, and for a while."""
    try:
        text = path.read_text().strip()
        join = parse_join(text) if is_join_string(text) else None
        token = text if join is None else join.token
        starts, ends = issue_times(describe_token(token)) if token else (None, None)
    except (AstraflowError, OSError, UnicodeDecodeError) as error:
        remedy = "name a file that holds a token or a join string"
        return [Finding("token", State.FAILED, getattr(error, "message", f"{path}: {error}"), remedy)]
    findings = [_certificate(der, where=f"authority in {path}", now=now) for der in (join.ca if join else ())]
    if starts is not None and ends is not None:
        remedy, soon = "astraflow token create, or a new join string (astraflow join-token)", _TOKEN_ENDS_SOON
        findings.append(_validity("token", str(path), (starts, ends), soon=soon, remedy=remedy, now=now))
    return findings


def _certificate(der: bytes, *, where: str, now: datetime | None) -> Finding:
    certificate = x509.load_der_x509_certificate(der)
    times = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    named = f"{certificate.subject.rfc4514_string()} of {where}"
    remedy = "issue a new one (astraflow ca issue)"
    return _validity("certificate", named, times, soon=_CERTIFICATE_ENDS_SOON, remedy=remedy, now=now)


def _validity(
    check: str,
    what: str,
    times: tuple[datetime, datetime],
    *,
    soon: timedelta,
    remedy: str,
    now: datetime | None,
) -> Finding:
    (starts, ends), now = times, now or datetime.now(UTC)
    if starts - now > timedelta(seconds=LEEWAY_S):
        ahead = span_text((starts - now).total_seconds())
        return Finding(
            check,
            State.FAILED,
            f"{what} is valid only in {ahead}",
            "set the clocks of this machine and its issuer",
        )
    if now >= ends:
        return Finding(check, State.FAILED, f"{what} expired on {ends:%Y-%m-%d %H:%M} UTC", remedy)
    left = f"{what} is valid until {ends:%Y-%m-%d %H:%M} UTC"
    return (
        Finding(check, State.WARNING, left, remedy) if ends - now < soon else Finding(check, State.OK, left)
    )
