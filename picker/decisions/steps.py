"""Plugins at their extension points, and the record of each call.

No plugin measures anything itself: `PluginSteps.call` is the one place that times a call, and it
appends a `PluginStep` to the decision. Metrics and spans are made from the steps afterwards.

The order of plugins follows from the attributes that they declare to read and write; a plugin that
accesses others works only by luck. So each plugin is watched for its first calls after a
configuration is loaded, which costs nothing afterwards: every undeclared access is counted, and
logged once. A strict scope is never lifted, and also blocks undeclared access. Attributes that a
plugin produces itself need no declaration.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

import msgspec

from base.series import Counter, Histogram
from picker.framework.attributes import Attributes, DataKey
from picker.framework.interfaces import ConsumesData, MayConsumeData, ProducesData

if TYPE_CHECKING:
    from _collections_abc import dict_items

log = logging.getLogger(__name__)
T = TypeVar("T")
P = TypeVar("P", covariant=True)

WATCHED_CALLS = 1000
SCHEDULER = "Scheduler"  # the pseudo extension point of a whole attempt to schedule
# Counts the effects of a plugin on a decision, when its step is counted; returns values to observe
# with the step's duration, if any. Its first argument is a `Decision`, which consists of steps.
Observed: TypeAlias = Sequence[tuple[Histogram | None, float]]
Meter: TypeAlias = "Callable[[Any, PluginStep], Observed | None]"


class BoundPlugin(Generic[P]):
    """A plugin at one extension point.

    `name` and `type_name` are those of the configuration; `profile` and `weight` are set for parts
    of a profile. `durations` observes the seconds of each call (None: not measured). `scope` is
    None once the plugin is trusted.
    """

    __slots__ = (
        "durations",
        "label", "meter", "name", "plugin", "point", "profile", "scope", "type_name", "weight",
    )  # fmt: skip

    def __init__(
        self,
        plugin: P,
        point: str = "",
        name: str = "",
        type_name: str = "",
        *,
        profile: str = "",
        weight: float = 1.0,
        durations: Histogram | None = None,
    ) -> None:
        self.plugin = plugin
        self.point = point
        self.name = name or getattr(plugin, "name", None) or type(plugin).__name__
        self.type_name = type_name
        self.profile = profile
        self.weight = weight
        self.label = (self.name, weight)  # made once: decisions refer to it
        self.durations = durations
        self.scope: Scope | None = None
        self.meter: Meter | None = None

    def scoped(self, attributes: Attributes) -> Attributes:
        """Wrap `attributes` for one call of the plugin, as long as the plugin has a scope."""
        scope = self.scope
        if scope is None:
            return attributes
        if scope.calls_left is not None:
            scope.calls_left -= 1
            if not scope.calls_left:
                self.scope = None
        return _ScopedAttributes(attributes, scope)

    def measured(self, clock: Callable[[], float], method: Callable[..., T], *args: Any) -> T:
        """Call `method` of the plugin and observe its duration at once; record no step."""
        began = clock()
        try:
            return method(*args)
        finally:
            if self.durations is not None:
                self.durations.observe(clock() - began)


class PluginStep(msgspec.Struct, frozen=True, gc=False):
    """One call of a plugin, which ended at the time `at` on the clock of the requests.

    `said` is the exception or the returned value: the remaining candidates from a filter, those
    before and after it from a screener, the scores from a scorer, the picks from a picker, the
    names of profiles from a profile handler, the result from an attempt to schedule.
    """

    bound: BoundPlugin[Any]
    at: float
    seconds: float
    said: Any = None


class PluginSteps(list[PluginStep]):
    """The calls of plugins for one request, in order.

    Times are read from `clock`; without one they are 0.0, which is what `float()` returns.
    """

    __slots__ = ("_clock",)

    def __init__(self, clock: Callable[[], float] = float) -> None:
        self._clock = clock

    def call(self, bound: BoundPlugin[Any], method: Callable[..., T], *args: Any) -> T:
        """Call `method` on behalf of the plugin, and append the step, even when it raises."""
        said: T | Exception | None = None
        began = self._clock()
        try:
            said = method(*args)
            return said
        except Exception as error:
            said = error
            raise
        finally:
            now = self._clock()
            self.append(PluginStep(bound, now, now - began, said))

    async def wait(
        self, bound: BoundPlugin[Any], method: Callable[..., Awaitable[T]], *args: Any
    ) -> T:
        """Do the same as `call` for a method that is a coroutine function."""
        said: T | Exception | None = None
        began = self._clock()
        try:
            said = await method(*args)
            return said
        except Exception as error:
            said = error
            raise
        finally:
            now = self._clock()
            self.append(PluginStep(bound, now, now - began, said))


class Scope:
    """The attributes that one plugin may access at one extension point."""

    def __init__(
        self, name: str, plugins: Iterable[object], violations: Counter, labels: tuple[str, ...]
    ) -> None:
        """`plugins` are the plugin called `name` and those that it calls in turn; `labels` are the
        labels of `violations` except the kind of access.
        """
        self.name = name
        self.calls_left: int | None = WATCHED_CALLS  # None: watched forever
        self._reads = {name}
        self._writes = {name}
        for plugin in plugins:
            self._reads.update(map(str, _readable(plugin)))
            if isinstance(plugin, ProducesData):
                self._writes.update(map(str, plugin.produces))
        self._readable_types = {read.partition("/")[0] for read in self._reads}
        self._violations = violations
        self._labels = labels
        self._reported: set[tuple[str, str]] = set()

    def never_lift(self) -> None:
        """Watch all calls, and block undeclared access."""
        self.calls_left = None

    def may_read(self, key: DataKey[Any]) -> bool:
        """Return whether the plugin may read `key`; count an undeclared access."""
        if key.producer == self.name or str(key) in self._reads | self._writes:
            return True
        return self._violated("read", str(key))

    def may_read_type(self, data_type: str) -> bool:
        """Return whether the plugin may read this type; count an undeclared access."""
        return data_type in self._readable_types or self._violated("read", f"{data_type}/*")

    def may_write(self, key: DataKey[Any]) -> bool:
        """Return whether the plugin may write `key`; count an undeclared access."""
        if key.producer == self.name or str(key) in self._writes:
            return True
        return self._violated("write", str(key))

    def _violated(self, access: str, key: str) -> bool:
        is_strict = self.calls_left is None
        self._violations.labels(*self._labels, access).inc()
        if (access, key) not in self._reported:
            self._reported.add((access, key))
            dropped = "; it is dropped" if is_strict else ""
            text = "plugin '%s' has no %s of %s declared%s"
            log.warning(text, self.name, access, key, dropped)
        return not is_strict


def _readable(plugin: object) -> Iterable[DataKey[Any]]:
    if isinstance(plugin, ConsumesData):
        yield from plugin.consumes
    if isinstance(plugin, MayConsumeData):
        yield from plugin.may_consume


class _ScopedAttributes(Attributes):
    """The attributes of a decision that one plugin may access."""

    __slots__ = ("_inner", "_scope")

    def __init__(self, inner: Attributes, scope: Scope) -> None:
        super().__init__()
        self._inner = inner
        self._scope = scope

    def __setitem__(self, key: DataKey[T], value: T, /) -> None:
        if self._scope.may_write(key):
            self._inner[key] = value

    def get(self, key: DataKey[T], /) -> T | None:  # type: ignore[override]
        return self._inner.get(key) if self._scope.may_read(key) else None

    def items(self) -> dict_items[DataKey[Any], Any]:
        return {key: one for key, one in self._inner.items() if self._scope.may_read(key)}.items()

    def of_type(self, data_type: str) -> tuple[Any, ...]:
        return self._inner.of_type(data_type) if self._scope.may_read_type(data_type) else ()
