"""Bodies that name another model, and everything else as it was."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType

import msgspec

from picker.json_bodies import decoded, unmarked

_decode_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_NO_MEMBERS: Mapping[str, object] = MappingProxyType({})


def with_model(body: bytes, model: str) -> bytes:
    """`body`, a JSON object, with its `model` replaced or added; see `with_members`."""
    return with_members(body, {"model": model})


def with_members(
    body: bytes, changed: Mapping[str, object] = _NO_MEMBERS, removed: Collection[str] = ()
) -> bytes:
    """`body`, a JSON object, with some members replaced, added or removed.

    Members come out sorted by name and without space between them, as the reference picker writes
    them. Every other value keeps its very bytes: no number loses digits, which the reference's
    passage through a float does, and nothing is escaped that was not. Of members with the same name
    the last one stays. In a body with lone surrogates, escaped backslashes become `\\u005c`. Raises
    `RefusedError` (400) when `body` is not a JSON object.
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
    """The members of `after` that are other objects than in `before`, and the names it lacks."""
    changed = {
        name: value
        for name, value in after.items()
        if name not in before or before[name] is not value
    }
    return changed, [name for name in before if name not in after]
