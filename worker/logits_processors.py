"""Logits processors: classes of installed packages that change the logits of chosen requests.

A package names a class in the entry-point group `GROUP`. Its constructor's parameters are keys of
`vllm_xargs`: a request that sends any of them gets an instance, and a ValueError refuses it. The
API builds one only to check the request; name and arguments travel to the engine, which builds its
own.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, lru_cache
from importlib.metadata import entry_points
from typing import Any, Protocol

import msgspec

from worker.errors import ConfigError

GROUP = "pointsman.logits_processors"

_NAMELESS = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL)


class LogitsProcessor(Protocol):
    """A processor with its arguments. Requests with the same arguments share an instance, and a
    preemption or a rejected draft repeats a position: the result of `process` may depend only on
    the arguments of the constructor and of the call.
    """

    def process(self, output_token_ids: Sequence[int], row: Any) -> Any:
        """Return the logits of the next token, given the model's own in `row`: a float32 tensor [V]
        on the model's device, which may be changed in place. -inf excludes a token.
        `output_token_ids` are the tokens generated so far, earlier drafts included.
        """


@cache
def load(name: str) -> Callable[..., LogitsProcessor]:
    flag = f"--logits-processors {name}"
    installed = {point.name: point for point in entry_points(group=GROUP)}
    if name not in installed:
        known = ", ".join(sorted(installed)) or "none"
        raise ConfigError(f"{flag}: not installed; installed are: {known}")
    try:
        kind: Callable[..., LogitsProcessor] = installed[name].load()
        parameters = inspect.signature(kind).parameters.values()
    except Exception as error:  # another package's code
        raise ConfigError(f"{flag}: cannot be loaded: {error!r}") from error
    kinds = {parameter.kind for parameter in parameters}
    # Without named parameters, no request could select it, or any key would.
    if not kinds or not kinds.isdisjoint((*_NAMELESS, inspect.Parameter.VAR_KEYWORD)):
        raise ConfigError(f"{flag}: its constructor must name the arguments that it takes")
    if not callable(getattr(kind, "process", None)):
        raise ConfigError(f"{flag}: has no method `process`")
    return kind


def chosen(names: Iterable[str], arguments: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Return the processors among `names` that a request's `arguments` select, each with its
    arguments as JSON. Raise `ValueError` for wrong arguments.
    """
    takes = {name: inspect.signature(load(name)).parameters for name in names}
    known = sorted({key for keys in takes.values() for key in keys})
    for key in arguments:
        if key not in known:
            raise ValueError(f"no logits processor takes {key!r}; known are {', '.join(known)}")
    found = []
    for name, keys in takes.items():
        if own := {key: value for key, value in arguments.items() if key in keys}:
            try:
                # Build it once here, so that wrong values are a 400 and not a failure of the
                # engine.
                load(name)(**own)
            except (TypeError, ValueError) as error:
                raise ValueError(f"{name}: {error}") from error
            found.append((name, msgspec.json.encode(own).decode()))
    return tuple(found)


@lru_cache(maxsize=256)
def instance(name: str, arguments: str) -> LogitsProcessor:
    return load(name)(**msgspec.json.decode(arguments))
