"""A request as it came, and while it waits: as little of it as will do, and how much that is.

What a parser made of a body is a multiple of it: twice for one long text, tenfold for a
conversation of short messages, and thousands of objects for the garbage collector to look at. So it
goes while its request waits, and is made again from the body when the request is let in; a request
that does not wait pays for none of that.
"""

from __future__ import annotations

from sys import getsizeof

import msgspec
from msgspec.structs import replace

from picker.framework.interfaces import Parser
from picker.requestcontrol.parsing import request_path
from picker.types import InferenceRequest, ParsedBody, RawRequest

# Upper estimates of what the process holds, in bytes; a test measures them.
REQUEST_BYTES = 16_384  # tasks, buffers, and the objects of every layer; 9 to 12 thousand
SLACK = 4  # a quarter of a body more: room that large blocks leave unused between them
TEXT_BYTES = 256  # of a header or a name, beside its characters
PROMPT_BYTES = 128  # of a prompt of token ids, beside these
FEATURE_BYTES = 512  # of an image or the like in a prompt


class Arrival(msgspec.Struct, frozen=True):
    """A request as it came, and what its parser made of its body."""

    raw: RawRequest
    body: bytes
    parser: Parser
    parsed: ParsedBody


def parked(request: InferenceRequest, raw: RawRequest) -> InferenceRequest:
    """`request`, which came as `raw`, without its payload; it says what is held of it."""
    body = replace(request.body, payload=None)
    return replace(request, body=body, held_bytes=held_bytes(request, raw))


def arrived(parser: Parser, raw: RawRequest, body: bytes) -> Arrival:
    """The same as often as it is asked. Raises `RefusedError`."""
    return Arrival(raw, body, parser, parser.parse(request_path(raw.headers), raw.headers, body))


def held_bytes(request: InferenceRequest, raw: RawRequest) -> int:
    """What is held of a parked request, at most."""
    headers, hint, body = raw.headers, raw.subset_hint or (), request.body
    # A character takes as much as the widest of its text: joined, at least what each takes alone.
    texts = ("".join(headers), "".join(headers.values()), "".join(hint))
    names = (body.model, body.cache_salt, request.incoming_model, request.target_model)
    prompts = {id(prompt): len(prompt) for prompt in (*request.prompts, *body.prompts)}
    features = sum(map(len, request.features)) + sum(map(len, body.features))
    return (
        REQUEST_BYTES
        + request.size_bytes
        + request.size_bytes // SLACK
        + sum(map(getsizeof, (*texts, *names)))
        + TEXT_BYTES * (len(headers) + len(hint))
        + sum(prompts.values())
        + PROMPT_BYTES * len(prompts)
        + FEATURE_BYTES * features
    )
