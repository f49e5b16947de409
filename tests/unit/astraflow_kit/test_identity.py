"""The tokens file and the role table."""

from pathlib import Path

import pytest

from astraflow_kit.identity import ROLES, Identity, read_tokens
from astraflow_kit.settings import SettingsError

DIGEST = "ab" * 32


def test_roles_are_those_of_the_contract() -> None:
    assert set(ROLES) == {"rollout", "trainer", "operator", "viewer", "agent"}


def test_a_tokens_file_gives_identities_by_digest(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text(f"# node tokens\nnode-1 rollout sha256:{DIGEST} # in the lab\n")
    assert read_tokens(path) == {DIGEST: Identity(subject="node-1", roles=frozenset({"rollout"}))}


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("node-1 rollout plaintext", "line 2 is not `subject"),
        (f"node-1 sha256:{DIGEST}", "line 2 is not `subject"),
        (f"node-1 rolout sha256:{DIGEST}", "unknown role 'rolout'. Did you mean 'rollout'"),
    ],
)
def test_a_wrong_line_is_refused(tmp_path: Path, line: str, complaint: str) -> None:
    path = tmp_path / "tokens"
    path.write_text(f"\n{line}\n")
    with pytest.raises(SettingsError, match=complaint):
        read_tokens(path)
