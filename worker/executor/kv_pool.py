"""KV in device memory that other processes of this machine open, by CUDA IPC.

An exporter copies KV into its pool, so no block of the cache waits for a peer. A taker copies it
from there to its own device, beside the steps, and uses it only if the exporter then confirms that
it held the export all the time.
"""

import ctypes
import logging
import struct
from collections import deque
from collections.abc import Callable, Sequence
from ipaddress import ip_address
from typing import Any
from weakref import finalize

import torch
from torch import Tensor

from worker.config import KvTransferConfig
from worker.errors import KvTransferError
from worker.executor.kv_cache import as_bytes, pinned
from worker.types import PooledKv

logger = logging.getLogger(__name__)

DRIVER = "libcuda.so.1"
_DEVICE_SHARE = 0.02
_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
_HANDLE = struct.Struct("<QQ64s")  # the place in its allocation, the size, the driver's handle
_Read = Callable[[Sequence[int], int, Tensor], Any]


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * 64),)


class KvPool:
    """Sole owner of `memory` for exports (it may be empty), and of the stream of copies.

    `driver` is CUDA's, used in the context that is current here; `read` puts the KV of blocks, of
    `block_bytes` each, into given memory, as `read_tokens` does. At most `limit_bytes` arrive at a
    time. Raises `KvTransferError` if the driver does not share memory.
    """

    def __init__(
        self, driver: Any, memory: Tensor, limit_bytes: int, read: _Read, block_bytes: int
    ) -> None:
        self._driver, self._memory, self.limit_bytes = driver, memory, limit_bytes
        self._read, self._block_bytes = read, block_bytes
        self._stream: Any = None
        if memory.is_cuda:
            self._stream = torch.cuda.Stream(memory.device)  # type: ignore[no-untyped-call]
        self._taken: dict[int, int] = {}  # the ends of regions, by their starts
        self._given_back: deque[int] = deque()  # any thread appends
        self._context = ctypes.c_void_p()
        if limit_bytes:
            self._call("cuCtxGetCurrent", ctypes.byref(self._context))
        self._handle = self._named(memory.data_ptr()) if memory.nbytes else b""

    def _named(self, address: int) -> bytes:
        base, size, own = ctypes.c_uint64(), ctypes.c_size_t(), _Handle()
        memory = (ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address))
        self._call("cuMemGetAddressRange_v2", *memory)
        self._call("cuIpcGetMemHandle", ctypes.byref(own), base)
        return _HANDLE.pack(address - base.value, self._memory.nbytes, bytes(own))

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
        finalize(export, self._given_back.append, start)
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
            return pinned((data.nbytes,), torch.uint8).copy_(as_bytes(data))

    def _call(self, name: str, *arguments: object) -> None:
        if error := getattr(self._driver, name)(*arguments):
            raise KvTransferError(f"{name} of the CUDA driver fails with error {error}")


def pool_bytes(transfer: KvTransferConfig | None, device: torch.device) -> int:
    """Return the size of a pool, and the limit of what arrives: 0 if peers are elsewhere."""
    if transfer is None or device.type != "cuda" or not ip_address(transfer.kv_ip).is_loopback:
        return 0
    total = torch.cuda.get_device_properties(device).total_memory
    return min(int(transfer.kv_buffer_size), int(_DEVICE_SHARE * total))


def open_pool(
    transfer: KvTransferConfig, device: torch.device, read: _Read, block_bytes: int
) -> KvPool | None:
    """Make a GPU's pool, without memory for others if the driver cannot share it; None: a CPU."""
    if device.type != "cuda":
        return None
    size = pool_bytes(transfer, device)
    try:
        memory = torch.empty(size * transfer.gives, dtype=torch.uint8, device=device)
        return KvPool(ctypes.CDLL(DRIVER), memory, size, read, block_bytes)
    except (OSError, KvTransferError, torch.OutOfMemoryError) as error:
        logger.warning("KV moves through the host's memory: %s", error)
    return KvPool(None, torch.empty(0, device=device), 0, read, block_bytes)
