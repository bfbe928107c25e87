"""Bodies: the one sent in place of the original, and the memory that a waiting one takes."""

from collections.abc import Collection, Mapping, Sequence
from sys import getsizeof
from types import MappingProxyType

import msgspec

from picker.plugins.parsers._json_bodies import decoded, unmarked
from picker.scrape.engines import DEFAULT_ENGINE, ENGINE_LABELS
from picker.types import Api, Endpoint, InferenceRequest, ParsedBody, RawRequest

# Upper estimates of what the process holds, in bytes; a test measures them.
REQUEST_BYTES = 16_384  # tasks, buffers, and the objects of every layer; 9 to 12 thousand
SLACK = 4  # a quarter of a body more: room that large blocks leave unused between them
TEXT_BYTES = 256  # for a header or a name, beyond its characters
PROMPT_BYTES = 128  # for a prompt of token ids, beyond these
FEATURE_BYTES = 512  # for an image or a similar item in a prompt
_decode_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_NO_MEMBERS: Mapping[str, object] = MappingProxyType({})
ENGINE_PRIORITY = "x-vllm-priority"  # outranks the body in vLLM, and clients can send it
_LOW_FIRST = DEFAULT_ENGINE  # the engine whose lower numbers go first; all others: higher ones
_WITHOUT_PRIORITY = (Api.CONVERSATIONS, Api.IMAGES, Api.MESSAGES, Api.VLLM_GRPC, Api.RAW)


def engine_priority(request: InferenceRequest, endpoint: Endpoint) -> int:
    """Return the request's priority as the engine of `endpoint` counts it."""
    labels = endpoint.labels
    named = next((labels[label] for label in ENGINE_LABELS if labels.get(label)), DEFAULT_ENGINE)
    return -request.priority if named.lower() == _LOW_FIRST else request.priority


def outgoing_body(
    body: bytes, parsed: ParsedBody, request: InferenceRequest, priority: int | None = None
) -> bytes | None:
    """Return the body to send in place of `body`, parsed as `parsed`; None: send it unchanged.

    `priority` replaces that of the body, where the API has one.
    """
    before, after = parsed.payload, request.body.payload
    if before is None or after is None or not parsed.can_rewrite:
        return None
    changed: Mapping[str, object] = {}
    removed: Sequence[str] = ()
    if after is not before:
        changed, removed = changes(before, after)
    if request.target_model != parsed.model:
        changed = {**changed, "model": request.target_model}
    has_priority = priority is not None and parsed.api not in _WITHOUT_PRIORITY
    if has_priority and after.get("priority", 0) != priority:
        changed = {**changed, "priority": priority}
    if not changed and not removed:
        return None
    return with_members(body, changed, removed)


def with_members(
    body: bytes, changed: Mapping[str, object] = _NO_MEMBERS, removed: Collection[str] = ()
) -> bytes:
    """Replace, add or remove members of `body`, a JSON object.

    Members are sorted by name, without space between them, as in the reference picker. Every
    other value retains its bytes; of members with the same name the last one is used. In a body
    with lone surrogates, escaped backslashes become `\\u005c`. Raises `RefusedError` (400).
    """
    members, has_marks = decoded(body, _decode_members)
    for name, value in changed.items():
        members[name] = msgspec.Raw(msgspec.json.encode(value))
    for name in removed:
        members.pop(name, None)
    written = msgspec.json.encode(members, order="sorted")
    return unmarked(written) if has_marks else written


def changes(
    before: Mapping[str, object], after: Mapping[str, object]
) -> tuple[dict[str, object], list[str]]:
    """Return the members of `after` that are new or other objects, and the removed names."""
    changed = {
        name: value
        for name, value in after.items()
        if name not in before or before[name] is not value
    }
    return changed, [name for name in before if name not in after]


def held_bytes(request: InferenceRequest, raw: RawRequest) -> int:
    """Return an upper bound on the memory that a parked request takes."""
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
