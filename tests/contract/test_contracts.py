"""What every contract owes its reader and its users: who may call, what repeating does, words on everything,
and bytes that stay what they are.
"""

import copy
import runpy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from google.protobuf import descriptor_pb2

from astraflow.columns import Columns, decode_columns, encode_columns
from astraflow.connecting.compatibility import CONTRACT_VERSION
from astraflow.options.v1 import options_pb2
from astraflow.rollout.v1 import task_pb2, trajectory_pb2
from support.source_tree import REPOSITORY

PROTO_ROOT = REPOSITORY / "proto"

Files = list[descriptor_pb2.FileDescriptorProto]


@dataclass(frozen=True)
class Named:
    """Something a contract declares."""

    name: str
    comment: str


@pytest.fixture(scope="module")
def files() -> Files:
    """The contracts as protoc reads them, comments included."""
    described = runpy.run_path(str(PROTO_ROOT / "generate.py"))["describe"]()
    return [file for file in described.file if (PROTO_ROOT / file.name).exists()]


def test_every_rpc_says_who_may_call_it_and_what_repeating_does(files: Files) -> None:
    services = [service for file in files for service in file.service]
    assert services
    for service in services:
        for method in service.method:
            options, where = method.options.Extensions, f"{service.name}.{method.name}"
            assert options[options_pb2.roles], where
            assert options_pb2.ROLE_UNSPECIFIED not in options[options_pb2.roles], where
            assert options[options_pb2.retry], where


def test_every_file_names_its_package_in_other_languages_by_one_scheme(files: Files) -> None:
    for file in files:
        name, options = file.name.split("/")[1], file.options
        assert file.package == ("externalscaler" if name == "keda" else f"astraflow.{name}.v1")
        go_package = f"github.com/astraflow/astraflow/clients/go/astraflow/{name}/v1;{name}v1"
        assert options.go_package == go_package, file.name
        assert options.java_package == f"io.astraflow.{name}.v1", file.name
        assert options.java_multiple_files, file.name
        assert options.csharp_namespace == f"Astraflow.{name.capitalize()}.V1", file.name


def test_one_file_carries_the_contract_version(files: Files) -> None:
    carried = {file.name: file.options.Extensions[options_pb2.contract_version] for file in files}
    assert {name: version for name, version in carried.items() if version} == {
        "astraflow/server/v1/server_info.proto": CONTRACT_VERSION
    }


def test_everything_declared_has_words(files: Files) -> None:
    everything = [named for file in files for named in declared(file)]
    assert len(everything) > 300
    assert [named.name for named in everything if not named.comment.strip()] == []


def test_the_zero_of_every_enum_is_unspecified(files: Files) -> None:
    enums = [enum for file in files for enum in every_enum(file)]
    zeros = [value.name for enum in enums for value in enum.value if value.number == 0]
    assert len(zeros) == len(enums)
    assert [name for name in zeros if not name.endswith("_UNSPECIFIED")] == []


def test_a_missing_comment_is_seen(files: Files) -> None:
    file = copy.deepcopy(next(file for file in files if file.name.endswith("rollout/v1/trajectory.proto")))
    for place in file.source_code_info.location:
        if "Weight version of the policy" in place.leading_comments:
            place.leading_comments = ""
    assert [named.name for named in declared(file) if not named.comment] == ["VersionSpan.version"]


def every_enum(file: descriptor_pb2.FileDescriptorProto) -> Iterator[descriptor_pb2.EnumDescriptorProto]:
    yield from file.enum_type
    for message in file.message_type:
        yield from message.enum_type


DECLARING = {
    *("message_type", "nested_type", "field", "oneof_decl", "extension"),
    *("enum_type", "value", "service", "method"),
}
"""Fields of descriptor.proto that hold what has a name of its own and a comment."""


def declared(file: descriptor_pb2.FileDescriptorProto) -> Iterator[Named]:
    """Every message, field, oneof, enum, value, service, rpc and option of a file."""
    comments = {tuple(place.path): place.leading_comments for place in file.source_code_info.location}

    def inside(parent: Any, path: tuple[int, ...], prefix: str) -> Iterator[Named]:
        for part, children in parent.ListFields():
            for index, child in enumerate(children if part.name in DECLARING else ()):
                if not is_made_by_protoc(child):
                    place, name = (*path, part.number, index), prefix + child.name
                    yield Named(name, comments.get(place, ""))
                    yield from inside(child, place, f"{name}.")

    return inside(file, (), "")


def is_made_by_protoc(child: Any) -> bool:
    """The entry type of a map, or the oneof of an `optional` field."""
    if isinstance(child, descriptor_pb2.DescriptorProto):
        return child.options.map_entry
    return isinstance(child, descriptor_pb2.OneofDescriptorProto) and child.name.startswith("_")


def trajectory_item() -> trajectory_pb2.TrajectoryItem:
    """Four tokens, the last two sampled, across a weight update; every field set."""
    columns = Columns(
        token_ids=np.array([1, 300, 70_000, 2], dtype=np.int32),
        loss_mask=np.array([False, False, True, True]),
        logprobs=np.array([0, 0, -0.25, -1.5], dtype=np.float32),
        version_spans=((2, 3, 7), (3, 4, 8)),
    )
    body = encode_columns(columns, trajectory_id="t-1")
    body.turn_spans.add(start=0, end=2, role="user")
    body.sampling.CopyFrom(task_pb2.SamplingParams(temperature=1.0, top_p=0.5, top_k=40, max_new_tokens=24))
    header = trajectory_pb2.TrajectoryHeader(
        trajectory_id="t-1",
        policy_id="solver",
        role="checker",
        num_tokens=4,
        num_trainable_tokens=2,
        min_version=7,
        max_version=8,
        reward=0.5,
        finish_reason="stop",
    )
    return trajectory_pb2.TrajectoryItem(header=header, body=body.SerializeToString())


def episode() -> trajectory_pb2.Episode:
    return trajectory_pb2.Episode(
        run_id="tiny",
        task_id="train-5",
        episode_id="e-1",
        member=3,
        attempt=2,
        node_id="node-1",
        status=trajectory_pb2.EPISODE_STATUS_FAILED,
        failure_reason="timeout",
        trajectories=[trajectory_item()],
        metrics={"turns": 1.0},
        hedge=True,
    )


# Written by the first release of these contracts. A change here breaks every node, server and stored payload.
ITEM_HEX = """
0a2d0a03742d311206736f6c7665721a07636865636b6572200428023007380841000000000000e03f4a0473746f7012
580a03742d311210010000002c0100007011010002000000180122100000000000000000000080be0000c0bf2a010c32
0608021003180732060803100418083a0810021a0475736572420e0d0000803f150000003f18282018
"""
EPISODE_HEX = """
0a0474696e791207747261696e2d351a03652d312003280232066e6f64652d313802420774696d656f75744a89010a2d
0a03742d311206736f6c7665721a07636865636b6572200428023007380841000000000000e03f4a0473746f7012580a
03742d311210010000002c0100007011010002000000180122100000000000000000000080be0000c0bf2a010c320608
021003180732060803100418083a0810021a0475736572420e0d0000803f150000003f1828201852100a057475726e73
11000000000000f03f5801
"""


def test_the_bytes_on_the_wire_stay_what_they_are() -> None:
    for message, golden in ((trajectory_item(), ITEM_HEX), (episode(), EPISODE_HEX)):
        wire = bytes.fromhex(golden)
        assert message.SerializeToString(deterministic=True).hex() == wire.hex()
        assert type(message).FromString(wire) == message


def test_the_golden_item_holds_the_columns_it_was_made_of() -> None:
    item = trajectory_pb2.TrajectoryItem.FromString(bytes.fromhex(ITEM_HEX))
    columns = decode_columns(trajectory_pb2.Trajectory.FromString(item.body))
    assert columns.token_ids.tolist() == [1, 300, 70_000, 2]
    assert columns.loss_mask.tolist() == [False, False, True, True]
    assert columns.logprobs.tolist() == [0, 0, -0.25, -1.5]
    assert columns.version_spans == ((2, 3, 7), (3, 4, 8))
