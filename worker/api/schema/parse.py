"""JSON bodies → checked structs: strict, and every refusal names the field at fault. Pure."""

import re
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeVar, get_type_hints

import msgspec
from msgspec import inspect

from worker.api.http.field_errors import malformed
from worker.api.http.limits import malformed_json
from worker.errors import RequestError

_INT64 = 1 << 63

Body = TypeVar("Body", bound=msgspec.Struct)


class IgnoredFieldError(RequestError):
    """Raised for a `body` of this `kind` that has a field to leave out."""

    body: bytes
    kind: type[msgspec.Struct]


class UnknownFieldError(IgnoredFieldError): ...


def hint(*quiet: object) -> msgspec.Meta:
    """Mark a field without effect. Null and the values `quiet` ask for nothing."""
    return msgspec.Meta(extra={_HINT: quiet})


class Whole(int):
    """A whole number of at most 64 bits; `3.0` is one, as some clients send only floats."""


# Messages may quote the client in the middle: the place is at the end.
_AT = r" - at (?:`(?:key|value)` in )?`\$\.?([^`]*)`"
_LOCATION = re.compile(rf"{_AT}\Z")
_FIELD = re.compile(
    rf"Object (?:contains (unknown)|missing required) field `(.*?)`(?:{_AT})?\Z", re.S
)
# Faults that vLLM finds after the shape of the body, and so reports as values out of range:
# parts of a message without their place, and these by their name alone.
_PART = re.compile(r"messages\[\d+\]\.content\[")
_COUNTS = re.compile(r"(?:top_|prompt_)?logprobs|cache_salt")
_NO_PROMPT = ("Missing required field `prompt`", "prompt: Expected `str | array`, got `null`")
_HINT = "hint"
_SHOWN_CHARS = 80
_REASON_CHARS = 200


def decode(body: bytes, kind: type[Body]) -> Body:
    """Parse a body. Raises `RequestError` naming the field at fault, or an `IgnoredFieldError`."""
    try:
        value = msgspec.json.decode(body, type=kind, dec_hook=decode_whole)
    except msgspec.ValidationError as error:
        explained = _explained(str(error))
        # The server decides whether unknown fields are refused; it needs the body for a second run.
        if isinstance(explained, UnknownFieldError):
            explained.body, explained.kind = body, kind
        raise explained from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise malformed_json(body, str(error)) from error
    except RecursionError as error:
        raise malformed("The body is nested too deeply") from error
    if _has_hint(value):
        found = IgnoredFieldError("a field has no effect")
        found.body, found.kind = body, kind
        raise found
    return value


@dataclass(frozen=True, slots=True)
class Ignored:
    unknown: list[str] = field(default_factory=list)
    hints: list[str] = field(default_factory=list)
    all_known: bool = field(default=False, compare=False)


def without_ignored_fields(
    body: bytes, kind: type[msgspec.Struct], *, all_known: bool = False
) -> tuple[bytes, Ignored]:
    """Return a body with only the fields that are known and have an effect, byte for byte, and the
    ignored fields. Other faults stay. `all_known`: only hints can be ignored. Raises `RequestError`
    if the body is not JSON.
    """
    ignored = Ignored(all_known=all_known)
    try:
        return _used_part(body.strip(), _type_of(kind), "", ignored), ignored
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise malformed_json(body, str(error)) from error


def _used_part(value: bytes, kind: inspect.Type, path: str, ignored: Ignored) -> bytes:
    structs, items = _parts(kind)
    if items is not None and value.startswith(b"["):
        elements = msgspec.json.decode(value, type=list[msgspec.Raw])
        parts = [
            _used_part(bytes(element), items, f"{path}[{n}]", ignored)
            for n, element in enumerate(elements)
        ]
        return b"[" + b",".join(parts) + b"]"
    if not structs or not value.startswith(b"{"):
        return value
    given = msgspec.json.decode(value, type=dict[str, msgspec.Raw])
    struct = _struct_of(given, structs)
    # Open objects, such as schemas, hold any names.
    if struct is None or not struct.forbid_unknown_fields:
        return value
    known = {one.encode_name: one.type for one in struct.fields}
    near_hints = {name for name, _ in _hints(struct.cls)}
    used: dict[str, msgspec.Raw] = {}
    for name, part in given.items():
        place = f"{path}.{name}" if path else name
        # Most fields cannot hold a hint at any depth.
        if ignored.all_known and name not in near_hints:
            used[name] = part
        elif name in known:
            quiet = _quiet(known[name])
            if quiet is not None and _asks(msgspec.json.decode(part), quiet):
                ignored.hints.append(place)
            else:
                used[name] = msgspec.Raw(_used_part(bytes(part), known[name], place, ignored))
        elif name == struct.tag_field:
            used[name] = part
        else:
            ignored.unknown.append(place)
    return msgspec.json.encode(used)


def _struct_of(
    given: dict[str, msgspec.Raw], structs: tuple[inspect.StructType, ...]
) -> inspect.StructType | None:
    for struct in structs:
        if struct.tag_field is None:
            return struct
        if given.get(struct.tag_field) == msgspec.Raw(msgspec.json.encode(struct.tag)):
            return struct
    return None


def is_one_of(value: object, values: tuple[object, ...]) -> bool:
    """Return whether a value equals one of the values; true does not equal 1."""
    return any(v == value and isinstance(v, bool) is isinstance(value, bool) for v in values)


def _has_hint(value: object) -> bool:
    if isinstance(value, list):
        return any(map(_has_hint, value))
    if not isinstance(value, msgspec.Struct):
        return False
    for name, quiet in _hints(type(value)):
        part = getattr(value, name)
        if _has_hint(part) if quiet is None else _asks(part, quiet):
            return True
    return False


def _asks(value: object, quiet: tuple[object, ...]) -> bool:
    return value is not None and not is_one_of(value, quiet)


@cache
def _hints(kind: type[msgspec.Struct]) -> tuple[tuple[str, tuple[object, ...] | None], ...]:
    """Return a struct's hints by name; None stands for a field that may hold structs with hints."""
    return tuple(
        (one.name, _quiet(one.type))
        for one in _type_of(kind).fields
        if _is_near_hint(one.type, frozenset({kind}))
    )


def _is_near_hint(kind: inspect.Type, seen: frozenset[type[msgspec.Struct]]) -> bool:
    if _quiet(kind) is not None:
        return True
    structs, items = _parts(kind)
    structs += () if items is None else _parts(items)[0]
    return any(
        _is_near_hint(one.type, seen | {struct.cls})
        for struct in structs
        if struct.cls not in seen
        for one in struct.fields
    )


def _quiet(kind: inspect.Type) -> tuple[object, ...] | None:
    while isinstance(kind, inspect.Metadata):
        if kind.extra is not None and _HINT in kind.extra:
            values: tuple[object, ...] = kind.extra[_HINT]
            return values
        kind = kind.type
    return None


@cache
def _type_of(kind: type[msgspec.Struct]) -> inspect.StructType:
    type_of = inspect.type_info(kind)
    assert isinstance(type_of, inspect.StructType)  # noqa: S101 (msgspec's, of a struct)
    return type_of


def _parts(kind: inspect.Type) -> tuple[tuple[inspect.StructType, ...], inspect.Type | None]:
    """Return the structs that an object may be, and the type of an array's elements, if known."""
    while isinstance(kind, inspect.Metadata):
        kind = kind.type
    if isinstance(kind, inspect.StructType):
        return (kind,), None
    if isinstance(kind, inspect.ListType):
        return (), None if _parts(kind.item_type) == ((), None) else kind.item_type
    if not isinstance(kind, inspect.UnionType):
        return (), None
    structs: tuple[inspect.StructType, ...] = ()
    items = None
    for option in kind.types:
        more, of_list = _parts(option)
        structs, items = structs + more, items or of_list
    return structs, items


def schema_hook(kind: type) -> dict[str, Any]:
    if kind is Whole:
        return {"type": "integer", "minimum": -_INT64, "maximum": _INT64 - 1}
    raise NotImplementedError(kind)


def shown(value: object) -> str:
    """Cut a client's value for an error message."""
    text = str(value)
    return text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "…"


def decode_whole(kind: type, value: Any) -> Whole:
    if kind is not Whole:
        raise NotImplementedError(kind)
    # Python's booleans are integers; JSON's are not.
    if isinstance(value, bool) or not isinstance(value, int | float):
        name = type(value).__name__
        got = {"list": "array", "dict": "object"}.get(name, name)
        raise ValueError(f"Expected `int`, got `{got}`")
    if value != value // 1:
        raise ValueError(f"Expected `int`, got {shown(value)}")
    if not -_INT64 <= value < _INT64:
        raise ValueError("Integer value out of range: it must fit into 64 bits")
    return Whole(value)


def _explained(message: str) -> RequestError:
    found = _FIELD.match(message)
    if found:
        unknown, name, path = found.groups()
        field = f"{path}.{shown(name)}" if path else shown(name)
        if unknown:
            reason = f"Unknown field `{field}`: it is not part of this API"
            refusal = malformed(reason, field)
            return UnknownFieldError(reason, refusal.param, refusal.status, refusal.type)
        return _misshapen(f"Missing required field `{field}`", field)
    location = _LOCATION.search(message)
    path = location.group(1).removesuffix("[...]") if location else ""
    reason = message if location is None else message[: location.start()]
    if len(reason) > _REASON_CHARS:
        reason = reason[:_REASON_CHARS] + "…"
    if _COUNTS.fullmatch(path) and not reason.startswith("Expected `bool"):  # chat's is a switch
        return RequestError(f"{path}: {reason}", param=path)
    return _misshapen(f"{path}: {reason}" if path else reason, path)


def _misshapen(message: str, path: str) -> RequestError:
    if message in _NO_PROMPT:
        return RequestError(message, param=path)
    return RequestError(message) if _PART.match(path) else malformed(message, path)


def decode_supported(body: bytes, kind: type[Body]) -> Body:
    request = decode(body, kind)
    refuse_unsupported(request)
    return request


def checked(value: object, kind: type[Body]) -> Body:
    """Check a value made in Python as `decode_supported` checks a body. Raises `RequestError`."""
    try:
        request = msgspec.convert(msgspec.to_builtins(value), kind, dec_hook=decode_whole)
    except msgspec.ValidationError as error:
        raise _explained(str(error)) from error
    refuse_unsupported(request)
    return request


def refuse_unsupported(request: msgspec.Struct, within: str = "") -> None:
    """Refuse (400) a field that is not supported; `within` is the path before it, with a dot."""
    for name, neutral, fix in _neutral_values(type(request)):
        value = getattr(request, name)
        if value is not None and not is_one_of(value, neutral):
            path = within + name
            raise RequestError(f"`{path}` is not supported yet; {fix}", param=path)


@cache
def _neutral_values(kind: type[msgspec.Struct]) -> tuple[tuple[str, tuple[object, ...], str], ...]:
    return tuple(
        (name, meta.extra["only"], meta.extra["fix"])
        for name, annotated in get_type_hints(kind, include_extras=True).items()
        for meta in getattr(annotated, "__metadata__", ())
        if "only" in (meta.extra or {})
    )
