"""The connections of a process, as Linux reports them."""

import os
import socket
import subprocess
import sys

from fleet.run.proc import connections


def test_connections_at_a_port_are_counted_until_they_are_closed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        assert connections(os.getpid(), port) == 0
        clients = [socket.create_connection(("127.0.0.1", port)) for _ in range(3)]
        accepted = [listening.accept()[0] for _ in clients]
        assert connections(os.getpid(), port) == 3
        accepted.pop().close()
        assert connections(os.getpid(), port) == 2
        for one in (*clients, *accepted):
            one.close()
        assert connections(os.getpid(), port) == 0


def test_connections_over_ipv6_are_counted_too() -> None:
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as listening:
        port = listening.getsockname()[1]
        with socket.create_connection(("::1", port)), listening.accept()[0]:
            assert connections(os.getpid(), port) == 1


def test_another_process_has_other_connections() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)), listening.accept()[0]:
            other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
            assert connections(other.pid, port) == 0
            other.communicate(b"\n")
            assert connections(other.pid, port) == 0
