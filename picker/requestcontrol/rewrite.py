"""Give a JSON body another model name without touching anything else in it."""

from __future__ import annotations

import msgspec

from picker.errors import bad_request

_decode_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def with_model(body: bytes, model: str) -> bytes:
    """`body`, a JSON object, with its `model` replaced or added.

    Every other value keeps its bytes, so no number loses digits; members come out sorted by name
    and without space between them, as the reference picker does. Raises `RefusedError` (400) when
    `body` is not a JSON object.
    """
    try:
        members = _decode_members(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise bad_request(f"error unmarshaling request bodyMap: {error}") from error
    members["model"] = msgspec.Raw(msgspec.json.encode(model))
    return msgspec.json.encode(members, order="sorted")
