"""Ports without a listener."""

import socket
from collections.abc import Iterator

import pytest

from fleet.errors import FleetError
from fleet.run.ports import free_ports, is_free, require_free


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_a_taken_port_is_not_free(taken: int) -> None:
    assert not is_free("127.0.0.1", taken)
    with pytest.raises(FleetError, match=rf"port {taken} .* is busy: .*--port"):
        require_free("127.0.0.1", taken)


def test_taken_ports_are_skipped(taken: int) -> None:
    found = free_ports("127.0.0.1", 3, taken)
    assert len(set(found)) == 3
    assert min(found) > taken


def test_the_last_ports_run_out() -> None:
    with pytest.raises(FleetError, match="fewer than 5 free ports"):
        free_ports("127.0.0.1", 5, 65_533)
