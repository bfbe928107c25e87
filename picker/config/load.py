"""Bytes → `EndpointPickerConfig`, with errors that point at a line. Reads no files.

The document is composed into YAML nodes first, because only those know their position; a decoding
error names a path, and the path leads back to a node.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
import yaml

from picker.config import schema
from picker.config.schema import EndpointPickerConfig
from picker.errors import ConfigError

MAX_CONFIG_BYTES = 1024 * 1024
Path = tuple[str | int, ...]
S = TypeVar("S", bound=msgspec.Struct)

_Loader: type[yaml.SafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_AT = re.compile(r"^(?P<what>.*?)(?: - at `\$(?P<path>.*)`)?$", re.DOTALL)
_STEP = re.compile(r"\.([^.\[\]]+)|\[(\d+)\]|\[\.\.\.\]")
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`")
_MISSING = re.compile(r"Object missing required field `(.*)`")
_KINDS = {"object": "a mapping", "array": "a list", "str": "a string", "int": "a whole number"}
_KINDS |= {"float": "a number", "bool": "true or false", "null": "nothing"}


@dataclass(frozen=True, slots=True)
class Source:
    """Where a configuration came from: its name in messages, and its YAML nodes."""

    name: str
    root: yaml.Node = field(repr=False)

    def error(self, path: Path, text: str) -> ConfigError:
        """A `ConfigError` that begins `name:line:column: path: `, all counted from one."""
        mark = _locate(self.root, path)
        where = f"{self.name}:{mark.line + 1}:{mark.column + 1}: "
        dotted = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
        return ConfigError(where + (f"{dotted.lstrip('.')}: {text}" if path else text))

    def decode(self, value: Any, shape: type[S], at: Path) -> S:
        """`value`, found at `at`, as a `shape`. Raises `ConfigError`; unknown fields are errors."""
        try:
            return msgspec.convert(value, shape)
        except msgspec.ValidationError as error:
            raise self._explain(str(error), shape, at) from error
        except RecursionError as error:
            raise self.error(at, "an alias contains itself") from error

    def _explain(self, message: str, shape: type[msgspec.Struct], at: Path) -> ConfigError:
        match = _AT.match(message)
        what, tail = (match["what"], match["path"] or "") if match else (message, "")
        inner = tuple(name or int(index or 0) for name, index in _STEP.findall(tail))
        if unknown := _UNKNOWN.fullmatch(what):
            allowed = ", ".join(sorted(_fields_at(shape, inner)))
            hint = f"unknown key, allowed: {allowed}" if allowed else "unknown key, none is allowed"
            return self.error((*at, *inner, unknown[1]), hint)
        if missing := _MISSING.fullmatch(what):
            return self.error((*at, *inner), f"the key '{missing[1]}' is missing")
        return self.error((*at, *inner), _in_yaml_words(what))


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A decoded configuration, its source for further errors, and what it should do otherwise."""

    config: EndpointPickerConfig
    source: Source
    warnings: tuple[str, ...] = ()


def load_config(content: bytes, name: str) -> LoadedConfig:
    """Decode a configuration; `name` (a file, a flag) is how messages call it.

    Raises `ConfigError` for what is no YAML, has a duplicate or unknown key, a value of the wrong
    type, or another apiVersion or kind.
    """
    if len(content) > MAX_CONFIG_BYTES:
        raise ConfigError(f"{name}: the configuration is larger than {MAX_CONFIG_BYTES} bytes")
    source, document = _compose(content, name)
    config = source.decode(document, EndpointPickerConfig, ())
    warnings: list[str] = []
    if config.api_version == schema.DEPRECATED_API_VERSION:
        warnings.append(f"apiVersion {config.api_version} is deprecated, use {schema.API_VERSION}")
    elif config.api_version != schema.API_VERSION:
        text = f"'{config.api_version}' is unknown, allowed: {schema.API_VERSION}"
        raise source.error(("apiVersion",), text)
    if config.kind != schema.KIND:
        raise source.error(("kind",), f"'{config.kind}' is unknown, allowed: {schema.KIND}")
    return LoadedConfig(config, source, tuple(warnings))


def _compose(content: bytes, name: str) -> tuple[Source, Any]:
    """The nodes and the plain value of the one document in `content`."""
    try:
        loader = _Loader(content.decode())
        try:
            root = loader.get_single_node()
            if root is None:
                raise ConfigError(f"{name}: the configuration is empty")
            _refuse_duplicates(root, name)
            return Source(name, root), loader.construct_document(root)
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{name}:{mark.line + 1}:{mark.column + 1}" if mark else name
        raise ConfigError(f"{where}: not valid YAML: {error.problem or error.context}") from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise ConfigError(f"{name}: not valid YAML: {' '.join(str(error).split())}") from error


def _refuse_duplicates(root: yaml.Node, name: str) -> None:
    """YAML parsers let a later duplicate key win silently; here it is an error."""
    for node in _mappings(root):
        seen: dict[str, int] = {}
        for key, _ in node.value:
            text, mark = str(key.value), key.start_mark
            if text in seen:
                where = f"{name}:{mark.line + 1}:{mark.column + 1}"
                raise ConfigError(f"{where}: {text}: duplicate key, first in line {seen[text]}")
            seen[text] = mark.line + 1


def _mappings(root: yaml.Node) -> Iterator[yaml.MappingNode]:
    pending, visited = [root], set[int]()
    while pending:
        node = pending.pop()
        if id(node) in visited:  # an alias
            continue
        visited.add(id(node))
        if isinstance(node, yaml.MappingNode):
            yield node
            pending.extend(value for _, value in node.value)
        elif isinstance(node, yaml.SequenceNode):
            pending.extend(node.value)


def _locate(root: yaml.Node, path: Sequence[str | int]) -> yaml.Mark:
    """The position of the deepest step of `path` that exists: of a key, else of a list element."""
    node, mark = root, root.start_mark
    for step in path:
        if isinstance(node, yaml.MappingNode):
            pair = next((pair for pair in node.value if pair[0].value == step), None)
            if pair is None:
                break
            mark, node = pair[0].start_mark, pair[1]
        elif isinstance(node, yaml.SequenceNode) and isinstance(step, int):
            if step >= len(node.value):
                break
            node = node.value[step]
            mark = node.start_mark
        else:
            break
    return mark


def _fields_at(shape: type[msgspec.Struct], path: Sequence[str | int]) -> tuple[str, ...]:
    """The keys that the struct at `path` within `shape` knows."""
    node: msgspec.inspect.Type = msgspec.inspect.type_info(shape)
    for step in path:
        if isinstance(node, msgspec.inspect.StructType):
            node = next(f.type for f in node.fields if f.encode_name == step)
        if isinstance(node, msgspec.inspect.UnionType):
            structs = (msgspec.inspect.StructType, msgspec.inspect.VarTupleType)
            node = next((t for t in node.types if isinstance(t, structs)), node)
        if isinstance(step, int) and isinstance(node, msgspec.inspect.VarTupleType):
            node = node.item_type
    if isinstance(node, msgspec.inspect.StructType):
        return tuple(f.encode_name for f in node.fields)
    return ()


def _in_yaml_words(what: str) -> str:
    """msgspec's "Expected `str`, got `int`" in the words of somebody who writes YAML."""

    def word(match: re.Match[str]) -> str:
        return " or ".join(_KINDS.get(kind.strip(), kind.strip()) for kind in match[1].split("|"))

    text = re.sub(r"`([^`]*)`", word, what)
    return text[:1].lower() + text[1:]
