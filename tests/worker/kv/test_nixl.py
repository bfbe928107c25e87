"""KV read by NIXL: by a fake agent that moves memory, and by the real one where it is installed."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from tests.support.worker.kv_connectors import KEY, SHAPE, TOKEN_BYTES, ended
from tests.support.worker.kv_engines import PATIENT, until
from worker.config import KvTransferConfig
from worker.errors import ConfigError
from worker.kv.nixl import NixlTransport
from worker.kv.tcp import TcpConnector
from worker.types import KvSource

DIGEST = b"d" * 32
DATA = memoryview(bytes(range(256)) * 4096)

Region = tuple[int, int]


class NixlError(Exception): ...


@dataclass
class Fabric:
    agents: dict[str, FakeAgent] = field(default_factory=dict)
    state: str | None = None  # in which a transfer stays; None: it is done
    spoils: bool = False
    raises: str = ""  # the name of a method
    num_reads: int = 0


class FakeAgent:
    """Moves memory of this process, where both ends of it are registered and known. Refuses what
    the real agent refuses, and calls from more than one thread.
    """

    def __init__(self, fabric: Fabric, name: str) -> None:
        self.backends = {"UCX": 1}
        self.name = name
        self.registered: list[Region] = []
        self._known: dict[str, list[Region]] = {}
        self._handles: dict[int, tuple[int, Region, str]] = {}
        self._fabric = fabric
        self._threads: set[int] = set()
        fabric.agents[name] = self

    def _called(self, method: str) -> None:
        self._threads.add(threading.get_ident())
        if len(self._threads) > 1 or self._fabric.raises == method:
            raise NixlError(method)

    def register_memory(self, regions: list[Any], mem_type: str) -> list[Region]:
        self._called("register_memory")
        assert mem_type == "DRAM"
        descriptors = [(address, size) for address, size, device, text in regions]
        self.registered += descriptors
        return descriptors

    def deregister_memory(self, descriptors: list[Region]) -> None:
        self._called("deregister_memory")
        for region in descriptors:
            self.registered.remove(region)

    def get_partial_agent_metadata(
        self, descriptors: list[Region], inc_conn_info: bool, backends: list[str]
    ) -> bytes:
        self._called("get_partial_agent_metadata")
        assert inc_conn_info
        assert backends == ["UCX"]
        return msgspec.msgpack.encode((self.name, descriptors))

    def add_remote_agent(self, metadata: bytes) -> bytes:
        self._called("add_remote_agent")
        name, regions = msgspec.msgpack.decode(metadata, type=tuple[str, list[Region]])
        assert name not in self._known, "its memory is forgotten after each transfer"
        self._known[name] = regions
        return name.encode()

    def remove_remote_agent(self, name: bytes) -> None:
        self._called("remove_remote_agent")
        del self._known[name.decode()]

    def get_xfer_descs(self, regions: list[Any], mem_type: str) -> list[Region]:
        self._called("get_xfer_descs")
        assert mem_type == "DRAM"
        return [(address, size) for address, size, device in regions]

    def initialize_xfer(
        self, operation: str, local: list[Region], remote: list[Region], agent: bytes
    ) -> int:
        self._called("initialize_xfer")
        assert operation == "READ"
        if local[0] not in self.registered or remote[0] not in self._known[agent.decode()]:
            raise NixlError("NIXL_ERR_NOT_FOUND")
        handle = len(self._handles) + 1
        self._handles[handle] = (local[0][0], remote[0], agent.decode())
        return handle

    def transfer(self, handle: int) -> str:
        self._called("transfer")
        return "PROC"

    def check_xfer_state(self, handle: int) -> str:
        self._called("check_xfer_state")
        if self._fabric.state is not None:
            return self._fabric.state
        here, (there, size), agent = self._handles[handle]
        if (there, size) not in self._fabric.agents[agent].registered:
            raise NixlError("NIXL_ERR_REMOTE_DISCONNECT")
        ctypes.memmove(here, there, size)
        if self._fabric.spoils:
            ctypes.memset(here + size // 2, 7, 1)
        self._fabric.num_reads += 1
        return "DONE"

    def release_xfer_handle(self, handle: int) -> None:
        self._called("release_xfer_handle")
        del self._handles[handle]


class Pair:
    def __init__(self, stack: ExitStack, agents: Callable[[str], NixlTransport | None]) -> None:
        self._stack, self._agents = stack, agents
        self.keeper, self.taker = self.engine("keeper"), self.engine("taker")

    def engine(self, name: str, **fields: Any) -> TcpConnector:
        config = KvTransferConfig(**{**PATIENT, "engine_id": name, **fields})
        nixl = self._agents(name)
        connector = TcpConnector(config, KEY, SHAPE, TOKEN_BYTES, None, nixl)
        self._stack.callback(connector.close)
        return connector

    def exported(self) -> KvSource:
        return self.keeper.keep("r", DIGEST, DATA, ()).source


@pytest.fixture
def fabric() -> Fabric:
    return Fabric()


@pytest.fixture
def pair(fabric: Fabric) -> Iterator[Pair]:
    with ExitStack() as stack:
        yield Pair(stack, lambda name: NixlTransport(FakeAgent(fabric, name)))


def has_let_go(fabric: Fabric) -> bool:
    return not any(agent.registered for agent in fabric.agents.values())


def test_kv_is_read_from_the_keepers_memory(pair: Pair, fabric: Fabric) -> None:
    starts = [0, 1, 4000]
    sources = [pair.exported() for _ in starts]
    pulls = [pair.taker.pull(source, DIGEST, n) for source, n in zip(sources, starts, strict=True)]
    for pull, start in zip(pulls, starts, strict=True):
        assert ended(pull).data == DATA[start * TOKEN_BYTES :]
    assert fabric.num_reads == 3
    until(lambda: has_let_go(fabric))
    until(lambda: pair.keeper.counts.num_bytes_sent == pair.taker.counts.num_bytes_received)
    assert ended(pair.taker.pull(sources[0], DIGEST, 0)) is None


def test_kv_that_is_not_needed_is_not_read(pair: Pair, fabric: Fabric) -> None:
    source = pair.exported()
    ended(pair.taker.pull(source, DIGEST, source.num_tokens))
    assert fabric.num_reads == 0


@pytest.mark.parametrize("lacks", ["keeper", "taker"])
def test_an_engine_without_nixl_is_served_over_tcp(fabric: Fabric, lacks: str) -> None:
    def agent(name: str) -> NixlTransport | None:
        return None if name == lacks else NixlTransport(FakeAgent(fabric, name))

    with ExitStack() as stack:
        pair = Pair(stack, agent)
        assert ended(pair.taker.pull(pair.exported(), DIGEST, 0)).data == DATA
    assert fabric.num_reads == 0


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"state": "ERR"}, "ended in ERR"),
        ({"spoils": True}, "damaged"),
        ({"raises": "register_memory"}, "NIXL: register_memory"),
        ({"raises": "get_partial_agent_metadata"}, "NIXL: get_partial_agent_metadata"),
        ({"raises": "add_remote_agent"}, "NIXL: add_remote_agent"),
        ({"raises": "initialize_xfer"}, "NIXL: initialize_xfer"),
        ({"raises": "check_xfer_state"}, "NIXL: check_xfer_state"),
    ],
)
def test_a_transfer_that_fails_gives_nothing(
    pair: Pair, fabric: Fabric, caplog: pytest.LogCaptureFixture, wrong: dict[str, Any], said: str
) -> None:
    source = pair.exported()
    for name, value in wrong.items():
        setattr(fabric, name, value)
    assert ended(pair.taker.pull(source, DIGEST, 0)) is None
    assert said in caplog.text
    for name in wrong:
        setattr(fabric, name, getattr(Fabric(), name))
    until(lambda: has_let_go(fabric))
    assert ended(pair.taker.pull(source, DIGEST, 0)).data == DATA


def test_a_transfer_that_stands_still_ends(pair: Pair, fabric: Fabric) -> None:
    fabric.state = "PROC"
    impatient = pair.engine("impatient", kv_transfer_timeout=0.3)
    assert ended(impatient.pull(pair.exported(), DIGEST, 0)) is None
    pull = pair.taker.pull(pair.exported(), DIGEST, 0)
    until(lambda: bool(fabric.agents["taker"].registered))
    pull.close()
    ended(pull)
    until(lambda: has_let_go(fabric))


def test_memory_that_may_still_be_written_is_held(pair: Pair, fabric: Fabric) -> None:
    """Nothing is read until the agent lets go of it; then everything is as before."""
    fabric.raises = "release_xfer_handle"
    source = pair.exported()
    assert ended(pair.taker.pull(source, DIGEST, 0)) is None
    fabric.state = "PROC"
    assert ended(pair.taker.pull(pair.exported(), DIGEST, 0)) is None
    assert len(fabric.agents["taker"].registered) == 1
    fabric.raises, fabric.state = "", None
    assert ended(pair.taker.pull(pair.exported(), DIGEST, 0)) is not None
    until(lambda: has_let_go(fabric))


def test_the_library_itself_moves_kv() -> None:
    pytest.importorskip("nixl._api")
    with ExitStack() as stack:
        pair = Pair(stack, lambda name: NixlTransport.load(KvTransferConfig(engine_id=name)))
        for start in (0, 1, 4000):
            part = ended(pair.taker.pull(pair.exported(), DIGEST, start))
            assert part.data == DATA[start * TOKEN_BYTES :]


@pytest.mark.parametrize(
    ("backends", "said"),
    [
        (None, "NixlConnector needs the package nixl: pip install nixl"),
        ((), "NIXL has no backend UCX here: change backends"),
        ((NixlError("no device"),), "its agent does not start: no device"),
    ],
)
def test_a_library_that_cannot_be_used_is_said_at_the_start(
    monkeypatch: pytest.MonkeyPatch, backends: tuple[Any, ...] | None, said: str
) -> None:
    """With `backends` None it is not installed."""

    def agent(name: str, asked: list[str]) -> Any:
        assert asked == ["UCX"]
        for backend in backends or ():
            raise backend
        return SimpleNamespace(backends={})

    library = SimpleNamespace(nixl_agent=agent, nixl_agent_config=lambda *, backends: backends)
    monkeypatch.setitem(sys.modules, "nixl._api", None if backends is None else library)
    with pytest.raises(ConfigError, match=said):
        NixlTransport.load(KvTransferConfig())
