"""Streams that end before their request does, in a whole picker: every plugin releases them."""

from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tests.support.picker.ext_proc_stream import GatewayStream, completion
from tests.support.picker.metrics_pages import page, pods
from tests.support.picker.whole_picker import HEAD, whole_picker
from tests.support.waiting import until

# Everything that holds something for a request while it is under way.
HOLDING = (
    HEAD
    + """
plugins:
- {type: inflight-load-producer}
- {type: active-request-scorer}
- {type: token-load-scorer}
- {type: prefix-cache-scorer}
- {type: session-affinity-scorer}
- type: request-attribute-reporter
  parameters: {attributes: [{key: {name: cost}, expression: usage.completion_tokens}]}
"""
)
Step = Callable[[GatewayStream], Awaitable[object]]


async def after_the_decision(stream: GatewayStream) -> None:
    await stream.ask(completion(stream=True))


async def after_a_request_without_body(stream: GatewayStream) -> None:
    await stream.request_headers(path="/v1/models", ends=True)
    await stream.read(1)


async def within_the_response(stream: GatewayStream) -> None:
    await after_the_decision(stream)
    await stream.response_headers()
    await stream.response_body(b'data: {"x":1}\n\n')
    await stream.read(1)


async def after_the_response(stream: GatewayStream) -> None:
    await after_the_decision(stream)
    await stream.response_headers()
    await stream.response_body(b"{}", ends=True)
    await stream.read(1)


@pytest.mark.parametrize(
    ("reach", "is_held", "cause"),
    [
        (after_the_decision, True, "client-gone"),
        (after_a_request_without_body, True, "client-gone"),
        (within_the_response, True, "client-gone"),
        (after_the_response, False, "completed"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
async def test_a_cancelled_stream_releases_its_state(
    tmp_path: Path, reach: Step, is_held: bool, cause: str
) -> None:
    async with whole_picker(tmp_path, pods(page(), page()), HOLDING) as picker:
        stream = GatewayStream(picker.channel)
        await stream.call.wait_for_connection()
        await reach(stream)
        assert await picker.is_idle() is not is_held
        stream.call.cancel()

        async def is_over() -> bool:
            return await picker.outcomes() == {cause: 1} and await picker.is_idle()

        await until(is_over)
