"""The ranks of tensor parallelism: processes that run the same steps, each on its shard of a model.

Theory of operation
-------------------
Rank 0 is the engine's own process. It starts the others (`worker.executor.follower`) and hands them
every step before it runs that step itself: the collectives inside the model then meet. All ranks
draw the same tokens from the same logits, so that a token which only the device knows is the same
one on each; nobody but rank 0 tells what was drawn.

A rank reads from its standard input: messages of msgpack, each behind its length (4 bytes, little
endian). When that ends, rank 0 is gone, and so is the rank at once, whatever it is at.

When a rank is gone, rank 0 cannot go on. A collective mostly fails of it; where none runs, or one
waits for ever, the thread that watches the rank ends the process.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import IO, Any

import msgspec
import torch
from torch import Tensor, distributed

from worker.config import EngineConfig
from worker.errors import DeviceMemoryError, WorkerError
from worker.executor.interface import Executor, Ticket
from worker.executor.model_runner import ModelRunner
from worker.ops.parallel import Shard
from worker.types import Adapter, KvLoad, SchedulerOutput

logger = logging.getLogger(__name__)

# What failed together with a rank has so long to say why, before the process ends without a word.
GRACE_SECONDS = 1.0
EXIT_SECONDS = 2.0
_HOST = "127.0.0.1"
_LENGTH_BYTES = 4
_UNBOUNDED = torch.iinfo(torch.int64).max


class JoinRanks(msgspec.Struct, frozen=True, tag=True):
    """The first message: build shard `rank`, and find the others through rank 0's `port`."""

    config: EngineConfig
    rank: int
    port: int


class StepRanks(msgspec.Struct, frozen=True, tag=True):
    """`Executor.submit`."""

    step: SchedulerOutput


class SleepRanks(msgspec.Struct, frozen=True, tag=True):
    """`Executor.sleep`."""

    level: int


class WakeRanks(msgspec.Struct, frozen=True, tag=True):
    """`Executor.wake`."""

    tags: frozenset[str]


class ReadRanks(msgspec.Struct, frozen=True, tag=True):
    """`KvMemory.read_kv`: each rank gives what it has to rank 0."""

    blocks: tuple[int, ...]
    num_tokens: int


ToRank = JoinRanks | StepRanks | SleepRanks | WakeRanks | ReadRanks


class Ranks:
    """Owns the processes of ranks 1 to N-1, from `start` to `close`."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._size = config.tensor_parallel_size
        self._processes: list[subprocess.Popen[bytes]] = []
        self._watchers: list[threading.Thread] = []
        self._encoder = msgspec.msgpack.Encoder(enc_hook=list)  # of sequences that are no lists
        self._sending = threading.Lock()
        self._lost = threading.Event()
        self._why_lost = ""
        self._closing = threading.Event()
        self._is_joined = False

    def start(self, device: torch.device) -> None:
        """Start them and join them, with rank 0's `device`. Call it from a thread that lives as
        long as they shall: on Linux they end with it.
        """
        with socket.create_server((_HOST, 0)) as listener:
            port = listener.getsockname()[1]
            for rank in range(1, self._size):
                self._spawn(rank, port)
            # Its file descriptor is the store's from here on.
            store = _store(port, self._size, is_master=True, master_listen_fd=listener.detach())
        join(Shard(0, self._size), store, device)
        self._is_joined = True

    def send(self, *messages: ToRank) -> None:
        """Hand a message to every rank, or each its own. Raises OSError where one is gone."""
        if self._closing.is_set():
            raise RuntimeError("the executor is shut down")
        encoded = itertools.cycle([self._encoder.encode(message) for message in messages])
        with self._sending:  # every rank gets the messages of all threads in the same order
            for process, own in zip(self._processes, encoded, strict=False):
                _write(process, own)

    def why_lost(self, timeout_seconds: float) -> str | None:
        """Which rank is gone; None if none is, not even after a while, or all were told to go."""
        if self._closing.is_set() or not self._lost.wait(timeout_seconds):
            return None
        return self._why_lost

    def close(self) -> None:
        """End them: they leave when their input ends, or are killed. Idempotent."""
        self._closing.set()
        for process in self._processes:
            try:
                _input(process).close()
            except BrokenPipeError:  # what it had not taken
                logger.debug("rank of process %d was gone already", process.pid)
        for process, watcher in zip(self._processes, self._watchers, strict=True):
            watcher.join(EXIT_SECONDS)
            process.kill()
            watcher.join()
        if self._is_joined:
            self._is_joined = False
            _host_group.cache_clear()
            distributed.destroy_process_group()

    def _spawn(self, rank: int, port: int) -> None:
        process = subprocess.Popen(
            # -P: a folder in the current directory that is named like our package is not ours.
            [
                *(sys.executable, "-P", "-m", "worker.executor.follower"),
                *(str(os.getpid()), str(rank)),
            ],
            stdin=subprocess.PIPE,
            stdout=2,  # what libraries print belongs into the log
        )
        name = f"rank-{rank}-watch"
        watcher = threading.Thread(target=self._watch, args=(rank, process), name=name, daemon=True)
        self._processes.append(process)
        self._watchers.append(watcher)
        watcher.start()
        _write(process, self._encoder.encode(JoinRanks(self._config, rank, port)))

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        self._why_lost = f"rank {rank} of {self._size} ended with exit code {code}; see its log"
        self._lost.set()
        if not self._closing.wait(GRACE_SECONDS):
            logger.error("%s: so does the engine", self._why_lost)
            os._exit(1)


def _input(process: subprocess.Popen[bytes]) -> IO[bytes]:
    stdin = process.stdin
    assert stdin is not None  # noqa: S101 (it was asked for)
    return stdin


def _write(process: subprocess.Popen[bytes], encoded: bytes) -> None:
    stdin = _input(process)
    stdin.write(len(encoded).to_bytes(_LENGTH_BYTES, "little") + encoded)
    stdin.flush()


def read_messages(stream: IO[bytes], take: Callable[[bytes], None]) -> None:
    """Hand over every message of a rank's input, still encoded, until that ends."""
    while head := stream.read(_LENGTH_BYTES):
        take(stream.read(int.from_bytes(head, "little")))


def _store(port: int, size: int, **options: Any) -> Any:
    """Where the ranks find each other: a server in rank 0, on this machine's own address."""
    make: Any = distributed.TCPStore  # type: ignore[attr-defined]
    return make(_HOST, port, size, wait_for_workers=False, **options)


def find_ranks(message: JoinRanks) -> Any:
    """The store, for a rank that was started."""
    return _store(message.port, message.config.tensor_parallel_size)


def join(shard: Shard, store: Any, device: torch.device) -> None:
    """Make torch's default group of all ranks, when all of them have come: NCCL on GPUs, gloo
    elsewhere, which listens on this machine's own address only.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
        backend = "nccl"
    else:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
        backend = "gloo"
    distributed.init_process_group(backend, store=store, rank=shard.rank, world_size=shard.size)


def agree_on_blocks(
    room: int | None, choose: Callable[[int | None], int], shard: Shard, device: torch.device
) -> int:
    """What `choose` makes on rank 0 of the least room, in bytes, of all ranks; on every rank. May
    raise on rank 0 what `choose` raises.
    """
    least = torch.tensor(_UNBOUNDED if room is None else room, device=device)
    distributed.all_reduce(least, distributed.ReduceOp.MIN)
    blocks = torch.zeros_like(least)
    if shard.rank == 0:
        blocks += choose(None if int(least) == _UNBOUNDED else int(least))
    distributed.broadcast(blocks, 0)
    return int(blocks)


def gather_kv(runner: ModelRunner, message: ReadRanks) -> list[Tensor] | None:
    """What each rank has of the KV, as bytes; on rank 0, elsewhere nothing. Raises
    `DeviceMemoryError` on rank 0 where one of them has no memory for it.
    """
    try:
        own = torch.frombuffer(
            runner.read_kv(message.blocks, message.num_tokens), dtype=torch.uint8
        )
    except DeviceMemoryError:
        own = torch.empty(0, dtype=torch.uint8)
    least = torch.tensor(len(own))
    group = _host_group()
    distributed.all_reduce(least, distributed.ReduceOp.MIN, group)
    if distributed.get_rank():
        if least:
            distributed.gather(own, dst=0, group=group)
        return None
    if not least:
        raise DeviceMemoryError("a rank has no memory to copy its KV")
    parts = [torch.empty_like(own) for _ in range(distributed.get_world_size())]
    distributed.gather(own, parts, group=group)
    return parts


def _bytes(data: memoryview) -> Tensor:
    return torch.frombuffer(data, dtype=torch.uint8)


@functools.cache
def _host_group() -> Any:
    """Of all ranks, for what is in the host's memory."""
    return distributed.new_group(backend="gloo")


class TensorParallelExecutor(Executor):
    """Rank 0: runs what the other ranks run, and answers; implements `Executor` and `KvMemory`, of
    all the model's `num_kv_heads`. Raises `WorkerError` when a rank is gone.
    """

    def __init__(self, runner: ModelRunner, ranks: Ranks, size: int, num_kv_heads: int) -> None:
        self._runner = runner
        self._ranks = ranks
        self._num_kv_heads = num_kv_heads
        # Ranks in a row have the same KV head, where there are more ranks.
        self._sharing = max(1, size // num_kv_heads)
        self._size = size
        dtype, _, self._own_heads, dim = runner.kv_shape
        self._head_bytes = dim * getattr(torch, dtype).itemsize

    def submit(self, step: SchedulerOutput) -> Ticket:
        """Hand the step to all ranks and launch it here."""
        own, *others = self._shards(step)
        try:
            with self._reporting():
                self._ranks.send(*map(StepRanks, others))
                return self._runner.submit(own)
        except DeviceMemoryError as error:  # the others have run the step, or wait for us in it
            raise WorkerError(f"rank 0: {error}: lower --gpu-memory-utilization") from error

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        try:
            yield
        except (OSError, RuntimeError) as error:
            reason = self._ranks.why_lost(GRACE_SECONDS)
            if reason is None:
                raise
            raise WorkerError(reason) from error

    def _shards(self, step: SchedulerOutput) -> list[SchedulerOutput]:
        """The step of each rank, which differ in the KV that they load."""
        if not step.kv_loads:
            return [step, step]
        loads: list[list[KvLoad]] = [[] for _ in range(self._size)]
        for load in step.kv_loads:
            shape = (-1, self._num_kv_heads, self._head_bytes)
            parts = [_bytes(part).view(shape) for part in load.parts]
            for rank, mine in enumerate(loads):
                first = rank // self._sharing * self._own_heads
                own = (part[:, first : first + self._own_heads] for part in parts)
                mine.append(KvLoad(load.blocks, tuple(p.reshape(-1).numpy().data for p in own)))
        return [dataclasses.replace(step, kv_loads=tuple(mine)) for mine in loads]

    @property
    def kv_shape(self) -> tuple[str, int, int, int]:
        """As `KvMemory` says."""
        dtype, layers, _, dim = self._runner.kv_shape
        return dtype, layers, self._num_kv_heads, dim

    @property
    def kv_facts(self) -> tuple[object, ...]:
        """As `KvMemory` says."""
        return self._runner.kv_facts

    def read_kv(self, blocks: Sequence[int], num_tokens: int) -> memoryview:
        """As `KvMemory` says."""
        message = ReadRanks(tuple(blocks), num_tokens)
        with self._reporting():
            self._ranks.send(message)
            parts = gather_kv(self._runner, message)
        shape = (-1, self._own_heads, self._head_bytes)
        heads = [part.view(shape) for part in (parts or [])[:: self._sharing]]
        return torch.cat(heads, 1).reshape(-1).numpy().data

    def read_adapter(self, adapter: Adapter) -> Future[Any]:
        """Raises RuntimeError: ranks are built without adapters."""
        return self._runner.read_adapter(adapter)

    def sleep(self, level: int) -> None:
        """Every rank gives its memory back."""
        self._ranks.send(SleepRanks(level))
        self._runner.sleep(level)

    def wake(self, tags: frozenset[str]) -> None:
        """Every rank takes its memory back, without waiting for the others."""
        self._ranks.send(WakeRanks(tags))
        self._runner.wake(tags)

    def shutdown(self) -> None:
        """End all ranks. Idempotent."""
        self._runner.shutdown()
        self._ranks.close()
