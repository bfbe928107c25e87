"""This project's picker in place of the scripted one of the integration tests' bench."""

import contextlib
from collections.abc import AsyncIterator
from random import Random

from fleet.envoy.settings import Mechanism, SocketAddress
from picker.extproc.server import build_server
from picker.pool.datastore import Datastore
from picker.pool.inflight import InflightLoad
from picker.requestcontrol.director import Director
from picker.requestcontrol.pipeline import RequestContext
from picker.rpc.health import HealthService
from picker.rpc.options import ServerOptions
from picker.types import Endpoint
from tests.support.picker.first_candidate import first_candidate


class Picker:
    def __init__(self) -> None:
        self.inflight = InflightLoad()
        self._datastore = Datastore()
        director = Director(
            first_candidate(), RequestContext(self._datastore, self.inflight, Random(1))
        )
        options = ServerOptions(host="127.0.0.1", port=0)
        health = HealthService(lambda: True)
        self.server = build_server(director, options=options, health=health)

    def pick(self, *ports: int) -> None:
        self._datastore.set_endpoints(
            [Endpoint(f"pod-{port}", "127.0.0.1", port) for port in ports]
        )


@contextlib.asynccontextmanager
async def picked(
    bench, mechanism: Mechanism = Mechanism.OVERRIDE_HOST, **changes: object
) -> AsyncIterator:
    picker = Picker()
    address = SocketAddress("127.0.0.1", await picker.server.start())
    try:
        given = {"buffer_request_body": True, "message_timeout_seconds": 60.0, "picker": address}
        async with bench(mechanism=mechanism, **{**given, **changes}) as b:
            if mechanism is Mechanism.OVERRIDE_HOST:
                await b.until_healthy("pool", 2)
            yield b, picker
    finally:
        await picker.server.stop(0)
