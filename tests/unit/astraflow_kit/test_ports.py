"""A port is found, and a failed bind says who is in the way."""

import os
import socket
from pathlib import Path

from astraflow_kit.ports import LOOPBACK, bind_failure, free_port


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
