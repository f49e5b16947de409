"""What may enter a lane."""

import pytest

from astraflow.rollout.v1 import task_pb2
from astraflow_dataflow.rules.tasks import task_problem


@pytest.mark.parametrize(
    ("task", "word"),
    [
        (task_pb2.Task(task_id=""), "task_id"),
        (task_pb2.Task(task_id="x" * 129), "task_id"),
        (task_pb2.Task(task_id="a b"), "task_id"),
        (task_pb2.Task(task_id="a#1"), "task_id"),
        (task_pb2.Task(task_id="eval:p:0:final:1"), "planned by the server"),
        (task_pb2.Task(task_id="t", purpose=task_pb2.PURPOSE_EVALUATION), "planned by the server"),
        (task_pb2.Task(task_id="t", group_size=1025), "1024"),
        (task_pb2.Task(task_id="t", data_json=b"[1]"), "JSON object"),
        (task_pb2.Task(task_id="t", data_json=b"\xff"), "not JSON"),
        (task_pb2.Task(task_id="t", data_json=b'{"a": NaN}'), "not JSON with finite numbers"),
        (task_pb2.Task(task_id="t", data_json=b'{"a": -Infinity}'), "not JSON with finite numbers"),
        (task_pb2.Task(task_id="t", data_json=b'{"a": 1e999}'), "not JSON with finite numbers"),
        (task_pb2.Task(task_id="t", data_json=b'{"a": ' + b"[" * 60000), "recursion limit"),
        (task_pb2.Task(task_id="t", data_json=b'{"a":"' + b"x" * 65536 + b'"}'), "65536"),
        (task_pb2.Task(task_id="t", messages=[task_pb2.Message(role="robot")]), "robot"),
        (
            task_pb2.Task(task_id="t", messages=[task_pb2.Message(role="user", content="x" * 1048577)]),
            "1048576",
        ),
    ],
)
def test_a_bad_task_is_refused_with_the_limit(task: task_pb2.Task, word: str) -> None:
    problem = task_problem(task)
    assert problem is not None
    assert word in problem


def test_a_plain_task_passes() -> None:
    message = task_pb2.Message(role="user")
    task = task_pb2.Task(task_id="a.b_c-d:1", data_json=b'{"gold": 1}', messages=[message])
    assert task_problem(task) is None
