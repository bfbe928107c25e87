"""A real worker process with the simulator behind it, and raw requests to it."""

import re
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

PAGE_BYTES = 4096


@dataclass
class SimWorker:
    process: subprocess.Popen[str]
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=120)

    def ask(self, request: bytes) -> tuple[int, bytes]:
        with self.connect() as connection:
            with suppress(ConnectionError):  # it may answer before it has read all
                connection.sendall(request)
            return read_reply(connection)

    def rss_bytes(self) -> int:
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * PAGE_BYTES


@contextmanager
def sim_worker(*flags: str, max_files: int | None = None) -> Iterator[SimWorker]:
    """Start a worker and wait for its ready line; `max_files` is its limit of open files."""
    command = [sys.executable, "-m", "worker", "--engine", "sim", "--port", "0"]
    process = subprocess.Popen(
        # However long the machine keeps the engine from running, it is not taken for lost.
        [*command, "--sim-time-scale", "0", "--heartbeat-timeout", "60", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        preexec_fn=None if max_files is None else partial(_limit_files, max_files),
    )
    try:
        ready = re.match(r"worker ready on http://[^:]+:(\d+)", process.stdout.readline())
        assert ready
        yield SimWorker(process, int(ready[1]))
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        process.communicate()


def post(path: str, body: bytes, content_type: str = "application/json") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: w\r\nContent-Type: {content_type}\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def _limit_files(number: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (number, number))


def read_reply(connection: socket.socket) -> tuple[int, bytes]:
    """Return the status and body of one reply; the status is 0 if the peer closed."""
    received = b""
    while b"\r\n\r\n" not in received:
        piece = _receive(connection)
        if not piece:
            return 0, received
        received += piece
    head, _, body = received.partition(b"\r\n\r\n")
    length = re.search(rb"\r\ncontent-length: (\d+)", head.lower())
    assert length, head
    while len(body) < int(length[1]):
        piece = _receive(connection)
        if not piece:
            break
        body += piece
    return int(head.split(b" ", 2)[1]), body[: int(length[1])]


def _receive(connection: socket.socket) -> bytes:
    try:
        return connection.recv(1 << 16)
    except ConnectionResetError:
        return b""
