"""Streams that end before their request does, in every phase: nothing stays held.

Each case looks at what is held while the request is under way, then at what is left after.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tests.support.picker.ext_proc_stream import GatewayStream, completion
from tests.support.picker.metrics_pages import page, pods
from tests.support.picker.whole_picker import HEAD, WholePicker, whole_picker
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


async def before_anything(stream: GatewayStream) -> None:
    """The stream is open, no more."""


async def after_headers(stream: GatewayStream) -> None:
    await stream.request_headers()


async def within_the_body(stream: GatewayStream) -> None:
    await after_headers(stream)
    await stream.request_body(completion()[:10], ends=False)


async def after_the_decision(stream: GatewayStream) -> None:
    await stream.ask(completion(stream=True))


async def after_a_request_without_body(stream: GatewayStream) -> None:
    await stream.request_headers(path="/v1/models", ends=True)
    await stream.read(1)


async def after_response_headers(stream: GatewayStream) -> None:
    await after_the_decision(stream)
    await stream.response_headers()


async def within_the_response(stream: GatewayStream) -> None:
    await after_response_headers(stream)
    await stream.response_body(b'data: {"x":1}\n\n')
    await stream.read(1)


async def after_the_response(stream: GatewayStream) -> None:
    await after_response_headers(stream)
    await stream.response_body(b"{}", ends=True)
    await stream.read(1)


PHASES: list[tuple[Step, bool, str]] = [
    (before_anything, False, "client-gone"),
    (after_headers, False, "client-gone"),
    (within_the_body, False, "client-gone"),
    (after_the_decision, True, "client-gone"),
    (after_a_request_without_body, True, "client-gone"),
    (after_response_headers, True, "client-gone"),
    (within_the_response, True, "client-gone"),
    (after_the_response, False, "completed"),
]


def ids(value: object) -> str | None:
    return getattr(value, "__name__", None)


async def held(picker: WholePicker) -> bool:
    """Whether anything is under way."""
    return not await picker.is_idle()


@pytest.mark.parametrize(("reach", "is_held", "cause"), PHASES, ids=ids)
@pytest.mark.parametrize("orderly", [True, False], ids=["closed", "reset"])
async def test_whatever_ends_a_stream_nothing_stays_held(
    tmp_path: Path, reach: Step, is_held: bool, cause: str, orderly: bool
) -> None:
    """One outcome each, with its cause."""
    async with whole_picker(tmp_path, pods(page(), page()), HOLDING) as picker:
        stream = GatewayStream(picker.channel)
        await stream.call.wait_for_connection()
        await reach(stream)
        assert await held(picker) is is_held
        if orderly:
            assert await stream.rest() == []
        else:
            stream.call.cancel()

        async def is_over() -> bool:
            return await picker.outcomes() == {cause: 1} and await picker.is_idle()

        await until(is_over)
