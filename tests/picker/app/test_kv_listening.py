"""Plugins hear KV events from when a configuration has them until it has them no more."""

from __future__ import annotations

import asyncio
from pathlib import Path

import zmq
import zmq.asyncio

from picker.app.kv_listening import KvListening
from picker.framework.interfaces import KvEventFeed, KvEventSource
from picker.pool.datastore import Datastore
from picker.types import Endpoint


class Ear:
    """A consumer that engines connect to."""

    def __init__(self, address: str) -> None:
        self.kv_event_feed = KvEventFeed(address, "kv@")
        self.heard: asyncio.Queue[bytes] = asyncio.Queue()

    def kv_event_source(self, endpoint: Endpoint) -> KvEventSource | None:
        return None

    def kv_events(self, key: str, topic: str, payload: bytes) -> None:
        self.heard.put_nowait(payload)

    def kv_events_lost(self, key: str) -> None:
        return


async def test_a_plugin_of_a_new_configuration_takes_over_the_address(tmp_path: Path) -> None:
    """The engine connects again; a plugin that stays the same is not disturbed."""
    address = f"ipc://{tmp_path}/kv"
    datastore = Datastore()
    datastore.set_endpoints([Endpoint("a", "10.0.0.1", 8000)])
    listening = KvListening(datastore)
    task = asyncio.create_task(listening.run())
    with zmq.asyncio.Context() as context:
        engine = context.socket(zmq.XPUB)
        engine.setsockopt(zmq.XPUB_VERBOSE, 1)
        engine.setsockopt(zmq.RECONNECT_IVL, 10)
        engine.connect(address)
        number = 0
        try:
            async with asyncio.timeout(60):
                for ear in (Ear(address), Ear(address)):
                    listening.use({"p": ear, "other": object()})
                    while await engine.recv() != b"\x01kv@":  # the one before says goodbye
                        continue
                    for _ in range(2):
                        frames = (b"kv@10.0.0.1:8000@m", number.to_bytes(8, "big"), b"%d" % number)
                        await engine.send_multipart(frames)
                        assert await ear.heard.get() == b"%d" % number
                        listening.use({"p": ear})
                        number += 1
        finally:
            engine.close(linger=0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
