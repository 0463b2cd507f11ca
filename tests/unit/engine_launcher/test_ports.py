"""Ports: free ones are different and bindable, named ones are checked."""

from __future__ import annotations

import socket

import pytest

from engine_launcher.errors import PortTakenError, UsageError
from engine_launcher.ports import ephemeral_start, free_ports, named_ports


def test_free_ports_are_different_and_can_be_bound_again() -> None:
    found = free_ports("127.0.0.1", 20)
    assert len(set(found)) == 20
    for port in found:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", port))


def test_free_ports_lie_where_no_outgoing_connection_takes_one() -> None:
    assert all(port < ephemeral_start() for port in free_ports("127.0.0.1", 5))


def test_free_ports_on_a_name_that_is_no_host() -> None:
    with pytest.raises(UsageError, match="cannot be resolved"):
        free_ports("no such host", 1)


def test_a_named_port_in_use_is_said_with_the_range() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(PortTakenError, match=f"port {port} on 127.0.0.1 .*ports {port} to {port}"):
            named_ports("127.0.0.1", port, 1)


@pytest.mark.parametrize(("base", "count"), [(0, 1), (-5, 1), (65_535, 2), (70_000, 1)])
def test_numbers_that_are_no_ports_are_bad_usage(base: int, count: int) -> None:
    with pytest.raises(UsageError, match="leaves the range"):
        named_ports("127.0.0.1", base, count)


def test_named_ports_follow_each_other() -> None:
    (base,) = free_ports("127.0.0.1", 1)
    assert named_ports("127.0.0.1", base, 1) == [base]
