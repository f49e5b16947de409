"""Ids are those of transformers' own tokenizer for the same files, without loading a model library."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from astraflow.errors import RecipeError
from astraflow.plugins import Message
from astraflow_raas.policies.tokenizer import load_tokenizer
from support.raas_parts import write_tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tokenizer(tmp_path / "model")


CHATS = [
    (Message("user", "What is 3 + 47?"),),
    (Message("system", "Be brief."), Message("user", "Ünïcode, 漢字 and\nlines")),
    (Message("user", "<|im_end|> in the text"),),
]


def test_ids_and_text_equal_those_of_transformers(folder: Path) -> None:
    from transformers import AutoTokenizer

    reference, ours = AutoTokenizer.from_pretrained(folder), load_tokenizer(folder)
    for chat in CHATS:
        rendered = [{"role": message.role, "content": message.content} for message in chat]
        wanted = reference.apply_chat_template(rendered, add_generation_prompt=True, return_dict=False)
        assert list(ours.encode(chat)) == list(wanted)
        assert ours.decode(wanted) == reference.decode(wanted, skip_special_tokens=True)


def test_stop_tokens_come_from_tokenizer_and_model_files(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 2]}))
    assert load_tokenizer(folder).stop_token_ids == (0, 2)


def test_the_template_may_live_in_the_tokenizers_configuration(folder: Path) -> None:
    with_file = load_tokenizer(folder).encode(CHATS[0])
    config = json.loads((folder / "tokenizer_config.json").read_text())
    template = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
    assert load_tokenizer(folder).encode(CHATS[0]) == with_file


@pytest.mark.parametrize(
    ("template", "complaint"),
    [
        (None, "no chat template"),
        ("{% for %}", "not valid Jinja"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages.__class__.__mro__ }}", "refuses these messages"),
    ],
)
def test_an_unusable_template_is_named(folder: Path, template: str | None, complaint: str) -> None:
    (folder / "chat_template.jinja").unlink()
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    with pytest.raises(RecipeError, match=complaint):
        load_tokenizer(folder).encode(CHATS[0])


def test_a_model_without_a_tokenizer_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"publish tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_reading_a_tokenizer_loads_no_model_library(folder: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from astraflow_raas.policies.tokenizer import load_tokenizer\n"
        "load_tokenizer(Path(sys.argv[1]))\n"
        "sys.exit(','.join({'torch', 'transformers'} & set(sys.modules)) or 0)"
    )
    command = [sys.executable, "-c", program, str(folder)]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
