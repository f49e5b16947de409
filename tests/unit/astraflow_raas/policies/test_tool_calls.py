"""What models write when they call tools is read in the format of their template, or left as text."""

import json
from pathlib import Path

import pytest

from astraflow.plugins import Tool
from astraflow_raas.policies.tokenizer import FastTokenizer
from astraflow_raas.policies.tool_calls import reader_of
from support.raas_parts import write_tokenizer

SCHEMA = {"type": "object", "properties": {"zip": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS = [Tool("weather", "Look it up.", json.dumps(SCHEMA))]
ONE = ("weather", {"zip": "01234", "days": 3})
TEMPLATES = {
    "hermes": "{{ '<tool_call>' }}",
    "xml": "{{ '<tool_call><function=' }}",
    "mistral": "{{ '[TOOL_CALLS]' }}",
    "llama": """{{ '"parameters": ' }}{{ 'ipython' }}""",
    "pythonic": "{{ '[func_name1(params_name1=params_value1)]' }}",
}
CALL = '{"name": "weather", "arguments": {"zip": "01234", "days": 3}}'
XML = (
    "<tool_call>\n<function=weather>\n<parameter=zip>\n01234\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
)


@pytest.mark.parametrize(
    ("form", "text", "said", "calls"),
    [
        ("hermes", f"Look.\n<tool_call>\n{CALL}\n</tool_call>", "Look.", [ONE]),
        ("hermes", f"<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>", "", [ONE, ONE]),
        ("hermes", "no call {", "no call {", []),
        ("xml", f"Look.{XML}", "Look.", [ONE]),
        ("mistral", f"[TOOL_CALLS][{CALL}, {CALL}]", "", [ONE, ONE]),
        ("mistral", '[TOOL_CALLS]weather[ARGS]{"zip": "01234", "days": 3}', "", [ONE]),
        ("mistral", "Look.[TOOL_CALLS]f{}[TOOL_CALLS]g{}", "Look.", [("f", {}), ("g", {})]),
        ("llama", CALL.replace("arguments", "parameters"), "", [ONE]),
        ("llama", f"<|python_tag|>{CALL}; {CALL}<|eom_id|>", "", [ONE, ONE]),
        ("llama", "plain", "plain", []),
        ("pythonic", "[weather(zip='01234', days=3), a.b()]", "", [ONE, ("a.b", {})]),
        ("pythonic", "[1, 2]", "[1, 2]", []),
    ],
)
def test_a_format_is_read_whole(form: str, text: str, said: str, calls: list[object]) -> None:
    reader = reader_of(TEMPLATES[form])
    assert reader is not None
    assert reader(text, TOOLS) == (said, calls)


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", f"<tool_call>{CALL}</tool_call><tool_call>{{broken</tool_call>"),
        ("hermes", f"<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}"),
        ("hermes", '<tool_call>["weather"]</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": "[1]"}</tool_call>'),
        ("xml", "<tool_call>weather</tool_call>"),
        ("mistral", "[TOOL_CALLS]{}"),
        ("llama", '{"answer": 5}'),
        ("llama", '{"name": "f", '),
        ("pythonic", "[weather(zip=unknown)]"),
        ("pythonic", "[weather(1 +"),
        ("hermes", "<tool_call>" + "[" * 100_000 + "</tool_call>"),
    ],
)
def test_a_malformed_call_stays_text(tmp_path: Path, form: str, text: str) -> None:
    folder = write_tokenizer(tmp_path)
    (folder / "chat_template.jinja").write_text(TEMPLATES[form])
    tokenizer = FastTokenizer(folder)
    assert tokenizer.read(tokenizer.encode(text), TOOLS) == (text, ())


def test_a_template_without_a_known_format_has_no_reader() -> None:
    assert reader_of("{{ messages }}") is None


def test_ids_beyond_the_text_are_no_part_of_a_call(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path)
    tokenizer = FastTokenizer(folder)
    called = (*tokenizer.encode(f"Look.<tool_call>{CALL}</tool_call>"), *tokenizer.stop_token_ids)
    assert tokenizer.read(called, TOOLS) == ("Look.", [ONE])
    assert tokenizer.read(called, ()) == (f"Look.<tool_call>{CALL}</tool_call>", ())
