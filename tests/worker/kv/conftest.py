"""Engines whose KV moves."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from tests.support.model.tiny_checkpoint import save_checkpoint
from tests.support.worker.kv_connectors import engine
from tests.support.worker.kv_engines import NATIVE, Engine, send_bytes
from worker.kv.tcp import TcpConnector
from worker.models.llama import LlamaModel
from worker.models.loader import load_model
from worker.ops.cpu.native import open_kernels


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy core a handshake takes seconds."""
    monkeypatch.setattr("worker.kv.fetching._PEER_SECONDS", 60.0)


@pytest.fixture(params=["bytes sent", "memory shared"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "bytes sent":
        send_bytes(monkeypatch)


@pytest.fixture
def sends(monkeypatch: pytest.MonkeyPatch) -> None:
    send_bytes(monkeypatch)


@pytest.fixture
def keeper() -> Iterator[TcpConnector]:
    with engine() as keeper:
        yield keeper


@pytest.fixture
def taker() -> Iterator[TcpConnector]:
    with engine() as taker:
        yield taker


@pytest.fixture
def engines() -> Iterator[Callable[..., Engine]]:
    with ExitStack() as stack:

        def make(**how: Any) -> Engine:
            made = Engine(**how)
            stack.callback(made.core.shutdown)
            return made

        yield make


@pytest.fixture(scope="session")
def native_model(tmp_path_factory: pytest.TempPathFactory) -> LlamaModel:
    """Return a model whose layers run natively, with transposed keys in its cache."""
    kernels = open_kernels(1)
    if kernels is None:
        pytest.skip("the native kernels are not built")
    path = tmp_path_factory.mktemp("native")
    save_checkpoint(path, NATIVE)
    model = load_model(path, torch.float32, torch.device("cpu"), 256, kernels=kernels)
    assert model.native is not None
    return model
