"""KV from one connector to another on this machine, sent and shared, against the limits of both.

`python -m benchmarks.kv_transfer`, from the repository root. 64 MiB a transfer, in turns: a copy in
memory, bare sockets (`sendall` to `recv_into` on loopback, two threads), the connector with bytes
sent, the connector with memory shared. Median and least of the wall times; both connectors run in
this process, each on its own thread.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from random import Random
from unittest.mock import patch

import numpy as np

from worker.config import KvTransferConfig
from worker.kv.content import KvShape
from worker.kv.tcp import TcpConnector

SIZE, TOKEN_BYTES, TURNS = 1 << 26, 46_080, 15  # a token of the 135M model in float32
DIGEST = b"d" * 32


def copied(data: memoryview) -> None:
    """One copy into new memory."""
    np.array(data)


def through_sockets(data: memoryview) -> None:
    """What a connection on loopback can do."""
    sender, receiver = _pair()
    with sender, receiver, ThreadPoolExecutor(1) as threads:
        sending = threads.submit(sender.sendall, data)
        rest = memoryview(bytearray(len(data)))
        while rest:
            rest = rest[receiver.recv_into(rest) :]
        sending.result()


def _pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = socket.create_connection(server.getsockname())
        return sender, server.accept()[0]


def transferred(keeper: TcpConnector, taker: TcpConnector, data: memoryview) -> None:
    """One transfer, and a look at a byte of each page."""
    offer = keeper.keep("r", DIGEST, data, ())
    assert offer is not None
    pull = taker.pull(offer.source, DIGEST, 0)
    while not pull.done:
        time.sleep(0.0005)
    assert pull.part is not None
    np.asarray(pull.part.data)[::4096].sum()
    pull.close()


def main() -> None:
    """Print a table."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    data = memoryview(bytearray(Random(7).randbytes(SIZE // TOKEN_BYTES * TOKEN_BYTES)))
    shape = KvShape("m", "float32", 30, 3, 64)
    configs = [KvTransferConfig(kv_port=0, engine_id=name) for name in "ab"]
    key = os.urandom(32)
    keeper, taker = (TcpConnector(config, key, shape, TOKEN_BYTES) for config in configs)

    def sent(data: memoryview) -> None:
        with patch("os.memfd_create", side_effect=OSError):
            transferred(keeper, taker, data)

    ways: dict[str, Callable[[memoryview], None]] = {
        "copy in memory": copied,
        "bare sockets": through_sockets,
        "bytes sent": sent,
        "memory shared": lambda data: transferred(keeper, taker, data),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(TURNS + 1):
        for name, way in ways.items():
            start = time.perf_counter()
            way(data)
            if turn:
                times[name].append((time.perf_counter() - start) * 1e3)
    keeper.close()
    taker.close()
    for name, spent in times.items():
        median = statistics.median(spent)
        rate = len(data) / median / 1e6
        sys.stdout.write(
            f"{name:16} median {median:6.1f} ms  least {min(spent):6.1f}  {rate:5.2f} GB/s\n"
        )


if __name__ == "__main__":
    main()
