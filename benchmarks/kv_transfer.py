"""KV from one connector to another on this machine, sent and shared, against the limits of both.

`python -m benchmarks.kv_transfer`, from the repository root. 64 MiB a transfer, in turns: a copy in
memory, bare sockets (`sendall` to `recv_into` on loopback, two threads), the connector with bytes
sent, the connector with memory shared; with `--nixl`, where that is installed, connectors that use
it. Median and least of the wall times; all connectors run in this process, each on its own thread.

With `--model PATH` instead: prompts that one engine runs and hands over, against the same engine
that computes them itself, by length; both engines are in this process.
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
from pathlib import Path
from random import Random
from unittest.mock import patch

import numpy as np

from worker.config import EngineConfig, KvTransferConfig, SchedulerConfig
from worker.engine.core import EngineCore
from worker.engine.messages import AddRequest, RequestOutput
from worker.engine.process import build_core
from worker.kv.content import KvShape
from worker.kv.nixl import NixlTransport
from worker.kv.tcp import TcpConnector
from worker.types import KvSource, SamplingParams

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


def build(args: argparse.Namespace, name: str) -> EngineCore:
    """An engine that computes every prompt, or takes it."""
    longest = max(args.lengths) + 16
    config = EngineConfig(
        "torch",
        str(args.model),
        args.dtype,
        num_blocks_override=-(-longest // 16) + 2,
        enable_prefix_caching=False,
        num_threads=args.threads,
        scheduler=SchedulerConfig(max_model_len=longest, max_num_seqs=1),
        kv_transfer=KvTransferConfig(kv_port=0, engine_id=name),
    )
    return build_core(config)[0]


def first_token(
    core: EngineCore, prompt: list[int], keeps_kv: bool = False, source: KvSource | None = None
) -> tuple[RequestOutput, float]:
    """Of a prompt that is run or taken, and the seconds until it."""
    begun = time.perf_counter()
    params = SamplingParams(max_tokens=1, temperature=0.0)
    core.add(AddRequest("r", prompt, params, 0.0, keeps_kv=keeps_kv, kv_source=source))
    while True:
        told = core.step()
        if told is not None and told.outputs:
            return told.outputs[0], time.perf_counter() - begun
        if core.is_compiling:  # the KV is on its way
            time.sleep(0.0002)


def hand_over(args: argparse.Namespace) -> None:
    """Print the table of lengths."""
    rng = Random(args.seed)
    first, second = build(args, "first"), build(args, "second")
    sys.stdout.write("tokens  computed, ms  taken  both legs   of computed: taken, both\n")
    for length in args.lengths:
        times: list[tuple[float, float, float]] = []
        for _ in range(args.rounds + 1):
            prompt = rng.choices(range(1000, 40_000), k=length)
            whole, computed = first_token(second, prompt)
            kept, prefill = first_token(first, prompt, keeps_kv=True)
            assert kept.kv_offer is not None
            output, taken = first_token(second, prompt, source=kept.kv_offer.source)
            assert output.num_cached_tokens == length - 1, "the KV was not taken"
            if args.dtype == "float32":
                assert output.token_ids == whole.token_ids, "answers differ"
            times.append((computed, taken, prefill + taken))
        computed, taken, both = (
            statistics.median(some) * 1e3 for some in zip(*times[1:], strict=True)
        )
        sys.stdout.write(
            f"{length:6} {computed:13.1f} {taken:6.1f} {both:10.1f}"
            f" {taken / computed:19.2f} {both / computed:5.2f}\n"
        )
    first.shutdown()
    second.shutdown()


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="engines on this checkpoint, instead of bytes")
    parser.add_argument("--nixl", action="store_true", help="a turn of NIXL as well")
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 256, 512, 1024])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=7)
    args = parser.parse_args()
    if args.model is not None:
        hand_over(args)
        return
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
    connectors = [keeper, taker]
    if args.nixl:
        for config in configs:
            nixl = NixlTransport.load(config)
            connectors.append(TcpConnector(config, key, shape, TOKEN_BYTES, None, nixl))
        ways["read by NIXL"] = lambda data: transferred(*connectors[2:], data)
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(TURNS + 1):
        for name, way in ways.items():
            start = time.perf_counter()
            way(data)
            if turn:
                times[name].append((time.perf_counter() - start) * 1e3)
    for connector in connectors:
        connector.close()
    for name, spent in times.items():
        median = statistics.median(spent)
        rate = len(data) / median / 1e6
        sys.stdout.write(
            f"{name:16} median {median:6.1f} ms  least {min(spent):6.1f}  {rate:5.2f} GB/s\n"
        )


if __name__ == "__main__":
    main()
