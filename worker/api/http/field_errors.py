"""Errors about fields of a body: they carry paths, so that another API can name its own fields."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from worker.errors import RequestError

_BODY = "body."
# Functions of other APIs have no envelope.
_FUNCTION = re.compile(r"(tools[\[.]\d+\]?)\.function\.")


class Field(str):
    __slots__ = ()


class FieldError(RequestError):
    def __init__(
        self, *parts: str, param: str | None = None, kind: str = "BadRequestError"
    ) -> None:
        super().__init__("".join(parts), None if param is None else str(param), type=kind)
        self.parts = parts


def refused(path: str, reason: str) -> FieldError:
    return FieldError(Field(path), f" {reason}", param=path)


def quoted(path: str, reason: str) -> FieldError:
    return FieldError("`", Field(path), f"` {reason}", param=path)


def malformed(message: str | tuple[str, ...], place: str = "") -> FieldError:
    """Return the 400 for a body of the wrong shape. `place` is the field's path
    (`messages[0].role`), or the byte's position; type and `param` (`body.messages.0.role`) are
    those of vLLM's validation errors.
    """
    path = place.replace("[", ".").replace("]", "")
    parts = (message,) if isinstance(message, str) else message
    return FieldError(*parts, param=_BODY + path if path else "body", kind="Bad Request")


def needed(value: str | None, place: str) -> str:
    if value is None:
        raise malformed(f"Missing required field `{place}`", place)
    return value


@contextmanager
def fields_named(names: Mapping[str, str]) -> Iterator[None]:
    """Rename the fields in errors that the block raises; `names` maps paths to another API's."""
    try:
        yield
    except RequestError as error:
        if isinstance(error, FieldError):
            error.parts = tuple(
                Field(_renamed(part, names)) if isinstance(part, Field) else part
                for part in error.parts
            )
            error.message = "".join(error.parts)
        if error.param is not None:
            prefix = _BODY if error.param.startswith(_BODY) else ""
            error.param = prefix + _renamed(error.param.removeprefix(prefix), names)
        raise


def _renamed(path: str, names: Mapping[str, str]) -> str:
    for name in sorted(names, key=len, reverse=True):
        if re.match(rf"{re.escape(name)}(?!\w)", path):
            path = names[name] + path[len(name) :]
            break
    return _FUNCTION.sub(r"\1.", path)
