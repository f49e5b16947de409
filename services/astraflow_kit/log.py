"""Logs: one JSON object per line on stderr (console text on a terminal), events named `noun.verb` with
fields.

Invariant: no secret leaves the process through a log, and every line written while working on something
carries its ids (`CORRELATION_KEYS`), so one id follows a task to its trajectory, batch and step. Daemons
call `configure` once; modules use `get_logger`, `correlated` and `bind`; libraries' own logs get the same
form.
"""

import logging
import re
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TextIO

import structlog
from structlog.stdlib import BoundLogger, ProcessorFormatter
from structlog.typing import EventDict, Processor, WrappedLogger

from astraflow._contract.printable import printable
from astraflow_kit.nearest import did_you_mean

_RUN_KEYS = "correlation_id run_id policy_id node_id step version batch_id"
CORRELATION_KEYS = frozenset(f"{_RUN_KEYS} task_id group_id episode_id trajectory_id".split())
REDACTED = "***"
# These write a line per request, connection or font at info.
_CHATTY_LIBRARIES = ("httpx", "httpcore", "matplotlib", "uvicorn")
_SECRET_NAMES = "token|secret|passw(or)?d|authorization|(api|secret|access)[_-]?key|cookie"
_SECRET_KEY = re.compile(rf"(^|[_-])({_SECRET_NAMES})$", re.I)
MAX_FIELD_CHARACTERS = 8192
"""What a field shows of a text; a mark says how much is left out."""
MAX_FIELD_ITEMS = 256
"""What a field shows of a list or a mapping, at each depth."""
_MAX_DEPTH = 8
_MOST_SEARCHED = 16 * MAX_FIELD_CHARACTERS

# Texts come from callers, also from those who may not call: each pattern takes steps in proportion to the text,
# whatever it holds. So it starts at a literal, and what it then tries in vain is not tried again.
_BEARER = re.compile(r"(bearer\s+)[^\s\"']+", re.I)
_URL_PASSWORD = re.compile(r"(://[^/\s:@]*:)[^/\s@]+@", re.I)
# Recognisable wherever they stand: JSON web tokens, join strings, credentials of sessions, what signs the URL of an
# object. A match without a group is no secret, only the beginning of one.
_RECOGNISED = re.compile(r"\beyJ[\w-]{8,}(\.[\w-]+\.[\w-]*)?|\b(af1(?:\.[\w-]{16,}|/[^\s\"']{16,}))")
_SIGNED_URL = re.compile(r"(X-Amz-(?:Signature|Credential|Security-Token)=)[^&\s\"']+", re.I)
PATTERNS = (_BEARER, _SIGNED_URL, _RECOGNISED, _URL_PASSWORD)


def configure(
    service: str, *, level: str = "info", log_format: str = "auto", stream: TextIO | None = None
) -> None:
    """Set up logging of this process; every line carries `service`. The last call wins."""
    output = stream or sys.stderr
    as_json = log_format == "json" or (log_format == "auto" and not output.isatty())
    renderer: Processor = structlog.processors.JSONRenderer() if as_json else structlog.dev.ConsoleRenderer()
    shared = _shared_processors(service)
    structlog.configure(
        processors=[structlog.stdlib.filter_by_level, *shared, ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=BoundLogger,
    )
    last = [ProcessorFormatter.remove_processors_meta, redact, renderer]
    handler = logging.StreamHandler(output)
    handler.setFormatter(ProcessorFormatter(foreign_pre_chain=shared, processors=last))
    logging.basicConfig(handlers=[handler], level=level.upper(), force=True)
    for chatty in _CHATTY_LIBRARIES:
        logging.getLogger(chatty).setLevel(logging.WARNING)


def get_logger(name: str) -> BoundLogger:
    """The logger of a module, used as `log.info("trajectory.admitted", num_tokens=812)`."""
    logger: BoundLogger = structlog.stdlib.get_logger(name)
    return logger


def correlated(**ids: str | int) -> AbstractContextManager[None]:
    """Add ids to every line written inside the `with` block, in this task and the tasks it starts."""
    _refuse_unknown(ids)
    return structlog.contextvars.bound_contextvars(**ids)


def bind(**ids: str | int) -> None:
    """Add ids to every line this task writes from now on."""
    _refuse_unknown(ids)
    structlog.contextvars.bind_contextvars(**ids)


def redact(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Structlog processor: blank values under secret keys, bearer tokens and passwords inside URLs, and shorten what is
    longer than a field may be.
    """
    return {key: _clean(key, value, depth=0) for key, value in event.items()}


def without_secrets(text: str) -> str:
    """Return `text` without tokens, join strings, signatures of URLs and passwords inside them. Time is linear."""
    for pattern in (_BEARER, _SIGNED_URL):
        text = pattern.sub(rf"\1{REDACTED}", text)
    text = _RECOGNISED.sub(lambda found: REDACTED if found[1] or found[2] else found[0], text)
    return _URL_PASSWORD.sub(rf"\1{REDACTED}@", text)


def _clean(key: str, value: object, *, depth: int) -> object:
    if _SECRET_KEY.search(key) and value is not None:
        return REDACTED
    if isinstance(value, str):
        return _shortened(value)
    if isinstance(value, Mapping | list | tuple) and depth == _MAX_DEPTH:
        return f"… ({len(value)} more items)"
    if isinstance(value, Mapping):
        shown = list(value.items())[:MAX_FIELD_ITEMS]
        cleaned = {_shortened(str(inner)): _clean(str(inner), item, depth=depth + 1) for inner, item in shown}
        return (
            cleaned if len(shown) == len(value) else {**cleaned, "…": f"{len(value) - len(shown)} more items"}
        )
    if isinstance(value, list | tuple):
        items = [_clean("", item, depth=depth + 1) for item in value[:MAX_FIELD_ITEMS]]
        return items if len(items) == len(value) else [*items, f"… ({len(value) - len(items)} more items)"]
    return value


def _shortened(text: str) -> str:
    searched = text[:_MOST_SEARCHED]
    shown = printable(without_secrets(searched))
    # A secret at the cut is not recognised: what may be a part of one is not shown either.
    end = len(shown) if searched == text else max(0, len(shown) - MAX_FIELD_CHARACTERS)
    if (end := min(end, MAX_FIELD_CHARACTERS)) == len(shown):
        return shown
    return f"{shown[:end]}… ({len(text)} characters in all)"


def _shared_processors(service: str) -> list[Processor]:
    def add_service(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
        event.setdefault("service", service)
        return event

    return [
        structlog.contextvars.merge_contextvars,
        add_service,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]


def _refuse_unknown(ids: Mapping[str, str | int]) -> None:
    for key in ids.keys() - CORRELATION_KEYS:
        raise ValueError(f"{key!r} is not a correlation id. {did_you_mean(key, CORRELATION_KEYS)}")
