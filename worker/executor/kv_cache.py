"""The paged KV cache: its size, and the transfer of its data, from and to the host and other
processes of this machine.

Those open device memory by CUDA IPC. An exporter copies KV into its pool, so no block of the cache
waits for a peer. A taker copies it from there to its own device, beside the steps, and uses it only
if the exporter then confirms that it held the export all the time.
"""

import ctypes
import logging
import mmap
import re
import struct
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch
from torch import Tensor

from worker.config import EngineConfig, KvTransferConfig
from worker.errors import ConfigError, KvTransferError
from worker.executor.memory import DeviceMemory
from worker.models.config import ModelConfig
from worker.types import KvBytes, KvLoad, KvSave, PooledKv

logger = logging.getLogger(__name__)

# The cache of a CPU has this size, or the size of the context, up to a share of the memory.
_CPU_DEFAULT_BYTES = 1 << 30
_CPU_MEMORY_SHARE = 0.25
_GPU_SPARE = 0.08
# A default context is cut to the capacity of the memory, but not below the length of usual chats.
_MIN_CONTEXT = 512
# Bytes that are gathered at once on a GPU, on their way from or to the host.
_PIECE_BYTES = 1 << 26
# The part of a GPU that a pool may take, and the KV that arrives from others'.
_POOL_SHARE = 0.02
_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
_HANDLE = struct.Struct("<QQ64s")  # the place in its allocation, the size, the driver's handle


def room_bytes(
    config: EngineConfig, memory: DeviceMemory | None, step_bytes: int = 0
) -> int | None:
    """Return the memory that a cache may take, with `step_bytes` reserved for steps, and room for
    KV of and for other processes; None: unbounded.

    On a CPU this is a share of the available memory (ranks divide it): pages are taken only when
    they are written, so workers that start together all see the same memory.
    """
    if memory is not None:
        free, total = memory.free_and_total()
        if config.tensor_parallel_size == 1:
            step_bytes += 2 * pool_bytes(config.kv_transfer, total)
        taken = memory.held() + step_bytes
        return gpu_room_bytes(free - step_bytes, total, taken, config.gpu_memory_utilization)
    available = available_bytes(read_file)
    share = min(_CPU_MEMORY_SHARE, config.gpu_memory_utilization) / config.tensor_parallel_size
    return None if available is None else int(available * share)


def gpu_room_bytes(free: int, total: int, taken: int, utilization: float) -> int:
    """Return the bytes left in this worker's part of a GPU, of which it has or needs `taken`. A
    small reserve stays free for memory that torch does not count.
    """
    spare = min(_GPU_SPARE, 1 - utilization) * total
    return max(0, int(min(free - spare, utilization * total - taken)))


def choose_num_blocks(
    config: EngineConfig,
    model: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    room: int | None,
    drafter_token_bytes: int = 0,
) -> int:
    """Return the configured number of blocks, else the number that fits in `room` bytes, where a
    drafter takes `drafter_token_bytes` for each token.

    Raises `ConfigError` if the blocks cannot hold one sequence of `max_model_len` tokens (or, if
    that may be cut, of `_MIN_CONTEXT`), or if that length exceeds the model's context.
    """
    max_model_len = config.scheduler.max_model_len
    if max_model_len > model.max_context:
        raise ConfigError(
            f"--max-model-len {max_model_len} is more than the model's context of "
            f"{model.max_context} tokens"
        )
    token_bytes = model.kv_elements_per_token * dtype.itemsize + drafter_token_bytes
    block_bytes = config.block_size * token_bytes
    num_blocks = config.num_blocks_override
    if num_blocks is None:
        num_blocks = _budget_bytes(config, block_bytes, device, room) // block_bytes
    least = min(max_model_len, _MIN_CONTEXT) if config.fits_max_model_len else max_model_len
    if num_blocks * config.block_size < least:
        is_gpu = device.type == "cuda"
        raise ConfigError(_too_small(config, num_blocks, block_bytes, least, is_gpu))
    return num_blocks


def _budget_bytes(
    config: EngineConfig, block_bytes: int, device: torch.device, room: int | None
) -> int:
    if config.kv_cache_memory_bytes is not None:
        return config.kv_cache_memory_bytes
    if device.type == "cuda" and room is not None:
        return room
    sequence_bytes = -(-config.scheduler.max_model_len // config.block_size) * block_bytes
    wanted = max(_CPU_DEFAULT_BYTES, sequence_bytes)
    useful = config.scheduler.max_num_seqs * sequence_bytes
    return min(wanted, useful) if room is None else min(wanted, useful, room)


def _too_small(
    config: EngineConfig, num_blocks: int, block_bytes: int, least: int, is_gpu: bool
) -> str:
    needed = -(-least // config.block_size)
    held = num_blocks * config.block_size
    size = f"{num_blocks} blocks ({num_blocks * block_bytes >> 20} MiB)"
    more = f"raise --kv-cache-memory-bytes to {needed * block_bytes}"
    if config.num_blocks_override is not None:
        more = f"raise --num-gpu-blocks-override to {needed}"
    elif config.kv_cache_memory_bytes is None:
        size += ", all that is its share of the available memory,"
        more = f"free memory, or set --kv-cache-memory-bytes to {needed * block_bytes}"
        if is_gpu:
            size = size.removesuffix(",") + " beside weights and steps,"
            more = (
                "raise --gpu-memory-utilization, lower --max-num-batched-tokens or --max-num-seqs"
            )
    lower = f", or lower --max-model-len to {held}" if held else ""
    return f"a KV cache of {size} cannot hold --max-model-len {least}: {more}{lower}"


def allocate(
    num_blocks: int, block_size: int, model: ModelConfig, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return the cache [layers, num_blocks, 2 (K, V), kv_heads, block_size, head_dim], all zero."""
    shape = (model.num_layers, num_blocks, 2, model.num_kv_heads, block_size, model.head_dim)
    return zeros(shape, dtype, device)


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros; on a CPU, pages are taken only when they are written."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = int(np.prod(shape)) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, np.uint8)).view(dtype).view(shape)


def copy_blocks(cache: Tensor, copies: tuple[tuple[int, int], ...]) -> None:
    """Copy blocks (source, destination) over all layers; all are read before any is written. If the
    device's memory is too small, copy through the host's memory.
    """
    cache = _movable(cache)
    try:
        pairs = torch.tensor(copies, dtype=torch.int64, device=cache.device)
        read = cache[:, pairs[:, 0]]
    except torch.OutOfMemoryError:
        sources = [[layer[source].to("cpu", copy=True) for layer in cache] for source, _ in copies]
        for (_, destination), blocks in zip(copies, sources, strict=True):
            for layer, block in zip(cache, blocks, strict=True):
                layer[destination].copy_(block)
    else:
        cache[:, pairs[:, 1]] = read


def _movable(cache: Tensor) -> Tensor:
    """Return a view that torch can index: eight-bit floats only as bytes."""
    return cache.view(torch.uint8) if cache.itemsize == 1 else cache


def read_tokens(
    cache: Tensor, blocks: Sequence[int], num_tokens: int, keys_across: bool, into: Any = None
) -> Any:
    """Return the KV of the first tokens in `blocks` as bytes on the host: [num_tokens, layers, 2,
    kv_heads, head_dim]. With `into`, a tensor of bytes with room for the blocks: its first bytes.
    `keys_across`: keys are stored as [head_dim, block_size].
    """
    cache = _movable(cache)
    layers, _, _, heads, size, dim = cache.shape
    shape = (len(blocks), size, layers, 2, heads, dim)
    if into is not None:
        rows = into.view(cache.dtype).view(shape)
    else:
        rows = (_pinned if cache.is_cuda else torch.empty)(shape, dtype=cache.dtype)
    if cache.is_cuda:
        for some in _pieces(len(blocks), rows[:1].nbytes):
            rows[some].copy_(gathered(cache, blocks[some]))
        torch.cuda.current_stream(cache.device).synchronize()
    else:
        for number, layer in enumerate(cache):
            keys, values = layer[list(blocks)].unbind(1)
            if keys_across:
                keys = keys.reshape(-1, heads, dim, size).transpose(2, 3)
            rows[:, :, number, 0] = keys.transpose(1, 2)
            rows[:, :, number, 1] = values.transpose(1, 2)
    tokens = rows.view(-1, layers, 2, heads, dim)[:num_tokens]
    data = tokens.reshape(-1).view(torch.uint8)
    return data.numpy().data if into is None else data


def _pinned(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Allocate pinned memory, which torch caches: pinning pages takes longer than a copy."""
    try:
        return torch.empty(shape, dtype=dtype, pin_memory=True)
    except RuntimeError:  # no more memory can be pinned
        return torch.empty(shape, dtype=dtype)


def as_bytes(data: KvBytes) -> Tensor:
    return data if isinstance(data, Tensor) else torch.frombuffer(data, dtype=torch.uint8)


def _pieces(num_blocks: int, block_bytes: int) -> Iterator[slice]:
    step = max(1, _PIECE_BYTES // block_bytes)
    for begin in range(0, num_blocks, step):
        yield slice(begin, begin + step)


def gathered(cache: Tensor, blocks: Sequence[int]) -> Tensor:
    """Return the blocks side by side: [blocks, block_size, layers, 2, kv_heads, head_dim]."""
    index = torch.tensor(blocks, dtype=torch.int64, device=cache.device)
    return cache[:, index].permute(1, 4, 0, 2, 3, 5).contiguous()


def write_tokens(cache: Tensor, load: KvLoad, keys_across: bool) -> None:
    """Write the result of `read_tokens`; a GPU retries with halves until they fit its memory."""
    cache = _movable(cache)
    half = len(load.blocks) // 2
    if not half or cache.device.type != "cuda" or half * cache[:, 0].nbytes < _PIECE_BYTES:
        try:
            _write(cache, load, keys_across)
            return
        except torch.OutOfMemoryError:
            if not half:
                raise
    begin, end = load.parts[:half], load.parts[half:]
    if len(load.parts) == 1:  # otherwise each part is a block
        num_bytes = half * cache[:, 0].nbytes
        begin, end = (load.parts[0][:num_bytes],), (load.parts[0][num_bytes:],)
    write_tokens(cache, KvLoad(load.blocks[:half], begin), keys_across)
    write_tokens(cache, KvLoad(load.blocks[half:], end), keys_across)


def _write(cache: Tensor, load: KvLoad, keys_across: bool) -> None:
    layers, _, _, heads, size, dim = cache.shape
    parts = [as_bytes(part).view(cache.dtype) for part in load.parts]
    parts = [part.to(cache.device, non_blocking=True) for part in parts]
    rows = (parts[0] if len(parts) == 1 else torch.cat(parts)).view(-1, layers, 2, heads, dim)
    if rows.is_cuda:  # what came from another device was allocated on another stream
        rows.record_stream(torch.cuda.current_stream(rows.device))
    num_full, rest = divmod(len(rows), size)
    index = torch.tensor(load.blocks[:num_full], dtype=torch.int64, device=cache.device)
    for number, layer in enumerate(cache):
        tokens = rows[:, number]
        if num_full:
            full = tokens[: num_full * size].view(num_full, size, 2, heads, dim)
            keys, values = full.permute(2, 0, 3, 1, 4)
            if keys_across:
                keys = keys.transpose(2, 3).reshape(num_full, heads, size, dim)
            layer[index] = torch.stack((keys, values), 1)
        if rest:
            keys, values = tokens[num_full * size :].permute(1, 2, 0, 3)
            block = layer[load.blocks[num_full]]
            if keys_across:
                block[0].view(heads, dim, size)[:, :, :rest] = keys.transpose(1, 2)
            else:
                block[0, :, :rest] = keys
            block[1, :, :rest] = values


class BlockSaver:
    """Carries out `SchedulerOutput.kv_saves`. On a GPU the blocks are gathered on the stream of the
    steps, and copied to the host on a second stream while the step runs; the next step waits on the
    device for the copies.
    """

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._saved: torch.cuda.Event | None = None

    def save(self, cache: Tensor, saves: Sequence[KvSave], keys_across: bool) -> None:
        """Start the saves of a step. Called first in each step, even without `saves`."""
        cache = _movable(cache)
        if self._saved is not None:
            torch.cuda.current_stream(cache.device).wait_event(self._saved)
            self._saved = None
        for save in saves:
            if cache.device.type == "cuda":
                self._begin(cache, save)
            else:
                _save_now(cache, save, keys_across)

    def _begin(self, cache: Tensor, save: KvSave) -> None:
        if self._stream is None:
            self._stream = torch.cuda.Stream(cache.device)  # type: ignore[no-untyped-call]
        stream = self._stream
        for some in _pieces(len(save.blocks), save.into[0].nbytes):
            part = KvSave(save.blocks[some], save.into[some])
            try:
                rows = gathered(cache, part.blocks)
            except torch.OutOfMemoryError:
                _save_now(cache, part, keys_across=False)
                continue
            stream.wait_stream(torch.cuda.current_stream(cache.device))
            with torch.cuda.stream(stream):
                for row, into in zip(rows, part.into, strict=True):
                    host = torch.frombuffer(into, dtype=cache.dtype).view(row.shape)
                    host.copy_(row, non_blocking=True)
            # Otherwise the allocator may reuse the rows while the second stream reads them.
            rows.record_stream(stream)
        self._saved = stream.record_event()


def _save_now(cache: Tensor, save: KvSave, keys_across: bool) -> None:
    num_tokens = len(save.blocks) * cache.shape[4]
    data = read_tokens(cache, save.blocks, num_tokens, keys_across)
    for number, into in enumerate(save.into):
        into[:] = data[number * into.nbytes : (number + 1) * into.nbytes]


def host_memory(num_bytes: int, device: torch.device) -> memoryview:
    """Allocate memory that `device` reads fast: pinned for a GPU. Raises `ConfigError`."""
    available = available_bytes(read_file)
    if available is not None and num_bytes > available:
        raise ConfigError(
            f"--kv-offloading-size: {num_bytes >> 20} MiB are more than the {available >> 20} MiB"
            " of memory that are available"
        )
    try:  # private pages, which are taken only when they are written
        pages = mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError, OverflowError) as error:
        raise ConfigError(f"--kv-offloading-size: {num_bytes} bytes: {error}") from error
    memory = np.frombuffer(pages, np.uint8)
    if device.type != "cpu":
        _pin(memory)
    return memory.data


def _pin(memory: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
    """Pin memory through the driver; torch's allocator would round its size to a power of two."""
    cuda: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    address = memory.ctypes.data
    failure = cuda.cudaHostRegister(address, memory.nbytes, 0)
    if failure != cuda.cudaError.success:
        raise ConfigError(
            f"--kv-offloading-size: {memory.nbytes >> 20} MiB cannot be pinned ({failure}): lower"
            " it, or raise the limit of locked memory (ulimit -l)"
        )
    weakref.finalize(memory, cuda.cudaHostUnregister, address)


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * 64),)


class KvPool:
    """Sole owner of `memory` for exports (it may be empty), and of the stream of copies.

    `read` puts the KV of blocks, of `block_bytes` each, into given memory, as `read_tokens` does.
    At most `limit_bytes` arrive at a time. `driver` names the library of CUDA's; if it does not
    share memory, nothing is exported or arrives here.
    """

    def __init__(
        self,
        driver: str,
        memory: Tensor,
        limit_bytes: int,
        read: Callable[..., Any],
        block_bytes: int,
    ) -> None:
        self._read, self._block_bytes = read, block_bytes
        self._stream: Any = None
        if memory.is_cuda:
            self._stream = torch.cuda.Stream(memory.device)  # type: ignore[no-untyped-call]
        self._taken: dict[int, int] = {}  # the ends of regions, by their starts
        self._given_back: deque[int] = deque()  # any thread appends
        self._context, self._handle = ctypes.c_void_p(), b""
        try:
            self._driver = ctypes.CDLL(driver)
            self._call("cuCtxGetCurrent", ctypes.byref(self._context))
            self._handle = self._named(memory) if memory.nbytes else b""
        except (OSError, KvTransferError) as error:
            logger.warning("KV moves through the host's memory: %s", error)
            memory, limit_bytes = memory[:0], 0
        self._memory, self.limit_bytes = memory, limit_bytes

    def _named(self, memory: Tensor) -> bytes:
        base, size, own = ctypes.c_uint64(), ctypes.c_size_t(), _Handle()
        address = ctypes.c_uint64(memory.data_ptr())
        self._call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), address)
        self._call("cuIpcGetMemHandle", ctypes.byref(own), base)
        return _HANDLE.pack(address.value - base.value, memory.nbytes, bytes(own))

    def keep(self, blocks: Sequence[int], num_tokens: int) -> PooledKv | None:
        """Copy the KV of the first tokens in `blocks`; None: there is no room. Waits, on the
        engine's thread. Raises `DeviceMemoryError`.
        """
        while self._given_back:
            del self._taken[self._given_back.popleft()]
        start, size = 0, len(blocks) * self._block_bytes
        for begin, end in sorted(self._taken.items()):
            if begin - start >= size:
                break
            start = end
        if start + size > self._memory.nbytes:
            return None
        data: Tensor = self._read(blocks, num_tokens, self._memory[start : start + size])
        self._taken[start] = start + size
        place = (self._handle, start, data.nbytes)
        export = PooledKv(*place, lambda: self.staged(data).numpy().data)
        weakref.finalize(export, self._given_back.append, start)
        return export

    def fetch(self, handle: bytes, start: int, size: int) -> Tensor:
        """Copy bytes from another process's pool to this device. Waits, on any thread. Raises
        `KvTransferError`.
        """
        is_handle = len(handle) == _HANDLE.size
        place, most, own = _HANDLE.unpack(handle) if is_handle else (0, 0, b"")
        if not 0 <= start <= most - size:
            raise KvTransferError("the other end names no memory of that size")
        try:
            with torch.cuda.stream(self._stream):
                into = torch.empty(size, dtype=torch.uint8, device=self._memory.device)
        except torch.OutOfMemoryError as error:
            raise KvTransferError("the device has no room for KV") from error
        on = ctypes.c_void_p(0 if self._stream is None else self._stream.cuda_stream)
        opened, named = ctypes.c_uint64(), _Handle.from_buffer_copy(own)
        self._call("cuCtxSetCurrent", self._context)
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(opened), named, _PEER_ACCESS)
        try:
            ends = ctypes.c_uint64(into.data_ptr()), ctypes.c_uint64(opened.value + place + start)
            self._call("cuMemcpyDtoDAsync_v2", *ends, ctypes.c_size_t(size), on)
            self._call("cuStreamSynchronize", on)
        finally:
            self._call("cuIpcCloseMemHandle", opened)
        return into

    def staged(self, data: memoryview | Tensor) -> Tensor:
        """Copy bytes to pinned memory, which a step loads without waiting. Waits, on any thread."""
        with torch.cuda.stream(self._stream):
            return _pinned((data.nbytes,), torch.uint8).copy_(as_bytes(data))

    def _call(self, name: str, *arguments: object) -> None:
        if error := getattr(self._driver, name)(*arguments):
            raise KvTransferError(f"{name} of the CUDA driver fails with error {error}")


def pool_bytes(transfer: KvTransferConfig | None, total: int) -> int:
    """Return the size of the pool of a GPU with `total` bytes, and the limit of what arrives: 0 if
    peers are on other machines.
    """
    if transfer is None or not ip_address(transfer.kv_ip).is_loopback:
        return 0
    return min(int(transfer.kv_buffer_size), int(_POOL_SHARE * total))


def open_pool(transfer: KvTransferConfig, cache: Tensor, read: Callable[..., Any]) -> KvPool | None:
    """Make the pool of a GPU's cache; None: a CPU."""
    if not cache.is_cuda:
        return None
    size = pool_bytes(transfer, torch.cuda.mem_get_info(cache.device)[1])
    try:
        memory = cache.new_empty(size * transfer.gives, dtype=torch.uint8)
    except torch.OutOfMemoryError:  # the cache's size was given
        memory = cache.new_empty(0, dtype=torch.uint8)
    return KvPool("libcuda.so.1", memory, size, read, cache[:, 0].nbytes)


Read = Callable[[str], str | None]

_AVAILABLE = re.compile(r"^MemAvailable:\s+(\d+) kB$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class _Accounting:
    """The names that a cgroup version has for the files of a folder, and for the page cache."""

    limits: tuple[str, ...]
    usage: str
    page_cache: re.Pattern[str]


_V1 = _Accounting(
    ("memory.limit_in_bytes",),
    "memory.usage_in_bytes",
    re.compile(r"^total_(?:in)?active_file (\d+)$", re.MULTILINE),
)
_V2 = _Accounting(
    ("memory.max", "memory.high"),
    "memory.current",
    re.compile(r"^(?:in)?active_file (\d+)$", re.MULTILINE),
)


def available_bytes(read: Read) -> int | None:
    """Return the bytes that can be taken without swapping or an OOM kill; None if unknown."""
    machine = _AVAILABLE.search(read("/proc/meminfo") or "")
    bounds = [int(machine[1]) << 10] if machine else []
    bounds += [
        bound
        for accounting, folder in _folders(read)
        if (bound := _left(accounting, folder, read)) is not None
    ]
    return max(0, min(bounds)) if bounds else None


def read_file(path: str) -> str | None:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return None


def _left(accounting: _Accounting, folder: PurePosixPath, read: Read) -> int | None:
    limits = [_number(read(f"{folder}/{name}")) for name in accounting.limits]
    known = [limit for limit in limits if limit is not None]
    usage = _number(read(f"{folder}/{accounting.usage}"))
    if not known or usage is None:
        return None
    # Usage includes page cache, which the kernel reclaims before it kills.
    page_cache = accounting.page_cache.findall(read(f"{folder}/memory.stat") or "")
    return min(known) - usage + sum(map(int, page_cache))


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.strip().isdecimal() else None


def _folders(read: Read) -> Iterator[tuple[_Accounting, PurePosixPath]]:
    """Yield this process's cgroup folders that account for memory, with their visible parents: a
    container sees its own folder as the highest.
    """
    paths: dict[_Accounting, PurePosixPath] = {}
    for line in (read("/proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            paths[_V2] = PurePosixPath(path)
        elif "memory" in controllers.split(","):
            paths[_V1] = PurePosixPath(path)
    for line in (read("/proc/self/mountinfo") or "").splitlines():
        fields, _, kind = line.partition(" - ")
        accounting = _accounting(kind.split())
        if accounting is None or accounting not in paths:
            continue
        root, top = (PurePosixPath(field) for field in fields.split()[3:5])
        own, below = paths[accounting], PurePosixPath()
        # A cgroup namespace names folders above its root by "..", and no mount shows them.
        if own.is_relative_to(root) and ".." not in own.parts:
            below = own.relative_to(root)
        for folder in (below, *below.parents):
            yield accounting, top / folder


def _accounting(kind: list[str]) -> _Accounting | None:
    if kind[0] == "cgroup2":
        return _V2
    return _V1 if kind[0] == "cgroup" and "memory" in kind[-1].split(",") else None
