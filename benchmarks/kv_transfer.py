"""KV from one connector to another on this machine, sent and shared, against the limits of both.

    python benchmarks/kv_transfer.py [--mebibytes 64] [--rounds 15] [--nixl]
    python benchmarks/kv_transfer.py --model PATH [--lengths 128,1024] [--rounds 5]

In turns: a copy in memory, plain sockets (`sendall` to `recv_into` on loopback, two threads), the
connector with bytes sent, the connector with memory shared; with `--nixl`, where that is installed,
connectors that use it. Median and least of the wall times; all connectors run in this process, each
on its own thread.

With `--model` instead: prompts that an engine of another process runs and hands over, against the
taking engine that computes them itself, by length.

Prints a table and writes benchmarks/results/kv_transfer.json.
"""

import argparse
import os
import socket
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from random import Random
from unittest.mock import patch

import numpy as np
from measuring import Table, command_line, numbers, write_results

from worker.config import EngineConfig, KvTransferConfig, SchedulerConfig
from worker.engine.core import EngineCore
from worker.engine.messages import AddRequest, RequestOutput
from worker.engine.process.build import build_core
from worker.kv.content import KvShape
from worker.kv.nixl import NixlTransport
from worker.kv.tcp import TcpConnector
from worker.types import KvSource, SamplingParams

TOKEN_BYTES = 46_080  # of the 135M model in float32
DIGEST = b"d" * 32
_FIRST: list[EngineCore] = []  # the first engine, in its process


def copied(data: memoryview) -> None:
    """One copy into new memory."""
    np.array(data)


def through_sockets(data: memoryview) -> None:
    """The limit of a connection on loopback."""
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
    """The first token after a prompt that is run or taken, and the seconds until it."""
    begun = time.perf_counter()
    params = SamplingParams(max_tokens=1, temperature=0.0)
    core.add(AddRequest("r", prompt, params, 0.0, keeps_kv=keeps_kv, kv_source=source))
    while True:
        step = core.step()
        if step is not None and step.outputs:
            return step.outputs[0], time.perf_counter() - begun
        if core.is_compiling:  # the KV is on its way
            time.sleep(0.0002)


def prefilled(args: argparse.Namespace, prompt: list[int]) -> tuple[RequestOutput, float]:
    """A prompt that the first engine runs, in a process of its own."""
    if not _FIRST:
        _FIRST.append(build(args, "first"))
    return first_token(_FIRST[0], prompt, keeps_kv=True)


def hand_over(args: argparse.Namespace) -> list[dict[str, float]]:
    """Prompts of each length, computed and taken."""
    rng = Random(args.seed)
    second = build(args, "second")
    first = ProcessPoolExecutor(1, get_context("spawn"))
    ratios = ("taken_ratio .2f", "both_ratio .2f")
    table = Table("tokens", "computed_ms .1f", "taken_ms .1f", "both_legs_ms .1f", *ratios)
    for length in args.lengths:
        times: list[tuple[float, float, float]] = []
        for _ in range(args.rounds + 1):
            prompt = rng.choices(range(1000, 40_000), k=length)
            whole, computed = first_token(second, prompt)
            exported, prefill = first.submit(prefilled, args, prompt).result()
            assert exported.kv_offer is not None
            output, taken = first_token(second, prompt, source=exported.kv_offer.source)
            assert output.num_cached_tokens == length - 1, "the KV was not taken"
            if args.dtype == "float32":
                assert output.token_ids == whole.token_ids, "answers differ"
            times.append((computed, taken, prefill + taken))
        computed, taken, both = (
            statistics.median(some) * 1e3 for some in zip(*times[1:], strict=True)
        )
        table.add(
            tokens=length,
            computed_ms=computed,
            taken_ms=taken,
            both_legs_ms=both,
            taken_ratio=taken / computed,
            both_ratio=both / computed,
        )
    first.shutdown()
    second.shutdown()
    return table.rows


def move(args: argparse.Namespace) -> list[dict[str, float]]:
    """Bytes by each way, in turns."""
    num_tokens = (args.mebibytes << 20) // TOKEN_BYTES
    data = memoryview(bytearray(Random(7).randbytes(num_tokens * TOKEN_BYTES)))
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
    for turn in range(args.rounds + 1):
        for name, way in ways.items():
            start = time.perf_counter()
            way(data)
            if turn:
                times[name].append((time.perf_counter() - start) * 1e3)
    for connector in connectors:
        connector.close()
    table = Table("way <16", "median_ms .1f", "least_ms .1f", "gb_per_second .2f")
    for name, spent in times.items():
        median = statistics.median(spent)
        rate = len(data) / median / 1e6
        table.add(way=name, median_ms=median, least_ms=min(spent), gb_per_second=rate)
    return table.rows


def main() -> None:
    """Move bytes, or prompts."""
    parser = command_line(__doc__)
    parser.add_argument("--model", type=Path, help="engines on this checkpoint, instead of bytes")
    parser.add_argument("--nixl", action="store_true", help="a turn of NIXL as well")
    parser.add_argument("--mebibytes", type=int, default=64)
    parser.add_argument("--lengths", type=numbers(int), default=[128, 256, 512, 1024])
    parser.add_argument("--rounds", type=int, help="default: 15; of prompts, 5")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=7)
    args = parser.parse_args()
    args.rounds = args.rounds or (5 if args.model else 15)
    rows = hand_over(args) if args.model else move(args)
    write_results(args, rows=rows)


if __name__ == "__main__":
    main()
