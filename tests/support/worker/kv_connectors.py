"""Connectors of KV on this machine, without engines."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.support.worker.kv_engines import PATIENT, until
from worker.config import KvTransferConfig
from worker.kv.content import KvShape
from worker.kv.fetching import TcpPull
from worker.kv.tcp import TcpConnector
from worker.types import KvPart

SHAPE = KvShape("m", "float32", 2, 2, 8)
KEY = b"k" * 32
TOKEN_BYTES = 256


@contextmanager
def engine(
    key: bytes = KEY, shape: KvShape = SHAPE, pool: Any = None, **fields: Any
) -> Iterator[TcpConnector]:
    config = KvTransferConfig(**{**PATIENT, "engine_id": "e", **fields})
    connector = TcpConnector(config, key, shape, TOKEN_BYTES, pool=pool)
    try:
        yield connector
    finally:
        connector.close()


def ended(pull: TcpPull) -> KvPart | None:
    until(lambda: pull.done)
    return pull.part
