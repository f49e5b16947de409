"""The function library and the key names it shares with Python."""

import re

from astraflow_dataflow.store import function_library
from astraflow_dataflow.store.keys import SCHEMA_VERSION, Keys, lua_table


def test_every_key_of_a_run_hashes_to_one_slot() -> None:
    assert Keys("r").of("task", "t1") == "af:{r}:task:t1"
    assert Keys("r").of("payload", "e", "t") == "af:{r}:payload:e:t"


def test_lua_knows_the_same_names() -> None:
    assert "function K.task(P, a0) return P .. 'task:' .. a0 end" in lua_table()
    assert "function K.payload(P, a0, a1) return P .. 'payload:' .. a0 .. ':' .. a1 end" in lua_table()
    assert "function K.run(P) return P .. 'run' end" in lua_table()


def test_the_library_carries_its_schema_version_in_every_name() -> None:
    names = re.findall(r"function_name='([^']+)'", function_library.source())
    assert names
    assert all(name.startswith(f"astraflow_{SCHEMA_VERSION}_") for name in names)
    assert len(names) == len(set(names))


def test_functions_name_no_key_that_is_not_of_their_run() -> None:
    assert "'af:" not in function_library.source()


def test_every_signature_belongs_to_a_function_that_is_registered_with_it() -> None:
    source = function_library.source()
    declared = set(re.findall(r"^SIGNATURE\.(\w+) = ", source, re.MULTILINE))
    registered = set(re.findall(r"callback=\w+\(F\.(\w+), SIGNATURE\.\1\)", source))
    assert declared <= registered
    assert {"beat", "paces", "supply", "pending", "save_states", "passes"} == registered - declared
