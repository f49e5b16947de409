"""Credentials and leases that only the holder of the run's key can have made."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from astraflow_kit.identity.sealing import (
    NODE,
    TRAINER,
    Session,
    claimed_session,
    is_issued,
    issue,
    new_key,
    new_lineage,
    opened_lease,
    seal_lease,
)

KEY = "00" * 32
SESSION = Session(speaker=NODE, run_id="math", name="spot-1", number=3, lineage="ab" * 16)
names = st.from_regex(r"[A-Za-z0-9._-]{1,64}", fullmatch=True)


def test_a_credential_has_these_bytes_in_every_release() -> None:
    """Golden: nodes keep credentials over upgrades of the server."""
    assert issue(SESSION, key=KEY) == (
        "af1/node/math/spot-1/3/abababababababababababababababab/3sBP0AaEmktE70ho6007JbmpSz8bo3KXPg-K8dv6Spg"
    )
    assert seal_lease("train-2#1", lineage=SESSION.lineage, key=KEY) == "train-2#1.kxSYbCjW_5E1uuKb77d037Jb"


@given(speaker=st.sampled_from([NODE, TRAINER]), name=names, number=st.integers(0, 2**53))
def test_what_was_issued_is_proven_and_says_what_was_sealed(speaker: str, name: str, number: int) -> None:
    session = replace(SESSION, speaker=speaker, name=name, number=number)
    credential = issue(session, key=KEY)
    assert claimed_session(credential) == session
    assert is_issued(credential, key=KEY)


@pytest.mark.parametrize("field", ["speaker", "run_id", "name", "number", "lineage"])
def test_no_part_of_a_credential_can_be_changed(field: str) -> None:
    changed = {"speaker": TRAINER, "run_id": "other", "name": "spot-2", "number": 4, "lineage": "cd" * 16}
    forged, seal = issue(replace(SESSION, **{field: changed[field]}), key=KEY), issue(SESSION, key=KEY)
    assert not is_issued(forged.rpartition("/")[0] + "/" + seal.rpartition("/")[2], key=KEY)


def test_another_key_seals_otherwise() -> None:
    assert not is_issued(issue(SESSION, key=new_key()), key=KEY)


@given(st.text(max_size=300))
def test_any_text_is_read_without_an_error_and_proves_nothing(text: str) -> None:
    claimed_session(text)
    assert not is_issued(text, key=KEY)
    assert opened_lease(text, lineage=SESSION.lineage, key=KEY) is None


@pytest.mark.parametrize(
    "credential",
    [
        "",
        "af1",
        "af1/agent/r/n/1/ab/x",
        "af2/node/r/n/1/ab/x",
        "af1/node/r/n/-1/ab/x",
        "af1/node/r/n/١/ab/x",
        "af1/node/r/n/99999999999999999/ab/x",
        "af1/node/r/n/1/ab/x/y",
    ],
)
def test_a_text_of_another_form_is_no_credential(credential: str) -> None:
    assert claimed_session(credential) is None


def test_a_lease_is_of_use_to_its_holder_alone() -> None:
    lease_id = seal_lease("train-2#1-h", lineage=SESSION.lineage, key=KEY)
    assert opened_lease(lease_id, lineage=SESSION.lineage, key=KEY) == "train-2#1-h"
    assert opened_lease(lease_id, lineage=new_lineage(), key=KEY) is None
    assert (
        opened_lease("train-2#2" + lease_id[lease_id.rindex(".") :], lineage=SESSION.lineage, key=KEY) is None
    )
    assert opened_lease("train-2#1", lineage=SESSION.lineage, key=KEY) is None
