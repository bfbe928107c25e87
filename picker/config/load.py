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
from picker.config.scalars import as_json, loader_class
from picker.config.schema import EndpointPickerConfig
from picker.config.source import Source

MAX_CONFIG_BYTES = 1024 * 1024
MAX_VALUES = 200_000  # more than a megabyte can hold, unless aliases multiply it

_Loader = loader_class()


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
    source, findings, document = _compose(content, name)
    config = decode_most(document, EndpointPickerConfig, (), findings)
    if config.api_version == schema.DEPRECATED_API_VERSION:
        text = f"apiVersion {config.api_version} is deprecated, use {schema.API_VERSION}"
        findings.warn(("apiVersion",), text)
    elif config.api_version and config.api_version != schema.API_VERSION:
        text = f"'{config.api_version}' is unknown"
        findings.error(("apiVersion",), text, (schema.API_VERSION,))
    if config.kind and config.kind != schema.KIND:
        findings.error(("kind",), f"'{config.kind}' is unknown", (schema.KIND,))
    return LoadedConfig(config, source, findings, content)


def _compose(content: bytes, name: str) -> tuple[Source, Findings, Any]:
    """The nodes and the plain value of the one document in `content`."""
    try:
        loader = _Loader(content.decode())
        try:
            root = loader.get_single_node()
            if root is None:
                raise _unusable(name, "the configuration is empty")
            _refuse_multiplied(root, name)
            source = Source(name, root)
            findings = Findings(source)
            # Before the construction, which writes merged keys into the nodes beside others.
            _tell_duplicates(root, name, findings)
            return source, findings, as_json(_constructed(loader, root), (), findings)
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise _unusable(name, f"not valid YAML: {_problem(error, content)}", mark) from error
    except RecursionError as error:
        raise _unusable(name, "the configuration is nested too deeply") from error
    except (yaml.YAMLError, UnicodeDecodeError, ValueError) as error:
        text = f"not valid YAML: {' '.join(str(error).split())}"
        raise _unusable(name, text) from error


def _constructed(loader: yaml.SafeLoader, root: yaml.Node) -> Any:
    """The plain value of a document. PyYAML trips over values that do not fit an explicit tag."""
    try:
        return loader.construct_document(root)
    except (AttributeError, LookupError, TypeError) as error:
        raise ValueError("a value does not fit the tag before it") from error


def _problem(error: yaml.MarkedYAMLError, content: bytes) -> str:
    """What is wrong, where PyYAML says it in two halves as a whole."""
    mark, problem = error.problem_mark, error.problem or error.context or "?"
    if mark is not None and problem.startswith("found character that cannot start"):
        line = content.splitlines()[mark.line : mark.line + 1]
        if line and line[0].decode()[mark.column : mark.column + 1] == "\t":
            return "a tab, where only spaces may stand"
    if problem == "second occurrence":
        return "found duplicate anchor"
    halves = problem.startswith("but ") and error.context
    return f"{error.context}, {problem}" if halves else problem


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
