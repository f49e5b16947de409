"""Which contract versions can talk, and what is said when they cannot."""

import pytest

from astraflow import __version__
from astraflow.connecting.compatibility import CONTRACT_VERSION as OURS
from astraflow.connecting.compatibility import require_compatible
from astraflow.errors import IncompatibleError
from astraflow.server.v1.server_info_pb2 import ServerInfo


def server(oldest: int, newest: int, *, version: str = "9.8.7") -> ServerInfo:
    return ServerInfo(product_version=version, oldest_contract_version=oldest, contract_version=newest)


@pytest.mark.parametrize(("oldest", "newest"), [(OURS, OURS), (OURS, OURS + 3), (OURS - 1, OURS)])
def test_a_server_that_speaks_our_version_is_taken(oldest: int, newest: int) -> None:
    require_compatible(server(oldest, newest), address="host:1")


@pytest.mark.parametrize(
    ("oldest", "newest", "spoken", "older"),
    [
        (OURS + 1, OURS + 1, f"contract version {OURS + 1},", "update the client"),
        (OURS + 1, OURS + 2, f"contract version {OURS + 1} to {OURS + 2},", "update the client"),
        (OURS - 1, OURS - 1, f"contract version {OURS - 1},", "update the server"),
    ],
)
def test_a_server_of_other_versions_is_refused_with_both_and_the_remedy(
    oldest: int, newest: int, spoken: str, older: str
) -> None:
    with pytest.raises(IncompatibleError) as refused:
        require_compatible(server(oldest, newest), address="host:1")
    message = refused.value.message
    words = ("host:1 (astraflow 9.8.7)", spoken, f") {OURS}:", older, "install astraflow==9.8.7")
    assert [word for word in words if word not in message] == [], message


def test_builds_of_one_version_that_speak_different_contracts_are_told_apart() -> None:
    with pytest.raises(IncompatibleError) as refused:
        require_compatible(server(OURS + 1, OURS + 1, version=__version__), address="host:1")
    message = refused.value.message
    assert f"install the build that the server has: both are called {__version__}, and differ" in message
    assert "install astraflow==" not in message
