"""Streams that can continue at another worker. Pure.

The stream of a request with `resume` states in a response header what another worker needs beyond
the request. After each write comes a comment with the ids of the tokens whose text has been
written. The other worker takes the request with both, feeds the tokens to the parsers, and discards
the results; it then writes what the first worker would have written next.
"""

import json
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from worker.api.schema.requests import MAX_REQUEST_ID_CHARS, GenerationFields, ResumeFields
from worker.engine.messages import AddRequest
from worker.errors import RequestError

HEADER = b"x-pointsman-resume"
_NEEDED = ("id", "created", "seed", "prompt")
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Resumption:
    """The `header` by which a stream can be resumed, and whether it `has_begun` elsewhere."""

    header: str
    has_begun: bool


def check_resume(resume: ResumeFields, prefix: str) -> None:
    """Refuse a `resume` object that no response header of this server can have held."""
    given = [name for name in _NEEDED if getattr(resume, name) is not None]
    if not given and resume.token_ids is None:
        return
    if len(given) < len(_NEEDED):
        missing = ", ".join(sorted(set(_NEEDED) - set(given)))
        raise _refused(f"lacks {missing}: send what the response header {HEADER.decode()} said")
    name = resume.id or ""
    is_ours = name.startswith(f"{prefix}-") and name.isascii() and name.isprintable()
    if not is_ours or len(name) > len(prefix) + 1 + MAX_REQUEST_ID_CHARS:
        raise _refused(f"has an id that is not one of a response here ({prefix}-…)")


def resumption_of(
    request: GenerationFields,
    asked: Sequence[AddRequest],
    response_id: str,
    created: int,
    kv: dict[str, Any] | None = None,
) -> Resumption | None:
    """Return a resumption, None if impossible. Raises `RequestError` if the stream needs one."""
    resume, [first, *others] = request.resume, asked
    if resume is None:
        return None
    goes_on = resume.id is not None
    if not request.stream or request.echo or others or first.branch_ids:
        if goes_on:
            raise _refused("goes with stream true, one prompt, n 1 and echo false")
        return None
    # Another template or tokenizer makes other tokens of the same text.
    prompt = zlib.crc32(array("q", first.prompt_token_ids).tobytes())
    if goes_on and resume.prompt != prompt:
        raise _refused("is of another prompt: this worker has another template or tokenizer")
    num_tokens = len(first.output_token_ids)
    if num_tokens >= first.params.max_tokens:
        reason = f"has {num_tokens} tokens, an answer of at most {first.params.max_tokens} is over"
        raise _refused(reason)
    facts = (response_id, created, first.params.seed, prompt)
    said: dict[str, Any] = dict(zip(_NEEDED, facts, strict=True))
    if kv is not None:
        said["kv"] = kv
    return Resumption(json.dumps(said), resume.token_ids is not None)


def mark(token_ids: Sequence[int]) -> bytes:
    # A comment, which clients of event streams ignore, should one reach them.
    return b": resume " + _encode(token_ids) + b"\n\n"


def _refused(reason: str) -> RequestError:
    return RequestError(f"`resume` {reason}", param="resume")
