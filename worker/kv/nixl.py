"""KV that NIXL reads from the memory of one engine into that of another, by RDMA if it can.

Who may have what is agreed on over TCP (`worker.kv.wire`). If the tag of what was read is not the
exporter's, the prompt is computed. Both give up their registrations after a transfer: the next may
be at the same address, so a reader has one transfer at a time with each peer. One thread makes all
of an agent's calls, in order. Memory that an agent fails to release is held and tried again; until
then nothing else is read or lent. Source: the Python API of NIXL 1.x, `nixl._api`.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar
from weakref import WeakValueDictionary

import numpy as np

from worker.config import KvTransferConfig
from worker.errors import ConfigError, KvTransferError
from worker.kv.wire import Lent

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.001
_DRAM = "DRAM"
_T = TypeVar("_T")


class NixlAgent(Protocol):
    """The part of `nixl_agent` that is used here. Regions are (address, bytes, device[, a text]); a
    state is DONE, PROC or ERR. Any call may raise.
    """

    backends: Mapping[str, Any]

    def register_memory(self, regions: list[tuple[int, int, int, str]], mem_type: str) -> Any: ...

    def deregister_memory(self, descriptors: Any) -> None: ...

    def get_partial_agent_metadata(
        self, descriptors: Any, inc_conn_info: bool, backends: list[str]
    ) -> bytes: ...

    def add_remote_agent(self, metadata: bytes) -> Any: ...

    def remove_remote_agent(self, name: Any) -> None: ...

    def get_xfer_descs(self, regions: list[tuple[int, int, int]], mem_type: str) -> Any: ...

    def initialize_xfer(self, operation: str, local: Any, remote: Any, agent: Any) -> Any: ...

    def transfer(self, handle: Any) -> str: ...

    def check_xfer_state(self, handle: Any) -> str: ...

    def release_xfer_handle(self, handle: Any) -> None:
        """End the transfer. Raises while it cannot be cancelled."""


class _Memory:
    """Memory that is registered for a while. To be used on the agent's thread only."""

    def __init__(self, agent: NixlAgent, data: np.ndarray[Any, Any]) -> None:
        self._agent = agent
        self._data = data
        self._descriptors: Any = None

    @property
    def region(self) -> tuple[int, int, int]:
        return self._data.ctypes.data, self._data.nbytes, 0

    def lend(self) -> Lent:
        self._register()
        backends = list(self._agent.backends)
        metadata = self._agent.get_partial_agent_metadata(self._descriptors, True, backends)
        return Lent(metadata, self._data.ctypes.data)

    def end(self) -> None:
        """Deregister the memory. Idempotent; after an error it can be tried again."""
        if self._descriptors is not None:
            self._agent.deregister_memory(self._descriptors)
            self._descriptors = None

    def _register(self) -> None:
        self._descriptors = self._agent.register_memory([(*self.region, "")], _DRAM)


class _Read(_Memory):
    def __init__(self, agent: NixlAgent, data: np.ndarray[Any, Any], lent: Lent) -> None:
        super().__init__(agent, data)
        self._lent = lent
        self._keeper: Any = None
        self._handle: Any = None

    def begin(self) -> str:
        self._register()
        self._keeper = self._agent.add_remote_agent(self._lent.metadata)
        local = self._agent.get_xfer_descs([self.region], _DRAM)
        region = (self._lent.address, self._data.nbytes, 0)
        remote = self._agent.get_xfer_descs([region], _DRAM)
        self._handle = self._agent.initialize_xfer("READ", local, remote, self._keeper)
        return self._agent.transfer(self._handle)

    def state(self) -> str:
        return self._agent.check_xfer_state(self._handle)

    def end(self) -> None:
        """Release the handle first: nothing is written into the memory after that."""
        if self._handle is not None:
            self._agent.release_xfer_handle(self._handle)
            self._handle = None
        if self._keeper is not None:
            self._agent.remove_remote_agent(self._keeper)
            self._keeper = None
        super().end()


class NixlTransport:
    """Lends and reads memory. Owns the agent's thread, and memory that the agent cannot release."""

    def __init__(self, agent: NixlAgent) -> None:
        self._agent = agent
        self._thread = ThreadPoolExecutor(1, "nixl")
        self._held: list[_Memory] = []  # the thread's
        self._turns: WeakValueDictionary[tuple[str, int], asyncio.Lock] = WeakValueDictionary()

    @classmethod
    def load(cls, config: KvTransferConfig) -> NixlTransport:
        """Start a NIXL agent. Raises `ConfigError` if there can be none."""
        flag = "--kv-transfer-config: NixlConnector"
        try:
            api = importlib.import_module("nixl._api")
        except ImportError as error:
            fix = f"needs the package nixl: pip install nixl ({error})"
            raise ConfigError(f"{flag} {fix}") from error
        library = logging.getLogger("nixl")  # it writes to stdout, where we say that we are ready
        library.handlers.clear()
        library.propagate = True
        name = f"{config.engine_id}-{uuid.uuid4().hex[:8]}"
        try:
            agent = api.nixl_agent(name, api.nixl_agent_config(backends=list(config.backends)))
        except Exception as error:  # the library has a tree of its own
            raise ConfigError(f"{flag}: its agent does not start: {error}") from error
        missing = sorted(set(config.backends) - set(agent.backends))
        if missing:
            raise ConfigError(f"{flag}: NIXL has no backend {missing[0]} here: change backends")
        return cls(agent)

    @contextlib.asynccontextmanager
    async def lent(self, data: memoryview) -> AsyncIterator[Lent]:
        """Let another engine read `data` within the context. Raises `KvTransferError`."""
        memory = _Memory(self._agent, np.frombuffer(data, np.uint8))
        try:
            yield await self._call(lambda: self._begun(memory.lend))
        finally:
            self._thread.submit(self._end, memory)

    async def read(self, lent: Lent, size: int, keeper: tuple[str, int]) -> memoryview:
        """Read `size` bytes that a peer lends. Raises `KvTransferError`."""
        async with self._turns.setdefault(keeper, asyncio.Lock()):
            data = np.empty(size, np.uint8)
            read = _Read(self._agent, data, lent)
            try:
                state = await self._call(lambda: self._begun(read.begin))
                while state == "PROC":
                    await asyncio.sleep(_POLL_SECONDS)
                    state = await self._call(read.state)
            finally:
                # Queued behind the beginning, which runs even if the caller was cancelled.
                ending = self._thread.submit(self._end, read)
            has_ended = await asyncio.wrap_future(ending)
        if state != "DONE" or not has_ended:
            raise KvTransferError(f"NIXL's transfer has ended in {state}")
        return data.data

    def close(self) -> None:
        self._thread.shutdown(wait=False)

    async def _call(self, function: Callable[[], _T]) -> _T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, function)
        except Exception as error:  # the library has a tree of its own
            raise KvTransferError(f"NIXL: {error or type(error).__name__}") from error

    # ---- the agent's thread -----------------------------------------------------------------

    def _begun(self, begin: Callable[[], _T]) -> _T:
        held, self._held = self._held, []
        for memory in held:
            self._end(memory)
        if self._held:
            raise KvTransferError("memory of an earlier transfer is still in use")
        return begin()

    def _end(self, memory: _Memory) -> bool:
        try:
            memory.end()
        except Exception:
            logger.warning("NIXL does not let go of memory yet", exc_info=True)
            self._held.append(memory)
            return False
        return True
