"""Answers of endpoints, complete and broken."""

import asyncio
from collections.abc import Callable

import pytest

from fleet.bench.client import Record
from fleet.sim.virtual_time import run_in_virtual_time
from tests.support.fleet.virtual_endpoint import ANSWER, Times, VirtualEndpoint, delta, sse

DONE = sse(b"[DONE]") + b"0\r\n\r\n"
PLAIN = b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"


def plain(status: bytes, body: bytes) -> bytes:
    return PLAIN % (status, len(body), body)


def asked(endpoint: VirtualEndpoint, timeout_seconds: float = 5.0) -> Record:
    async def ask() -> Record:
        driver = endpoint.driver(timeout_seconds=timeout_seconds)
        record = Record(asyncio.get_running_loop().time(), text=[])
        await driver.client.ask(b'{"max_tokens": 1}', record)
        return record

    return run_in_virtual_time(ask())


def answering(answer: bytes) -> VirtualEndpoint:
    return VirtualEndpoint(lambda number, now: Times(1.0), answer=answer)


ERRORS = {
    "a refusal": (plain(b"429 Busy", b'{"error": {"message": "full\\n"}}'), "status 429: full"),
    "a refusal in words": (plain(b"503 No", b"no\x1bhealthy"), "status 503: no healthy"),
    "a refusal in silence": (plain(b"500 Oh", b""), "status 500: (no reason)"),
    "an answer as a whole": (plain(b"200 OK", b"{}"), "the answer is no event stream"),
    "an error event": (
        ANSWER + sse(delta("a")) + sse({"error": {"message": "engine died"}}) + DONE,
        "error event: engine died",
    ),
    "a stream without its end": (ANSWER + sse(delta("a")) + b"0\r\n\r\n", "before data: [DONE]"),
    "a stream without tokens": (ANSWER + sse(delta("")) + DONE, "no token in the answer"),
    "another format": (ANSWER + sse(b"[1]") + DONE, "no chunk of the API"),
    "a negative count": (ANSWER + sse({"usage": {"prompt_tokens": -5}}) + DONE, "`int` >= 0"),
    "no HTTP": (b"SSH-2.0\r\n\r\n", "no HTTP answer"),
}


@pytest.mark.parametrize(("answer", "error"), ERRORS.values(), ids=ERRORS)
def test_a_failed_answer_has_its_reason(answer: bytes, error: str) -> None:
    record = asked(answering(answer))
    assert error in record.error
    assert record.times["e2e"] == pytest.approx(0.1)


PIECES: dict[str, object] = {
    "chat": delta("word"),
    "completions": {"choices": [{"text": "word"}]},
    "reasoning": {"choices": [{"delta": {"reasoning_content": "word"}}]},
    "tools": {"choices": [{"delta": {"tool_calls": [{"index": 0}]}}]},
}


@pytest.mark.parametrize("piece", PIECES.values(), ids=PIECES)
def test_every_kind_of_token_counts(piece: object) -> None:
    record = asked(answering(ANSWER + sse(piece) + sse(piece) + DONE))
    assert (record.error, record.output_tokens, len(record.gaps)) == ("", 2, 1)


@pytest.mark.parametrize("cut", range(1, 12))
def test_an_answer_may_arrive_in_any_pieces(cut: int) -> None:
    endpoint = answering(ANSWER + sse(delta("a")) + sse(delta("bc")) + DONE)
    endpoint.cut = cut
    record = asked(endpoint)
    assert (record.error, record.text) == ("", ["a", "bc"])


def test_an_endpoint_that_does_not_answer_is_a_timeout() -> None:
    endpoint = VirtualEndpoint(lambda number, now: Times(9.0))
    record = asked(endpoint, timeout_seconds=2.0)
    assert (record.error, record.times["e2e"]) == ("timeout", 2.0)
    assert (endpoint.connections, endpoint.closed) == (1, 1)


def test_a_missing_endpoint_is_an_error() -> None:
    class Nowhere(VirtualEndpoint):
        async def connect(self, protocol: Callable[[], asyncio.Protocol]) -> object:
            raise ConnectionRefusedError("refused")

    assert asked(Nowhere(lambda number, now: Times(1.0))).error == "no connection: refused"


@pytest.mark.parametrize("is_announced", [False, True])
def test_a_closed_idle_connection_costs_no_request(is_announced: bool) -> None:
    """The server closes it at the second request, as an idle timeout may, or announces the end."""

    async def ask() -> tuple[list[Record], int]:
        end = b"\r\nconnection: close\r\n\r\n" if is_announced else b"\r\n\r\n"
        endpoint = answering(ANSWER.replace(b"\r\n\r\n", end) + sse(delta("a")) + DONE)
        endpoint.answers_per_connection = 1
        client, records = endpoint.driver().client, [Record(0.0), Record(0.0)]
        for record in records:
            await client.ask(b'{"max_tokens": 1}', record)
        return records, endpoint.connections

    records, connections = run_in_virtual_time(ask())
    assert [one.error for one in records] == ["", ""]
    assert connections == 2


def test_a_new_connection_that_is_closed_is_an_error() -> None:
    endpoint = answering(b"")
    endpoint.answers_per_connection = 0
    assert asked(endpoint).error == "connection closed"
