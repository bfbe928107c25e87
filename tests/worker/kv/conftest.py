"""Engines whose KV moves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from kv_engines import Engine


@pytest.fixture
def engines() -> Iterator[Callable[..., Engine]]:
    """Makes engines, and ends them."""
    with ExitStack() as stack:

        def make(**how: Any) -> Engine:
            engine = Engine(**how)
            stack.callback(engine.core.shutdown)
            return engine

        yield make
