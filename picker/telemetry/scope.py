"""Whether plugins keep to the findings that they declare.

Plugins run in an order that follows from what they say they read and write. One that touches
anything else works by luck. Every plugin is watched for its first calls after a configuration is
loaded, which costs nothing afterwards: what it touches undeclared is logged once and counted. A
strict scope is never lifted, and what was not declared is dropped as well.

A plugin's own findings, whose producer is itself, need no declaration.
"""

from __future__ import annotations

import logging
from collections.abc import ItemsView, Iterable
from typing import Any, TypeVar

from picker.framework.attributes import Attributes, DataKey
from picker.framework.interfaces import ConsumesData, MayConsumeData, ProducesData
from picker.metrics.series import Counter

log = logging.getLogger(__name__)
T = TypeVar("T")

WATCHED_CALLS = 1000


class Scope:
    """What one plugin may touch at one extension point. Owns how long it is still watched."""

    def __init__(
        self, name: str, plugins: Iterable[object], violations: Counter, labels: tuple[str, ...]
    ) -> None:
        """`plugins` are the one called `name` and those that it calls in turn; `labels` those of
        `violations` without the kind of access.
        """
        self.name = name
        self._reads = {name}
        self._writes = {name}
        for plugin in plugins:
            self._reads.update(map(str, _readable(plugin)))
            if isinstance(plugin, ProducesData):
                self._writes.update(map(str, plugin.produces))
        self._readable_types = {read.partition("/")[0] for read in self._reads}
        self._violations = violations
        self._labels = labels
        self._told: set[tuple[str, str]] = set()
        self._calls_left: int | None = WATCHED_CALLS

    def never_lift(self) -> None:
        """Watch for good, and drop what was not declared."""
        self._calls_left = None

    @property
    def is_strict(self) -> bool:
        """Whether violations are dropped."""
        return self._calls_left is None

    def over(self, attributes: Attributes) -> Attributes:
        """`attributes` as the plugin is to see them in one call."""
        if self._calls_left is None:
            return _ScopedAttributes(attributes, self)
        if not self._calls_left:
            return attributes
        self._calls_left -= 1
        return _ScopedAttributes(attributes, self)

    def may_read(self, key: DataKey[Any]) -> bool:
        """Whether the plugin has said so; else this is noted."""
        if key.producer == self.name or str(key) in self._reads | self._writes:
            return True
        return self._violated("read", str(key))

    def may_read_type(self, data_type: str) -> bool:
        """Whether the plugin has said that it reads findings of this type."""
        return data_type in self._readable_types or self._violated("read", f"{data_type}/*")

    def may_write(self, key: DataKey[Any]) -> bool:
        """Whether the plugin has said so; else this is noted."""
        if key.producer == self.name or str(key) in self._writes:
            return True
        return self._violated("write", str(key))

    def _violated(self, access: str, key: str) -> bool:
        self._violations.labels(*self._labels, access).inc()
        if (access, key) not in self._told:
            self._told.add((access, key))
            log.warning(
                "plugin '%s' has no %s of %s declared%s",
                self.name,
                access,
                key,
                "; it is dropped" if self.is_strict else "",
            )
        return not self.is_strict


def _readable(plugin: object) -> Iterable[DataKey[Any]]:
    if isinstance(plugin, ConsumesData):
        yield from plugin.consumes
    if isinstance(plugin, MayConsumeData):
        yield from plugin.may_consume


class _ScopedAttributes(Attributes):
    """The findings of a decision as one plugin may touch them."""

    __slots__ = ("_inner", "_scope")

    def __init__(self, inner: Attributes, scope: Scope) -> None:
        self._inner = inner
        self._scope = scope

    def put(self, key: DataKey[T], value: T) -> None:
        if self._scope.may_write(key):
            self._inner.put(key, value)

    def get(self, key: DataKey[T]) -> T | None:
        return self._inner.get(key) if self._scope.may_read(key) else None

    def items(self) -> ItemsView[DataKey[Any], Any]:
        return {key: one for key, one in self._inner.items() if self._scope.may_read(key)}.items()

    def of_type(self, data_type: str) -> tuple[Any, ...]:
        return self._inner.of_type(data_type) if self._scope.may_read_type(data_type) else ()
