"""Copies blocks to the host's memory before a step writes them."""

import mmap
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from worker.errors import ConfigError
from worker.executor.kv_cache import (
    available_bytes,
    gathered,
    pieces,
    read_file,
    read_tokens,
)
from worker.types import KvSave


class BlockSaver:
    """Carries out `SchedulerOutput.kv_saves`. On a GPU the blocks are gathered on the stream of the
    steps, and copied to the host on a second stream while the step runs; the next step waits on the
    device for the copies.
    """

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._saved: torch.cuda.Event | None = None

    def save(self, cache: Tensor, saves: Sequence[KvSave], keys_across: bool) -> None:
        """Start the saves of a step. Called first in each step, also without `saves`."""
        if self._saved is not None:
            torch.cuda.current_stream(cache.device).wait_event(self._saved)
            self._saved = None
        for save in saves:
            if cache.device.type == "cuda":
                self._begin(cache, save)
            else:
                _save_now(cache, save, keys_across)

    def _begin(self, cache: Tensor, save: KvSave) -> None:
        self._stream = stream = self._stream or _new_stream(cache.device)
        for some in pieces(len(save.blocks), save.into[0].nbytes):
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
            rows.record_stream(stream)
        self._saved = stream.record_event()


def _new_stream(device: torch.device) -> torch.cuda.Stream:
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return stream


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
    """Pin memory by the driver; torch's allocator would round its size up to a power of two."""
    cuda: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    address = memory.ctypes.data
    failure = cuda.cudaHostRegister(address, memory.nbytes, 0)
    if failure != cuda.cudaError.success:
        raise ConfigError(
            f"--kv-offloading-size: {memory.nbytes >> 20} MiB cannot be pinned ({failure}): lower"
            " it, or raise the limit of locked memory (ulimit -l)"
        )
    weakref.finalize(memory, cuda.cudaHostUnregister, address)
