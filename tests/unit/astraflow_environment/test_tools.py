"""Tools as an assistant meets them: functions, endpoints, servers; what they do wrong is an answer."""

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest

from astraflow.plugins import Message, Observation, TaskSpec, ToolCall
from astraflow_environment.tools import HttpTool, McpServer, Tools
from support import tool_functions
from support.http_server import answering

FUNCTIONS = [f"support.tool_functions:{name}" for name in ("add", "shout", "fail", "nap", "novel")]
TASK = TaskSpec("t1", (Message("user", "Work."),))


def calls(*pairs: tuple[str, str]) -> Message:
    """An assistant's message with these calls."""
    made = tuple(ToolCall(f"c{number}", name, text) for number, (name, text) in enumerate(pairs))
    return Message("assistant", "", tool_calls=made)


async def answers(tools: Tools, *pairs: tuple[str, str]) -> list[str]:
    """What each call answers."""
    await tools.reset(TASK)
    seen = await tools.step(calls(*pairs))
    await tools.close()
    assert [message.tool_call_id for message in seen.messages] == [f"c{n}" for n in range(len(pairs))]
    assert (seen.done, {message.role for message in seen.messages}) == (False, {"tool"})
    return [message.content for message in seen.messages]


async def test_a_functions_schema_is_its_signature_and_docstring() -> None:
    (tool,) = (await Tools(functions=FUNCTIONS[:1]).reset(TASK)).tools
    assert (tool.name, tool.description) == ("add", "Add two numbers.")
    schema = json.loads(tool.parameters)
    assert {name: field["type"] for name, field in schema["properties"].items()} == {
        "a": "integer",
        "b": "integer",
    }
    assert schema["required"] == ["a"]


async def test_functions_answer_and_what_goes_wrong_is_an_answer() -> None:
    tools = Tools(functions=FUNCTIONS, max_output_chars=10)
    given = await answers(tools, ("add", '{"a": 2, "b": 3}'), ("shout", '{"text": "hi"}'), ("novel", "{}"))
    assert given == ["5", "HI", "xxxxxxxxxx\n… (90 more characters)"]
    late = await answers(Tools(functions=FUNCTIONS, timeout_s=0.05), ("nap", "{}"))
    assert late == ["error: no answer within 0.05 s"]
    wrong = await answers(
        Tools(functions=FUNCTIONS),
        ("fail", "{}"),
        ("add", '{"a": "two"}'),
        ("add", "{"),
        ("add", "[1]"),
        ("divide", "{}"),
    )
    expected = ("out of order", "a: Input should be a valid integer", "JSONDecodeError", "are a JSON object")
    assert all(
        part in text for part, text in zip((*expected, "no tool 'divide'; there are add"), wrong, strict=True)
    )


async def test_an_answer_without_calls_ends_the_episode() -> None:
    tools = Tools(functions=FUNCTIONS)
    await tools.reset(TASK)
    await tools.step(calls(("fail", "{}")))
    seen = await tools.step(Message("assistant", "5"))
    assert seen == Observation(done=True, metrics={"tool_calls": 1.0, "tool_errors": 1.0})


async def test_calls_of_one_turn_are_bounded() -> None:
    given = await answers(Tools(functions=FUNCTIONS), *[("add", '{"a": 1}')] * 17)
    assert given[15:] == ["2", "error: ValueError: at most 16 calls in one turn; call again"]


class _Weather(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        city = json.loads(self.rfile.read(int(self.headers["content-length"])))["city"]
        self.send_response(200 if city == "Oslo" else 404)
        self.end_headers()
        self.wfile.write(f"rain in {city}".encode())

    def log_message(self, *_: Any) -> None:
        """Quiet."""


async def test_an_endpoint_is_a_tool() -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Weather)
    Thread(target=server.serve_forever, daemon=True).start()
    endpoint = HttpTool(name="weather", url=f"http://127.0.0.1:{server.server_port}/")
    given = await answers(
        Tools(http=[endpoint]), ("weather", '{"city": "Oslo"}'), ("weather", '{"city": "Rome"}')
    )
    server.shutdown()
    server.server_close()
    assert given == ["rain in Oslo", "error: OSError: status 404: rain in Rome"]


async def test_an_endpoint_that_answers_without_end_is_an_error_that_the_assistant_reads() -> None:
    with answering(b"x" * 2**20, times=10**6) as url:
        (given,) = await answers(Tools(http=[HttpTool(name="flood", url=url)]), ("flood", "{}"))
    assert given.startswith("error: AnswerRefused: ")
    assert "answered more than 1048576 bytes" in given


async def test_the_tools_of_an_mcp_server() -> None:
    pytest.importorskip("mcp")
    server = McpServer(command=[sys.executable, tool_functions.__file__])
    given = await answers(Tools(mcp=[server]), ("add", '{"a": 2, "b": 3}'), ("fail", "{}"))
    assert given[0] == "5"
    assert given[1].startswith("error: ")
    assert "fail" in given[1]


async def test_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="two tools are named 'add'"):
        Tools(functions=[FUNCTIONS[0], FUNCTIONS[0]])
