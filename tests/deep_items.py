"""The tests that differ at full depth: those that `make test-all` adds, and those that ask for it.

A test asks for its depth in its own body, in a fixture, or by a name of its module whose value
depends on depth. The names are found in the source, so a file may have tests of both kinds.
"""

import ast
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

_DEPTH = "tests.depth"


def is_deep(item: pytest.Item) -> bool:
    """Return whether full depth adds the item, or runs it in another way than `make test`."""
    function = getattr(item, "function", None)
    if function is None or item.get_closest_marker("full") is not None:
        return True
    if getattr(function, "is_hypothesis_test", False):
        return True
    found = {item.name.partition("[")[0], *(node.name for node in item.listchain())}
    if found & deep_names(item.path):
        return True
    fixtures = getattr(item, "_fixtureinfo").name2fixturedefs.values()  # noqa: B009
    return any(_asks(fixture.func) for same in fixtures for fixture in same)


def _asks(fixture: Callable[..., Any]) -> bool:
    code = getattr(fixture, "__code__", None)
    return code is not None and fixture.__name__ in deep_names(Path(code.co_filename))


@cache
def deep_names(path: Path) -> frozenset[str]:
    """Return the names at the top of a module whose meaning depends on depth."""
    source = path.read_text() if path.suffix == ".py" else ""
    if _DEPTH not in source and "import depth" not in source:
        return frozenset()
    statements = ast.parse(source).body
    deep = {name for each in statements for name in _depth_imports(each)}
    defined = [(set(_stored(each)), _used(each)) for each in statements]
    size = -1
    while size != len(deep):
        size = len(deep)
        for stored, used in defined:
            if used & deep:
                deep |= stored
    return frozenset(deep)


def _depth_imports(statement: ast.stmt) -> Iterator[str]:
    if isinstance(statement, ast.ImportFrom):
        for alias in statement.names:
            if _DEPTH in (statement.module, f"{statement.module}.{alias.name}"):
                yield alias.asname or alias.name


def _stored(statement: ast.stmt) -> Iterator[str]:
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield statement.name
        return
    for node in ast.walk(statement):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def _used(statement: ast.stmt) -> set[str]:
    return {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
