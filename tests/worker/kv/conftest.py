"""Engines whose KV moves."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from tests.support.model.tiny_checkpoint import save_checkpoint
from tests.support.worker.kv_engines import NATIVE, Engine
from worker.models.llama import LlamaModel
from worker.models.loader import load_model
from worker.ops.cpu.native import open_kernels


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy core a handshake takes seconds."""
    monkeypatch.setattr("worker.kv.fetching._PEER_SECONDS", 60.0)


@pytest.fixture
def engines() -> Iterator[Callable[..., Engine]]:
    with ExitStack() as stack:

        def make(**how: Any) -> Engine:
            engine = Engine(**how)
            stack.callback(engine.core.shutdown)
            return engine

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
