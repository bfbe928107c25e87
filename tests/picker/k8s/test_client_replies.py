"""Bytes of an API server: lines in chunks of any size, and refusals of any form."""

import asyncio
import json
from typing import Any

import aiohttp
import pytest
from aiohttp.base_protocol import BaseProtocol
from hypothesis import given
from hypothesis import strategies as st

from picker.k8s.api import ApiError, UnreachableError
from picker.k8s.client import (
    WatchLines,
    api_error,
    decode_event,
    decode_listing,
    decode_object,
    read_bounded,
)
from tests.depth import examples


@examples(100)
@given(st.lists(st.binary(max_size=20)), st.lists(st.integers(1, 30)))
def test_lines_do_not_depend_on_the_cuts_between_chunks(
    lines: list[bytes], sizes: list[int]
) -> None:
    wanted = [line for one in lines for line in one.split(b"\n") if line.strip()]
    sent = b"".join(line + b"\n" for line in lines)
    cutter, found, at = WatchLines(), [], 0
    for size in [*sizes, len(sent)]:
        found += list(cutter.added(sent[at : at + size]))
        at += size
    cutter.check_whole()
    assert found == wanted


def test_a_line_that_does_not_end_is_refused() -> None:
    cutter = WatchLines(max_bytes=10)
    assert list(cutter.added(b"0123456789")) == []
    assert list(cutter.added(b"\n")) == [b"0123456789"]
    with pytest.raises(UnreachableError, match="more than 10 bytes"):
        list(cutter.added(b"01234567890"))


def test_an_end_within_a_line_is_an_error() -> None:
    cutter = WatchLines()
    list(cutter.added(b'{"a":1}\n \r\n'))
    cutter.check_whole()
    list(cutter.added(b'{"type"'))
    with pytest.raises(UnreachableError, match="middle of a line"):
        cutter.check_whole()


def test_an_event_keeps_its_object_as_it_came() -> None:
    event = decode_event(b'{"object": {"a" :  1.50}, "type": "ADDED"}')
    assert event.kind == "ADDED"
    assert bytes(event.object) == b'{"a" :  1.50}'


def test_an_error_event_is_raised_with_all_its_fields() -> None:
    status = {"code": 429, "reason": "TooMany", "details": {"retryAfterSeconds": 3}}
    line = json.dumps({"type": "ERROR", "object": status | {"message": "later"}}).encode()
    with pytest.raises(ApiError, match="429 TooMany: later") as raised:
        decode_event(line)
    assert raised.value.retry_after_seconds == 3


@pytest.mark.parametrize("line", [b"", b"x", b"[]", b'{"type":1}', b'{"type":"ADDED"}', b"\xff"])
def test_a_line_that_is_no_event_is_refused(line: bytes) -> None:
    with pytest.raises(UnreachableError, match="a line is no event"):
        decode_event(line)


@pytest.mark.parametrize(
    ("status", "headers", "body", "wanted"),
    [
        (404, {}, b"404 page not found\n", (404, "", "404 page not found", None)),
        (503, {"Retry-After": "7"}, b"<html>", (503, "", "<html>", 7)),
        (503, {"Retry-After": "Wed, 21 Oct"}, b"", (503, "", "", None)),
        (429, {"Retry-After": "1"}, b'{"details":{"retryAfterSeconds":9}}', (429, "", None, 9)),
        (500, {}, b'{"code":"x"}', (500, "", '{"code":"x"}', None)),
        (
            None,
            {},
            b'{"code":410,"reason":"Expired","message":"old"}',
            (410, "Expired", "old", None),
        ),
        (None, {}, b'"what"', (500, "", '"what"', None)),
        (502, {}, b"\xff\x00" * 400, (502, "", None, None)),
        (200, {}, b'{"message":null,"details":null}', (200, "", None, None)),
    ],
)
def test_a_refusal_is_reported_with_any_body(
    status: int | None, headers: dict[str, str], body: bytes, wanted: tuple[Any, ...]
) -> None:
    error = api_error(status, headers, body)
    reported = (error.status, error.reason, error.message, error.retry_after_seconds)
    assert [two for one, two in zip(reported, wanted, strict=True) if two is not None] == [
        one for one, two in zip(reported, wanted, strict=True) if two is not None
    ]
    assert len(error.message) <= 200


def test_a_page_has_its_objects_and_its_continue_token() -> None:
    page = decode_listing(b'{"metadata":{"continue":"x","resourceVersion":"5"},"items":[{"a":1}]}')
    assert (page.metadata.continue_, page.metadata.resource_version) == ("x", "5")
    assert [bytes(one) for one in page.objects] == [b'{"a":1}']
    assert decode_listing(b'{"metadata":{"resourceVersion":"5"},"items":null}').objects == []


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<html>",
        b"[]",
        b'{"items":[]}',
        b'{"metadata":{"items"',
        b'{"kind":"Status","metadata":{},"status":"Success"}',
        b'{"metadata":{},"items":[]}',
    ],
)
def test_a_body_that_is_no_list_is_refused(body: bytes) -> None:
    with pytest.raises(UnreachableError, match="no list"):
        decode_listing(body)
    with pytest.raises(UnreachableError, match="no object"):
        decode_object(b"[1]")


def test_an_unreadable_object_is_not_quoted() -> None:
    """The object may be a review that contains a token."""
    with pytest.raises(UnreachableError) as raised:
        decode_object(b'{"kind":"TokenReview","spec":{"token":"top-secret"')
    assert "top-secret" not in str(raised.value)


def test_a_refusal_without_end_is_cut() -> None:
    """The text is logged and shown to operators."""
    body = json.dumps({"kind": "Status", "reason": "r" * 10**6, "message": "m" * 10**6}).encode()
    error = api_error(403, {}, body)
    assert len(str(error)) < 2000
    assert error.status == 403


async def test_an_answer_is_read_up_to_its_limit() -> None:
    loop = asyncio.get_running_loop()

    def of_bytes(size: int) -> aiohttp.StreamReader:
        stream = aiohttp.StreamReader(BaseProtocol(loop), 2**16, loop=loop)
        stream.feed_data(bytes(size))
        stream.feed_eof()
        return stream

    assert await read_bounded(of_bytes(10), 10) == bytes(10)
    with pytest.raises(UnreachableError, match="more than 10 bytes"):
        await read_bounded(of_bytes(11), 10)
