"""Writes the text of `docs/contracts.md`: every rpc with its state, what repeating it does, roles and errors, and
the bounds of fields.

Everything on the page comes from the contracts, comments included; the kit refuses to serve an rpc that is
not what its options say. Called by `generate.py`.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory

from astraflow.errors import EVERY_RPC

_SERVICE, _RPC = 6, 2  # field numbers of descriptor.proto, from which paths into a file are made
_REPEATS = {"RETRY_READ": "reads", "RETRY_IDEMPOTENT": "idempotent", "RETRY_NEVER": "acts again"}
_STREAMS = {(False, False): "", (True, False): " ⇈", (False, True): " ⇊", (True, True): " ⇅"}
_TABLE = "| rpc | purpose | state | repeat | roles | runs | speaks as | errors |\n|---|---|---|---|---|---|---|---|"
_SPEAKERS = {
    "SPEAKER_NODE": "node",
    "SPEAKER_TRAINER": "trainer",
    "SPEAKER_OPENS_NODE": "opens a node's session",
    "SPEAKER_OPENS_TRAINER": "opens a trainer's session",
    "SPEAKER_TRAINER_ONCE_CLAIMED": "trainer, once it has claimed",
}
_SECRETS = {
    "EnvironmentService.Reset": "whoever chose `session_id` and `holder`, secrets of 22 characters or more",
    "EnvironmentService.Step": "whoever knows `session_id`",
    "EnvironmentService.Close": "whoever knows `session_id`",
}
"""Where a secret in the request proves who speaks, and no credential of the metadata."""
_RUNS = {
    "SCOPE_SERVED_RUN": "served",
    "SCOPE_VISIBLE_RUNS": "visible",
    "SCOPE_ALL_RUNS": "all",
    "SCOPE_NO_RUN": "none",
}
_HEAD = """# Contracts: every rpc, and the bounds of fields

Generated from [`proto/`](../proto) by `make proto`; do not edit. The comments of the `.proto` files say more. Streams
are marked ⇈ (requests), ⇊ (responses), ⇅ (both).

* **State**: `works`, or the missing capability and what to use until then. A missing one answers `UNIMPLEMENTED`
  with the `capability` in its metadata. A server does not start when its rpcs are not what this page says.
* **Repeat**: `reads` changes nothing; `idempotent` has the effect of calling once; `acts again` is never repeated by
  the client library.
* **Roles** may call it; `anyone` needs no token. Without token keys every caller has every role
  ([identity](identity.md)). `ExternalScaler` has a listener of its own, where a client certificate decides: who shows
  one of `scaler_client_ca_file` may ask about every run, nobody else gets through the handshake, no token changes that.
* **Runs**: what the claim `runs` of a token is compared with. `named` is the run in the request, an empty one standing
  for the token's only run; `served` the run that the daemon belongs to; `visible` answers leave out other runs; `all`
  needs a token for `*`.
* **Speaks as** whom: `node` and `trainer` prove it by the metadata `astraflow-session`, the credential that the call
  which opened their session returned, and their requests speak of nobody else
  ([identity](identity.md#sessions-as-whom-a-call-speaks)). Where nothing is said the token alone decides. Agents
  speak HTTP with [their node's endpoint](agents.md), by a key of their episode alone, which ends with it.
* **Errors** are reasons of `google.rpc.ErrorInfo` in the domain `astraflow`. Besides those listed, every rpc may
  answer {every_rpc}.

Call `GetServerInfo` first: it needs no token and says which contract version the server speaks, here {version}, and
which optional features are on. A caller made for version N may call a server whose `oldest_contract_version` ≤ N ≤
`contract_version`. The number rises with each change that breaks callers of the one before; additions leave it.

[`clients/descriptors/astraflow.binpb`](../clients/descriptors/astraflow.binpb) holds all contracts as one
`FileDescriptorSet`, with imports, options and comments, for tools and generators; servers answer reflection with the
same. Try either:

<!-- needs: grpcurl and buf on the machine -->
```bash
grpcurl -protoset clients/descriptors/astraflow.binpb describe astraflow.dataflow.v1.BatchService
grpcurl -plaintext 127.0.0.1:7070 astraflow.dataflow.v1.AdminService/GetServerInfo
buf curl --http2-prior-knowledge --protocol grpc --schema clients/descriptors/astraflow.binpb \\
  http://127.0.0.1:7070/astraflow.dataflow.v1.AdminService/GetServerInfo
```

In other languages package `astraflow.NAME.v1` is called

* Go: `github.com/astraflow/astraflow/clients/go/astraflow/NAME/v1`, imported as `NAMEv1`,
* Java: `io.astraflow.NAME.v1`, a file per message,
* C#: `Astraflow.Name.V1`.
"""

_EPOCH = "the policy's current epoch, else FENCED"
COUNTERS: dict[str, str] = {
    "trainer_epoch": _EPOCH,
    "ClaimPolicyRequest.known_epoch": "the newest epoch given out + 64 (a rollback took over without a server, or "
    "Redis lost its last moments); + 1,048,576 where this Redis was emptied, restored or restarted since",
    "ClaimPolicyRequest.held_epoch": "as `known_epoch`",
    "ClaimPolicyRequest.last_step": "10,000,000, the most steps of a recipe; the next claim that holds the policy "
    "replaces it, with none where it says none",
    "AcceptedLoss.step": "10,000,000 where the policy is in doubt, else FAILED_PRECONDITION: its trainer said what it "
    "doubts, and nobody has acquired a batch since Redis was emptied, restored or restarted",
    "Version.trainer_epoch": "the caller's epoch",
    "step": "the step that is bound, else NOT_FOUND; INVALID_ARGUMENT above the last finished one + 1, + 2 read ahead",
    "MarkDurableRequest.step": "the last finished step",
    "Version.step": "the last finished step; of an older writer's version, 10,000,000",
    "AcquireBatchRequest.base_version": "the newest version + `max_behind` (+ 1 read ahead): it waits for those before",
    "Version.version": "the newest version + 1 + `num_unreadable_before`, else VERSION_GAP; 2,097,151",
    "PublishRequest.num_unreadable_before": "the finished steps + 64",
    "Version.rollback_of": "a version below its own",
    "Version.sequence": "kept: for people; nodes read the log",
    "Version.snapshot_version": "0: the server draws snapshots, and names them",
    "PinVersionRequest.version": "an announced version, else NOT_FOUND",
    "UnpinVersionRequest.version": "one that is not pinned changes nothing",
    "RequestEvaluationRequest.versions": "the newest version, else FAILED_PRECONDITION",
    "VersionSpan.version": "the newest version, else poison",
    "TrajectoryHeader.min_version": "the version of its spans, else poison",
    "TrajectoryHeader.max_version": "the newest version: 16 above it UNKNOWN_VERSION, further poison",
    "Episode.attempt": "the attempt of the task's lease",
    "Episode.draws": "an announced version; of another nobody is rated",
    "Credits.leases_received": "the leases sent on the stream",
    "Credits.serving_versions": "kept: what the node says of itself, for status and to offer it evaluations of exactly "
    "that version",
    "Credits.tokens_sampled": "kept: as `serving_versions`, for status",
    "Credits.engine_restarts": "kept: as `serving_versions`, for status and history",
    "LeaseTasksRequest.serving_versions": "as of Credits",
    "WeightFault.version": "kept: as `serving_versions`, for status",
    "JoinRunRequest.incarnation": "0, or the number in the credential that the node shows",
    "ResetRequest.holder_incarnation": "the service's clock in nanoseconds + a day",
    "incarnation": "the one that the node joined with, else FENCED",
    "PushRequest.sequence": "of the stream alone: it is acknowledged as it was sent",
    "StepRequest.turn": "the session's last turn + 1, else FAILED_PRECONDITION",
    "PluginSwitch.number": "ignored: the server counts",
    "PluginSwitch.steps": "ignored: the server counts",
    "min_step": "reads",
    "max_step": "reads",
    "after_step": "reads",
    "ListSamplesRequest.version": "reads",
}
"""Every field by which a caller names an epoch, incarnation, step, version, attempt, turn or sequence number, of one
message or of all, and the largest value that has an effect. A contract test compares it with the contracts.
"""
_COUNTERS_HEAD = """## Counters

No caller sets a counter of the server: a value above what was given out is refused, as INVALID_ARGUMENT where nothing
else is said, whatever its type holds. A name without a message is the field of every other one. What is *kept* raises
nothing of anybody else's: it is what a node says of itself, or a trainer of its own log.

| field | at most |
|---|---|"""
_BOUNDS_HEAD = """## Bounds of fields

Every field of every request, and of the serialized `Trajectory` in it. A value outside is refused by our Python client
before it is sent, what is written into an open stream aside, and by every server before anything else is done, streams
message by message: INVALID_ARGUMENT, whose text and metadata (`field`, `value`, `limit`) and whose
`google.rpc.BadRequest` say which and why, so that all clients show the same. Where the table says *cut*, the server
brings the value to its bound instead; where it says *poison*, a push answers `OUTCOME_POISON` with that reason. In a
`repeated` field the bounds hold for each element, in a map for each key; for a field with presence, when it is set.
Fields that are not listed take every value of their type; fields that a release does not know are dropped. What says
nothing of its own in the `.proto` has the default of its type: a text 256 characters without control characters and
line breaks (*one line*), bytes 1,024, a list 1,024 elements, a map 256 with keys and values likewise, a number finite
and within ±2^53, an enum its known values, a message within another as here.

| field | bounds |
|---|---|"""
_FIELD = descriptor_pb2.FieldDescriptorProto
_WIDE = (_FIELD.TYPE_INT64, _FIELD.TYPE_UINT64)
_FIGURES = (_FIELD.TYPE_DOUBLE, _FIELD.TYPE_FLOAT)
_SENT_AS_BYTES = ".astraflow.rollout.v1.Trajectory"

Options = dict[str, Any]
_AnyOptions = (
    descriptor_pb2.FileOptions
    | descriptor_pb2.ServiceOptions
    | descriptor_pb2.MethodOptions
    | descriptor_pb2.FieldOptions
)


def page(described: descriptor_pb2.FileDescriptorSet) -> str:
    """Return the page for the services of `described`, a set that holds its imports and its comments."""
    reader = _OptionsReader(described)
    files = sorted(described.file, key=lambda file: (file.package, file.name))
    sections = [section for file in files for section in _sections(file, reader)]
    counters = [f"| `{name}` | {most} |" for name, most in sorted(COUNTERS.items())]
    sections.append("\n".join([_COUNTERS_HEAD, *counters]) + "\n")
    sections.append(_bounds_section(files, reader))
    version = max(reader.read(file.options).get("contract_version", 0) for file in files)
    return "\n".join([_HEAD.format(every_rpc=_quoted(EVERY_RPC), version=version), *sections])


class _OptionsReader:
    """Reads our options as JSON values, without the generated code, which may be stale."""

    def __init__(self, described: descriptor_pb2.FileDescriptorSet) -> None:
        self._pool = descriptor_pool.DescriptorPool()
        for file in described.file:
            self._pool.AddSerializedFile(file.SerializeToString())

    def read(self, options: _AnyOptions) -> Options:
        """The options of one file, service, rpc or field by their short names."""
        found = self._pool.FindMessageTypeByName(options.DESCRIPTOR.full_name)
        read = message_factory.GetMessageClass(found).FromString(options.SerializeToString())
        values = json_format.MessageToDict(read, descriptor_pool=self._pool, preserving_proto_field_name=True)
        return {name.strip("[]").rpartition(".")[2]: value for name, value in values.items()}


def _sections(file: descriptor_pb2.FileDescriptorProto, reader: _OptionsReader) -> Iterator[str]:
    comments = {tuple(place.path): place.leading_comments for place in file.source_code_info.location}
    for index, service in enumerate(file.service):
        common = _reasons(reader.read(service.options), "common_errors")
        rows = [
            _row(service.name, method, reader.read(method.options), comments[_SERVICE, index, _RPC, number])
            for number, method in enumerate(service.method)
        ]
        purpose = " ".join(comments[_SERVICE, index].split())
        if common:
            purpose += f" Every rpc of it may also answer {common}."
        yield f"## {file.package}.{service.name}\n\n{purpose}\n\n" + "\n".join([_TABLE, *rows]) + "\n"


def _row(service: str, method: descriptor_pb2.MethodDescriptorProto, options: Options, comment: str) -> str:
    missing = options.get("missing")
    cells = (
        f"`{method.name}`{_STREAMS[method.client_streaming, method.server_streaming]}",
        _first_sentence(comment),
        f"missing: `{missing['capability']}`; {missing['instead']}" if missing else "works",
        _REPEATS[options["retry"]],
        ", ".join(role.removeprefix("ROLE_").lower() for role in options["roles"]),
        _RUNS.get(options.get("scope", ""), "" if options["roles"] == ["ROLE_ANYONE"] else "named"),
        _SPEAKERS.get(options.get("speaker", ""), _SECRETS.get(f"{service}.{method.name}", "")),
        _reasons(options, "errors"),
    )
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


def _bounds_section(files: Sequence[descriptor_pb2.FileDescriptorProto], reader: _OptionsReader) -> str:
    requests = _requests(files)
    rows = [
        f"| `{file.package.removeprefix('astraflow.')}.{message.name}.{field.name}` | {words} |"
        for file in files
        for message in file.message_type
        if f".{file.package}.{message.name}" in requests
        for field in message.field
        if (words := _in_words(reader.read(field.options).get("bounds", {}), field))
    ]
    return "\n".join([_BOUNDS_HEAD, *rows]) + "\n"


def _requests(files: Sequence[descriptor_pb2.FileDescriptorProto]) -> set[str]:
    """Full names of the messages that rpcs are sent, and of those in them."""
    messages = {f".{file.package}.{message.name}": message for file in files for message in file.message_type}
    waiting = [method.input_type for file in files for service in file.service for method in service.method]
    waiting.append(_SENT_AS_BYTES)
    found: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name in messages and name not in found:
            found.add(name)
            waiting += [field.type_name for field in messages[name].field]
    return found


def _in_words(bounds: Options, field: descriptor_pb2.FieldDescriptorProto) -> str:
    seconds = " s" if field.type_name == ".google.protobuf.Duration" else ""
    words = [
        _range(bounds, "min_items", "max_items", " elements"),
        "each once" if bounds.get("unique") else "",
        "" if field.type == _FIELD.TYPE_ENUM else _range(bounds, "min", "max", seconds),
        _range(bounds, "min_len", "max_len", " characters"),
        _range(bounds, "min_bytes", "max_bytes", " bytes"),
        f"matches `{pattern}`".replace("|", r"\|") if (pattern := bounds.get("pattern")) else "",
        *_defaults(bounds, field),
        "must be set" if bounds.get("required") else "",
        "*cut*" if bounds.get("clamped") else "",
        f"*poison* `{bounds['poison']}`" if "poison" in bounds else "",
    ]
    return ", ".join(filter(None, words))


def _defaults(bounds: Options, field: descriptor_pb2.FieldDescriptorProto) -> Iterator[str]:
    """What holds besides what the contract says."""
    is_map = field.type_name.endswith("Entry")
    if field.label == _FIELD.LABEL_REPEATED and "max_items" not in bounds:
        yield "≤ 256 elements" if is_map else "≤ 1,024 elements"
    if field.type == _FIELD.TYPE_STRING and "pattern" not in bounds:
        yield "" if {"max_len", "max_bytes"} & bounds.keys() else "≤ 256 characters"
        yield "" if bounds.get("multiline") else "one line"
    if field.type == _FIELD.TYPE_BYTES and "max_bytes" not in bounds:
        yield "≤ 1,024 bytes"
    if field.type in _WIDE and "max" not in bounds:
        yield "≤ 2^53"
    if field.type in _FIGURES:
        yield "finite"
    if field.type == _FIELD.TYPE_ENUM:
        yield "a known value but `UNSPECIFIED`" if bounds.get("min") else "a known value"
        yield f"of numbers 1–{bounds['max']:g}" if "max" in bounds else ""


def _range(bounds: Options, least: str, most: str, unit: str) -> str:
    low, high = (_figure(float(bounds[name])) if name in bounds else "" for name in (least, most))
    if low == high:
        return low and f"{low}{unit}"
    if low and high:
        return f"{low}–{high}{unit}"
    return f"≥ {low}{unit}" if low else f"≤ {high}{unit}"


def _figure(number: float) -> str:
    return "2^64" if number == 2**64 else f"{number:,.10g}"


def _reasons(options: Options, name: str) -> str:
    return _quoted(options.get(name, {}).get("reasons", []))


def _quoted(reasons: Iterable[str]) -> str:
    return ", ".join(f"`{reason}`" for reason in reasons)


def _first_sentence(comment: str) -> str:
    words = " ".join(comment.split())
    return re.split(r"(?<=\.) ", words, maxsplit=1)[0]
