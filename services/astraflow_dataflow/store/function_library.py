"""The Redis Functions of the data plane as one library, rendered from `lua/*.lua`.

The library's name carries the schema version, each function's name the same prefix, so two releases can never call each
other's functions. Loaded by `store.Connection` at start and again whenever Redis lost it.
"""

from importlib import resources

from astraflow_dataflow.store.keys import SCHEMA_VERSION, lua_table

LIBRARY = f"astraflow_{SCHEMA_VERSION}"

_ORDER = (
    "prelude",
    "history",
    "payloads",
    "trace",
    "archive",
    "replay",
    "tasks",
    "settle",
    "pushes",
    "batches",
    "versions",
    "admin",
    "runs",
    "audit",
)

# Read only: allowed on replicas and when memory is full.
_READS = (
    "members",
    "unsettled",
    "batch",
    "releasable",
    "pending",
    "audit",
    "recount",
    "supply",
    "trace",
    "refused",
    "paces",
    "passes",
    "nodes",
)
# Free memory, or are on the way of the trainer that frees it: allowed when memory is full.
_RELEASES = (
    "claim",
    "seal_key",
    "hold",
    "release_policy",
    "acquire",
    "seal",
    "publish",
    "announce_snapshot",
    "ack",
    "nack",
    "mark_durable",
    "release",
    "settle",
    "sweep",
    "fail",
    "renew",
    "renew_batch",
    "advance",
    "close_training",
    "reconcile",
    "leave",
    "drain",
    "undrain",
    "void",
    "unpin",
    "purge",
    "save_states",
    "archive_pack",
    "archive_written",
    "archive_failed",
    "end_packs",
    "packs_removed",
)
_WRITES = (
    "begin_pack",
    "replace_payloads",
    "switch_plugins",
    "rate",
    "submit",
    "feed",
    "lease",
    "commit",
    "commit_whole",
    "quarantine",
    "pin",
    "requeue",
    "join",
    "note_refused",
    "report",
    "plan_evaluation",
    "request_evaluation",
    "open_requested",
    "feed_evaluation",
    "give_up_evaluation",
)
# Not of a run that exists: it begins or ends there.
_BEGINNINGS = ("create_run",)
_ENDS = ("begin_delete", "remove_keys", "end_delete", "beat")


def function_name(name: str) -> str:
    """Return the name under which Redis knows a function of the library."""
    return f"{LIBRARY}_{name}"


def source() -> str:
    """Return the library's Lua source, the same bytes for the same release."""
    folder = resources.files("astraflow_dataflow.store") / "lua"
    parts = [f"#!lua name={LIBRARY}", lua_table()]
    parts += [(folder / f"{name}.lua").read_text(encoding="utf-8") for name in _ORDER]
    parts += [_registration(name, f"of_a_run(F.{name}, SIGNATURE.{name})", "'no-writes'") for name in _READS]
    parts += [
        _registration(name, f"of_a_run(F.{name}, SIGNATURE.{name})", "'allow-oom'") for name in _RELEASES
    ]
    parts += [_registration(name, f"of_a_run(F.{name}, SIGNATURE.{name})", "") for name in _WRITES]
    parts += [_registration(name, f"named(F.{name}, SIGNATURE.{name})", "") for name in _BEGINNINGS]
    parts += [_registration(name, f"named(F.{name}, SIGNATURE.{name})", "'allow-oom'") for name in _ENDS]
    return "\n".join(parts)


def _registration(name: str, callback: str, flags: str) -> str:
    return f"redis.register_function{{function_name='{function_name(name)}', callback={callback}, flags={{{flags}}}}}"
