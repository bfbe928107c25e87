"""The listening socket of the h2 transport."""

from __future__ import annotations

import socket

import pytest

from picker.extproc.binding import listen
from picker.extproc.options import ServerOptions


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="a system without it")
def test_an_accepted_connection_notices_a_vanished_peer() -> None:
    """Both while nothing is sent and while something is; the options are inherited."""
    with (
        listen(ServerOptions(host="127.0.0.1", port=0)) as listening,
        socket.create_connection(listening.getsockname()),
        listening.accept()[0] as accepted,
    ):
        assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 120_000
