"""The ranks of tensor parallelism: processes that run the same steps, each on its shard of a model.

Rank 0, the engine's own process, starts the others (`worker.executor.follower`) and hands them
every step before it runs that step itself: the collectives inside the model then meet. All ranks
draw the same tokens from the same logits; only rank 0 reports them.

A rank reads messages of msgpack from its standard input, each prefixed by its length (4 bytes,
little endian). When the input ends, the rank ends at once, even inside a step. When a rank ends, a
collective may wait for ever, so the thread that watches the rank ends rank 0.
"""

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
from weakref import WeakValueDictionary

import msgspec
import torch
from torch import Tensor, distributed

from worker.config import EngineConfig
from worker.errors import DeviceMemoryError, WorkerError
from worker.executor.adapters import ReadAdapter
from worker.executor.interface import Executor, Ticket
from worker.executor.kv_cache import as_bytes
from worker.executor.model_runner import ModelRunner
from worker.ops.parallel import Shard
from worker.types import Adapter, KvLoad, KvSave, SchedulerOutput

logger = logging.getLogger(__name__)

# Time for a call that fails together with a rank to report it, before the process is ended.
GRACE_SECONDS = 1.0
EXIT_SECONDS = 2.0
_HOST = "127.0.0.1"
_LENGTH_BYTES = 4
_UNBOUNDED = torch.iinfo(torch.int64).max


class JoinRanks(msgspec.Struct, frozen=True, tag=True):
    """The first message: build shard `rank`, and find the other ranks through rank 0's `port`."""

    config: EngineConfig
    rank: int
    port: int


class StepRanks(msgspec.Struct, frozen=True, tag=True):
    step: SchedulerOutput


class SleepRanks(msgspec.Struct, frozen=True, tag=True):
    level: int


class WakeRanks(msgspec.Struct, frozen=True, tag=True):
    tags: frozenset[str]


class ReadRanks(msgspec.Struct, frozen=True, tag=True):
    """Asks every rank to run `KvMemory.read_kv` and to send its part to rank 0."""

    blocks: tuple[int, ...]
    num_tokens: int


class AdaptRanks(msgspec.Struct, frozen=True, tag=True):
    """Asks every rank to begin to read its part of an adapter, which steps name by its number. Of
    those read before, they still name the numbers in `held`.
    """

    adapter: Adapter
    held: tuple[int, ...]


ToRank = JoinRanks | StepRanks | SleepRanks | WakeRanks | ReadRanks | AdaptRanks


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
        """Start the processes and join them, with rank 0's `device`. Call it from a thread that
        lives as long as the ranks: on Linux they end with it.
        """
        with socket.create_server((_HOST, 0)) as listener:
            port = listener.getsockname()[1]
            for rank in range(1, self._size):
                self._spawn(rank, port)
            # The store owns the file descriptor from here on.
            store = _store(port, self._size, is_master=True, master_listen_fd=listener.detach())
        join(Shard(0, self._size), store, device)
        self._is_joined = True

    def send(self, *messages: ToRank) -> None:
        """Send one message to all ranks, or to each its own. Raises OSError if a rank has ended."""
        if self._closing.is_set():
            raise RuntimeError("the executor is shut down")
        encoded = itertools.cycle([self._encoder.encode(message) for message in messages])
        with self._sending:  # every rank receives the messages of all threads in the same order
            for process, own in zip(self._processes, encoded, strict=False):
                _write(process, own)

    def why_lost(self, timeout_seconds: float) -> str | None:
        """Return which rank has ended; None if none ends in time, or all were asked to end."""
        if self._closing.is_set() or not self._lost.wait(timeout_seconds):
            return None
        return self._why_lost

    def close(self) -> None:
        """Close the input of all ranks, which ends them, and kill those that remain. Idempotent."""
        self._closing.set()
        for process in self._processes:
            try:
                _input(process).close()
            except BrokenPipeError:  # unread messages
                logger.debug("rank of process %d had already ended", process.pid)
        for process, watcher in zip(self._processes, self._watchers, strict=True):
            watcher.join(EXIT_SECONDS)
            process.kill()
            watcher.join()
        if self._is_joined:
            self._is_joined = False
            # The cached group ends with the default group.
            _host_group.cache_clear()
            distributed.destroy_process_group()

    def _spawn(self, rank: int, port: int) -> None:
        process = subprocess.Popen(
            # -P: never import a folder of the current directory that has our package's name.
            [
                *(sys.executable, "-P", "-m", "worker.executor.follower"),
                *(str(os.getpid()), str(rank)),
            ],
            stdin=subprocess.PIPE,
            stdout=2,  # the prints of libraries belong in the log
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


def read_messages(stream: IO[bytes], take: Callable[[bytearray], None]) -> None:
    """Pass every message of a rank's input to `take`, still encoded, until the input ends."""
    while head := stream.read(_LENGTH_BYTES):
        # Torch warns of tensors in memory that cannot be written, though it only reads loads.
        take(bytearray(stream.read(int.from_bytes(head, "little"))))


def _store(port: int, size: int, **options: Any) -> Any:
    """Return the store through which ranks find each other: a server in rank 0, on loopback."""
    make: Any = distributed.TCPStore  # type: ignore[attr-defined]
    return make(_HOST, port, size, wait_for_workers=False, **options)


def find_ranks(message: JoinRanks) -> Any:
    return _store(message.port, message.config.tensor_parallel_size)


def join(shard: Shard, store: Any, device: torch.device) -> None:
    """Make torch's default group of all ranks: NCCL on GPUs, else gloo on loopback only."""
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
    """Return rank 0's result of `choose` for the least room, in bytes, of all ranks."""
    least = torch.tensor(_UNBOUNDED if room is None else room, device=device)
    distributed.all_reduce(least, distributed.ReduceOp.MIN)
    blocks = torch.zeros_like(least)
    if shard.rank == 0:
        blocks += choose(None if int(least) == _UNBOUNDED else int(least))
    distributed.broadcast(blocks, 0)
    return int(blocks)


def gather_kv(runner: ModelRunner, message: ReadRanks) -> list[Tensor] | None:
    """Return each rank's part of the KV, as bytes, on rank 0; None on the others. Raises
    `DeviceMemoryError` on rank 0 if a rank has no memory for it.
    """
    try:
        own = as_bytes(runner.read_kv(message.blocks, message.num_tokens))
    except DeviceMemoryError:
        own = torch.empty(0, dtype=torch.uint8)
    # A rank without memory would leave the others in the gather for ever, so all agree first.
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


@functools.cache
def _host_group() -> Any:
    # The bytes are in host memory, which NCCL cannot send.
    return distributed.new_group(backend="gloo")


class TensorParallelExecutor(Executor):
    """Runs the same steps on rank 0 as the other ranks do, and answers; implements `Executor` and
    `KvMemory`, for all the model's `num_kv_heads`. Raises `WorkerError` when a rank has ended.
    """

    def __init__(self, runner: ModelRunner, ranks: Ranks, size: int, num_kv_heads: int) -> None:
        self._runner = runner
        self._ranks = ranks
        self._num_kv_heads = num_kv_heads
        # With more ranks than KV heads, consecutive ranks share a KV head.
        self._sharing = max(1, size // num_kv_heads)
        self._size = size
        self._reads: dict[int, Future[Any]] = {}  # of adapters, until the next is read
        self._adapters: WeakValueDictionary[int, ReadAdapter] = WeakValueDictionary()
        dtype, layers, self._own_heads, dim = runner.kv_shape
        self._head_bytes = dim * getattr(torch, dtype).itemsize
        self._token_bytes = layers * 2 * num_kv_heads * self._head_bytes
        # The threads of steps and of the engine both read; ranks meet for one of them at a time.
        self._reading = threading.Lock()

    def submit(self, step: SchedulerOutput) -> Ticket:
        own, *others = self._shards(step)
        try:
            for save in step.kv_saves:
                self._save(save)
            with self._reporting():
                self._ranks.send(*map(StepRanks, others))
                return self._runner.submit(own)
        except DeviceMemoryError as error:  # the others have run the step, or wait for rank 0 in it
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
        """Return the step of each rank, without saves; the steps differ in the KV that they load,
        and rank 0's in the adapters.
        """
        step = dataclasses.replace(step, kv_saves=())
        puts = tuple((slot, read and read.number) for slot, read in step.adapters)
        other = dataclasses.replace(step, adapters=puts) if puts else step
        if not step.kv_loads:
            # One message for all ranks is encoded once.
            return [step, other]
        loads: list[list[KvLoad]] = [[] for _ in range(self._size)]
        for load in step.kv_loads:
            shape = (-1, self._num_kv_heads, self._head_bytes)
            parts = [as_bytes(part).view(shape) for part in load.parts]
            for rank, mine in enumerate(loads):
                first = rank // self._sharing * self._own_heads
                own = (part[:, first : first + self._own_heads] for part in parts)
                views = tuple(part.reshape(-1).numpy().data for part in own)
                mine.append(dataclasses.replace(load, parts=views))
        steps = [step, *[other] * (self._size - 1)]
        return [
            dataclasses.replace(own, kv_loads=tuple(mine))
            for own, mine in zip(steps, loads, strict=True)
        ]

    def _save(self, save: KvSave) -> None:
        """Gather saved blocks before their step, so that they are whole on rank 0 when it runs."""
        size = save.into[0].nbytes
        num_tokens = size * len(save.blocks) // self._token_bytes
        data = self.read_kv(save.blocks, num_tokens)
        for number, into in enumerate(save.into):
            into[:] = data[number * size : (number + 1) * size]

    @property
    def kv_shape(self) -> tuple[str, int, int, int]:
        dtype, layers, _, dim = self._runner.kv_shape
        return dtype, layers, self._num_kv_heads, dim

    @property
    def kv_facts(self) -> tuple[object, ...]:
        return self._runner.kv_facts

    def read_kv(self, blocks: Sequence[int], num_tokens: int) -> memoryview:
        message = ReadRanks(tuple(blocks), num_tokens)
        with self._reporting(), self._reading:
            self._ranks.send(message)
            parts = gather_kv(self._runner, message)
        shape = (-1, self._own_heads, self._head_bytes)
        heads = [part.view(shape) for part in (parts or [])[:: self._sharing]]
        return torch.cat(heads, 1).reshape(-1).numpy().data

    def host_memory(self, num_bytes: int) -> memoryview:
        return self._runner.host_memory(num_bytes)

    def read_adapter(self, adapter: Adapter) -> Future[Any]:
        """Have every rank begin to read its part; a rank that fails alone ends when it has to put
        the adapter. Rank 0 decides how long all hold it: until no one else refers to what it read.
        """
        for number, read in [*self._reads.items()]:
            if read.done():
                del self._reads[number]
                if read.exception() is None:
                    self._adapters[number] = read.result()
        with self._reporting():
            self._ranks.send(AdaptRanks(adapter, (*self._reads, *self._adapters)))
        read = self._reads[adapter.number] = self._runner.read_adapter(adapter)
        return read

    def sleep(self, level: int) -> None:
        self._ranks.send(SleepRanks(level))
        self._runner.sleep(level)

    def wake(self, tags: frozenset[str]) -> None:
        self._ranks.send(WakeRanks(tags))
        self._runner.wake(tags)

    def shutdown(self) -> None:
        self._runner.shutdown()
        self._ranks.close()
