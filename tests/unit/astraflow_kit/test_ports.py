"""A port is found, and a failed bind says who is in the way."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from astraflow_kit import ports
from astraflow_kit.ports import LOOPBACK, PortError, bind_failure, free_port


def test_the_holder_of_a_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        message = bind_failure("127.0.0.1", port, setting="grpc_port").message
    assert f"process {os.getpid()} (" in message
    assert "choose another grpc_port" in message


def test_without_a_holder_the_message_says_what_may_be_wrong() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    assert "not an address of this machine" in bind_failure("192.0.2.1", port, setting="http_port").message


def test_a_free_port_can_be_bound() -> None:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, free_port()))


def test_no_connection_is_given_a_free_port() -> None:
    first, _ = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    assert free_port() < int(first)


def test_no_two_processes_are_given_one_port_before_either_has_bound_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two development runs that chose one port shared a Redis: the second took the first one's for its own."""
    first = next(port for port in range(30_000, 32_000, 3) if _are_free(range(port, port + 3)))
    monkeypatch.setattr(ports, "_CHOSEN", range(first, first + 3))
    monkeypatch.setattr(ports, "_TRIED", 3)
    ours = {free_port(), free_port()}
    code = f"from astraflow_kit import ports; ports._CHOSEN, ports._TRIED = range({first}, {first + 3}), 3; "
    theirs = subprocess.run(
        [sys.executable, "-c", code + "print(ports.free_port())"], check=True, capture_output=True, text=True
    )
    assert {*ours, int(theirs.stdout)} == {*range(first, first + 3)}
    assert free_port() == int(theirs.stdout)  # that process has ended
    with pytest.raises(PortError, match="are all taken"):
        free_port()


def _are_free(wanted: range) -> bool:
    for port in wanted:
        with socket.socket() as probe:
            try:
                probe.bind((LOOPBACK, port))
            except OSError:
                return False
    return True
