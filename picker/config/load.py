"""Bytes → `EndpointPickerConfig`, with findings that point at a line. Reads no files.

The document is composed into YAML nodes first, because only those know their position; what is
wrong is told at a path, and the path leads back to a node.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml

from picker.config import schema
from picker.config.decode import decode_most
from picker.config.findings import Finding, Findings, InvalidConfigError, Severity
from picker.config.schema import EndpointPickerConfig
from picker.config.source import Source

MAX_CONFIG_BYTES = 1024 * 1024
MAX_VALUES = 200_000  # more than a megabyte can hold, unless aliases multiply it

_Loader: type[yaml.SafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A decoded configuration, where it came from, and what was found so far.

    With errors among the `findings` it holds what could be understood, so that the rest can be
    checked too; `build` then refuses it. `content` is what it was decoded from.
    """

    config: EndpointPickerConfig
    source: Source
    findings: Findings = field(compare=False)
    content: bytes = field(default=b"", compare=False, repr=False)


def load_config(content: bytes, name: str) -> LoadedConfig:
    """Decode a configuration; `name` (a file, a flag) is how messages call it.

    Raises `InvalidConfigError` for what is no YAML document at all. Duplicate and unknown keys,
    values of the wrong type, another apiVersion or kind are findings.
    """
    if len(content) > MAX_CONFIG_BYTES:
        raise _unusable(name, f"the configuration is larger than {MAX_CONFIG_BYTES} bytes")
    source, document = _compose(content, name)
    findings = Findings(source)
    _tell_duplicates(source.root, name, findings)
    config = decode_most(_written(document), EndpointPickerConfig, (), findings)
    if config.api_version == schema.DEPRECATED_API_VERSION:
        text = f"apiVersion {config.api_version} is deprecated, use {schema.API_VERSION}"
        findings.warn(("apiVersion",), text)
    elif config.api_version and config.api_version != schema.API_VERSION:
        text = f"'{config.api_version}' is unknown"
        findings.error(("apiVersion",), text, (schema.API_VERSION,))
    if config.kind and config.kind != schema.KIND:
        findings.error(("kind",), f"'{config.kind}' is unknown", (schema.KIND,))
    return LoadedConfig(config, source, findings, content)


def _compose(content: bytes, name: str) -> tuple[Source, Any]:
    """The nodes and the plain value of the one document in `content`."""
    try:
        loader = _Loader(content.decode())
        try:
            root = loader.get_single_node()
            if root is None:
                raise _unusable(name, "the configuration is empty")
            _refuse_multiplied(root, name)
            return Source(name, root), loader.construct_document(root)
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        text = f"not valid YAML: {error.problem or error.context}"
        raise _unusable(name, text, error.problem_mark or error.context_mark) from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError, ValueError) as error:
        text = f"not valid YAML: {' '.join(str(error).split())}"
        raise _unusable(name, text) from error


def _written(value: Any) -> Any:
    """`value` without the keys after which nothing is written; they mean the same as no key."""
    if isinstance(value, dict):
        return {key: _written(one) for key, one in value.items() if one is not None}
    return [_written(one) for one in value] if isinstance(value, list) else value


def _unusable(name: str, text: str, mark: yaml.Mark | None = None) -> InvalidConfigError:
    line, column = (mark.line + 1, mark.column + 1) if mark else (None, None)
    return InvalidConfigError((Finding(Severity.ERROR, text, name, line, column),))


def _refuse_multiplied(root: yaml.Node, name: str) -> None:
    """Aliases can make a small file stand for a value without end; raise for one."""
    sizes: dict[int, int] = {}
    under_way: set[int] = set()

    def size(node: yaml.Node) -> int:
        if id(node) in under_way:
            raise _unusable(name, "an alias contains itself", node.start_mark)
        if id(node) not in sizes:
            under_way.add(id(node))
            sizes[id(node)] = 1 + sum(map(size, _parts(node)))
            under_way.remove(id(node))
        return sizes[id(node)]

    if size(root) > MAX_VALUES:
        raise _unusable(name, f"aliases make more than {MAX_VALUES} values of it")


def _parts(node: yaml.Node) -> Iterator[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        for pair in node.value:
            yield from pair
    elif isinstance(node, yaml.SequenceNode):
        yield from node.value


def _tell_duplicates(root: yaml.Node, name: str, findings: Findings) -> None:
    """YAML parsers let a later duplicate key win silently; here it is an error."""
    for node in _mappings(root):
        seen: dict[str, int] = {}
        for key, _ in node.value:
            text, mark = str(key.value), key.start_mark
            if text in seen:
                said = f"duplicate key, first in line {seen[text]}"
                line, column = mark.line + 1, mark.column + 1
                findings.add(Finding(Severity.ERROR, said, name, line, column, text))
            seen.setdefault(text, mark.line + 1)


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
