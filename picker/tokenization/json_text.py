"""Encodes JSON values as canonical text: equal values give equal text."""

import json

import msgspec

_encode = msgspec.json.Encoder(order="sorted").encode


def json_text(value: object) -> str:
    """Encode `value` without spaces, members sorted by name; "" if it is nested too deeply."""
    try:
        try:
            return _encode(value).decode()
        except OverflowError:  # an integer of more than 64 bits
            return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    except RecursionError:
        return ""


def string(value: object) -> str:
    return value if isinstance(value, str) else ""
