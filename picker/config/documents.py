"""YAML documents → nodes, which know their positions, and plain values."""

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import yaml

from picker.config.findings import Finding, Findings, InvalidConfigError, Path, Severity

_TAG = "tag:yaml.org,2002:"
_INT = re.compile(r"[-+]?(?:0b[01_]+|0[0-7_]+|0|[1-9][0-9_]*|0x[0-9a-fA-F_]+)$", re.ASCII)
_FLOAT = re.compile(
    r"(?:[-+]?(?:\.[0-9][0-9_]*|[0-9][0-9_]*(?:\.[0-9_]*)?)(?:[eE][-+]?[0-9]+)?"
    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$",
    re.ASCII,
)
_OURS = {_TAG + kind for kind in ("int", "float", "timestamp", "value")}
_MIN_INT, _MAX_INT = -(2**63), 2**64 - 1  # the range of Go's integers


def loader_class() -> type[yaml.SafeLoader]:
    """Derive a loader from PyYAML's safe loader, in C if available, with Go's rules for numbers."""
    base: type[yaml.SafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    table = {
        first: [pair for pair in pairs if pair[0] not in _OURS]
        for first, pairs in base.yaml_implicit_resolvers.items()
    }
    for first in "-+0123456789.":
        pairs = [(_TAG + "float", _FLOAT)]
        if first != ".":
            pairs.insert(0, (_TAG + "int", _INT))
        table[first] = [*table.get(first, []), *pairs]
    made: type[yaml.SafeLoader] = type("Loader", (base,), {"yaml_implicit_resolvers": table})
    return made


def as_json(value: Any, at: Path, findings: Findings) -> Any:
    """Convert `value` as a round trip through JSON does; what JSON cannot represent becomes a
    finding. Raises `RecursionError` for deeply nested values.
    """
    if isinstance(value, dict):
        named = ((_key(key), one) for key, one in value.items())
        return {key: as_json(one, (*at, key), findings) for key, one in named}
    if isinstance(value, list):
        return [as_json(one, (*at, index), findings) for index, one in enumerate(value)]
    if isinstance(value, int) and not _MIN_INT <= value <= _MAX_INT:
        try:
            value = float(value)
        except OverflowError:
            value = math.inf
    if not isinstance(value, float):
        return value
    if not math.isfinite(value):
        findings.error(at, "must be a finite number")
    elif value.is_integer() and _MIN_INT <= value <= _MAX_INT:
        return int(value)
    return value


def _key(key: Any) -> str:
    if key is None or isinstance(key, bool):
        return {None: "null", True: "true", False: "false"}[key]
    return str(key)


MAX_VALUES = 200_000  # more than a megabyte holds without aliases that multiply it

_Loader = loader_class()


@contextmanager
def yaml_loader(content: bytes, name: str, what: str, max_bytes: int) -> Iterator[yaml.SafeLoader]:
    """Open a loader of the documents in `content`; `name` and `what` are for messages. Too much
    content, and invalid YAML that the caller reads, raise `InvalidConfigError`.
    """
    if len(content) > max_bytes:
        raise unusable(name, f"{what} is larger than {max_bytes} bytes")
    try:
        loader = _Loader(content.decode())
        try:
            yield loader
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise unusable(name, f"not valid YAML: {_problem(error, content)}", mark) from error
    except RecursionError as error:
        raise unusable(name, f"{what} is nested too deeply") from error
    except (yaml.YAMLError, UnicodeDecodeError, ValueError) as error:
        text = f"not valid YAML: {' '.join(str(error).split())}"
        raise unusable(name, text) from error


def as_plain(loader: yaml.SafeLoader, root: yaml.Node, name: str, findings: Findings) -> Any:
    """Return the value of a document, converted by `as_json`; duplicate keys become findings.
    Raises `InvalidConfigError` if aliases multiply the values beyond `MAX_VALUES`.
    """
    refuse_multiplied(root, name)
    # Before the construction, which writes merged keys into the nodes.
    for key, mark, first_line in duplicate_keys(root):
        text = f"duplicate key, first in line {first_line}"
        findings.add(Finding(Severity.ERROR, text, name, mark.line + 1, mark.column + 1, key))
    return as_json(constructed(loader, root), (), findings)


def constructed(loader: yaml.SafeLoader, root: yaml.Node) -> Any:
    """Construct the plain value of a document. Raises `ValueError` if one does not fit its tag."""
    try:
        return loader.construct_document(root)
    # PyYAML stumbles over an explicit tag that does not fit, and raises one of these.
    except (AttributeError, LookupError, TypeError) as error:
        raise ValueError("a value does not fit the tag before it") from error


def duplicate_keys(root: yaml.Node) -> Iterator[tuple[str, yaml.Mark, int]]:
    """Yield duplicate keys, of which YAML parsers silently use the last, with their marks and the
    lines (from one) where they occur first. Call this before the construction, which writes merged
    keys into the nodes.
    """
    for node in _mappings(root):
        seen: dict[str, int] = {}
        for key, _ in node.value:
            text, mark = str(key.value), key.start_mark
            if text in seen:
                yield text, mark, seen[text]
            seen.setdefault(text, mark.line + 1)


def unusable(name: str, text: str, mark: yaml.Mark | None = None) -> InvalidConfigError:
    line, column = (mark.line + 1, mark.column + 1) if mark else (None, None)
    return InvalidConfigError((Finding(Severity.ERROR, text, name, line, column),))


def _problem(error: yaml.MarkedYAMLError, content: bytes) -> str:
    mark, problem = error.problem_mark, error.problem or error.context or "?"
    if mark is not None and problem.startswith("found character that cannot start"):
        line = content.splitlines()[mark.line : mark.line + 1]
        if line and line[0].decode()[mark.column : mark.column + 1] == "\t":
            return "a tab, where only spaces may stand"
    if problem == "second occurrence":
        return "found duplicate anchor"
    halves = problem.startswith("but ") and error.context
    return f"{error.context}, {problem}" if halves else problem


def refuse_multiplied(root: yaml.Node, name: str) -> None:
    """Raise `InvalidConfigError` if aliases, or merges of them, expand the document beyond
    `MAX_VALUES`: a small file can represent an endless value.
    """
    sizes: dict[int, int] = {}
    under_way: set[int] = set()

    def size(node: yaml.Node) -> int:
        if id(node) in under_way:
            raise unusable(name, "an alias contains itself", node.start_mark)
        if id(node) not in sizes:
            under_way.add(id(node))
            sizes[id(node)] = 1 + sum(map(size, _parts(node)))
            under_way.remove(id(node))
        return sizes[id(node)]

    if size(root) > MAX_VALUES:
        raise unusable(name, f"aliases make more than {MAX_VALUES} values of it")


def _parts(node: yaml.Node) -> Iterator[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        for pair in node.value:
            yield from pair
    elif isinstance(node, yaml.SequenceNode):
        yield from node.value


def _mappings(root: yaml.Node) -> Iterator[yaml.MappingNode]:
    pending, visited = [root], set[int]()
    while pending:
        node = pending.pop()
        if id(node) in visited:  # an alias
            continue
        visited.add(id(node))
        if isinstance(node, yaml.MappingNode):
            yield node
        pending.extend(reversed(tuple(_parts(node))))
