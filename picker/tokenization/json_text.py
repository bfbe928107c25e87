"""JSON values as text that is the same for equal values."""

from __future__ import annotations

import json

import msgspec

_encode = msgspec.json.Encoder(order="sorted").encode


def json_text(value: object) -> str:
    """`value`, decoded from JSON, as JSON without spaces, its members sorted by name.

    "" for what is nested too deeply to be written.
    """
    try:
        try:
            return _encode(value).decode()
        except OverflowError:  # an integer of more than 64 bits
            return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    except RecursionError:
        return ""


def string(value: object) -> str:
    """`value` if it is a string, else ""."""
    return value if isinstance(value, str) else ""
