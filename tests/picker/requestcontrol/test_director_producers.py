"""Data producers run in order, and what goes wrong with one never fails a request."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from msgspec.structs import replace

from picker.errors import Code, RefusedError
from picker.framework.attributes import Attributes, DataKey
from picker.framework.services import HttpError
from picker.types import Candidate, FinishCause, InferenceRequest, RawRequest

RAW = RawRequest(
    {":path": "/v1/completions", "x-request-id": "id-1"}, b'{"model":"m","prompt":"hello"}'
)
SEEN: DataKey[str] = DataKey("Seen", "test")  # what the house's recorder finds, which runs last
ASKED: DataKey[str] = DataKey("Asked", "test")


@dataclass
class Asks:
    wait_seconds: float = 0.0
    timeout_seconds: float = 0.4
    error: Exception | None = None
    began: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled: bool = False

    async def look_up(
        self, request: InferenceRequest, candidates: Sequence[Candidate], attributes: Attributes
    ) -> InferenceRequest:
        self.began.set()
        try:
            await asyncio.sleep(self.wait_seconds)
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        if self.error is not None:
            raise self.error
        attributes[ASKED] = "answer"
        return replace(request, prompts=(b"asked",))


@pytest.mark.looptime
async def test_an_answer_within_the_timeout_is_a_finding(house: Any) -> None:
    house.use(producers=[Asks(wait_seconds=0.3)])
    await house.route(RAW)
    request, _, attributes = house.scheduler.calls[0]
    assert (attributes.get(ASKED), attributes.get(SEEN)) == ("answer", "3 candidates")
    assert request.prompts == (b"tokens",)
    assert house.recorder.failed == []


@pytest.mark.looptime
@pytest.mark.parametrize(
    "producer",
    [
        Asks(wait_seconds=0.5),
        Asks(error=HttpError("refused")),
        Asks(error=ZeroDivisionError()),
        Asks(error=TimeoutError()),
        Asks(error=RefusedError(Code.FORBIDDEN, "no")),
    ],
    ids=["too late", "server", "bug", "its own timeout", "refusal"],
)
async def test_a_producer_that_fails_ends_the_finding_out(house: Any, producer: Asks) -> None:
    """Later producers may need the findings of the one that failed."""
    house.use(producers=[producer])
    _, decision = await house.route(RAW)
    assert decision.destination == "10.0.0.1:8000"
    request, _, attributes = house.scheduler.calls[0]
    assert (attributes.get(ASKED), attributes.get(SEEN), request.prompts) == (None, None, ())
    assert house.recorder.failed == ["Asks"]


@pytest.mark.looptime
async def test_the_loads_are_those_from_before_the_question(house: Any) -> None:
    slow = Asks(wait_seconds=0.3)
    house.use(producers=[slow])
    asking = asyncio.create_task(house.route(RAW))
    await slow.began.wait()
    house.use()
    await house.route(RAW)
    _, decision = await asking
    assert decision.destination == "10.0.0.1:8000"
    assert house.inflight.total == 2


@pytest.mark.looptime
async def test_a_client_that_leaves_while_a_server_is_asked_ends_the_question(house: Any) -> None:
    slow = Asks(wait_seconds=0.3)
    house.use(producers=[slow])
    exchange = house.director.begin()
    asking = asyncio.create_task(exchange.route(RAW))
    await slow.began.wait()
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    exchange.finish(FinishCause.CLIENT_GONE)
    assert slow.cancelled
    assert house.inflight.total == 0
    assert [outcome.cause for outcome in house.recorder.outcomes] == [FinishCause.CLIENT_GONE]
    assert house.recorder.failed == []


async def test_failures_are_counted_each_and_logged_with_moderation(
    house: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A producer that fails with every request would fill the disk with its log."""
    house.fail_in("producers", ZeroDivisionError("by zero"))
    house.step = 0.001
    for _ in range(10):
        await house.route(RAW)
    house.now += 10
    await house.route(RAW)
    assert house.recorder.failed == ["Failing"] * 11
    assert len(caplog.records) == 2
    assert caplog.records[0].getMessage() == (
        "Failing failed; scheduling continues with what is known"
    )
    assert caplog.records[0].exc_info is not None


async def test_failures_are_reported_under_the_configured_name(house: Any) -> None:

    @dataclass
    class Timed:
        inner: object
        name: str = "my-index"

        def produce(self, request: object, candidates: object, attributes: object) -> Any:
            raise ZeroDivisionError

    house.use(producers=[Timed(object())])
    await house.route(RAW)
    assert house.recorder.failed == ["my-index"]
