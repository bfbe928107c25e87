"""The notation of series: a family is a class whose attributes are its series.

    class FlowSeries(Family):
        prefix = "flow_control_"
        queue_size = gauge("Requests that wait.", ("priority",))

declares `llm_d_epp_flow_control_queue_size`: a series has the name of its attribute after the
prefix of its family, unless it has a `name`. Each instance of the family has series of its own.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import ClassVar, Generic, NamedTuple, TypeVar

from base.series import AnySeries, Counter, Declaration, Gauge, Histogram, Labels, Twin

PREFIX = "llm_d_epp_"
OBJECTIVE_PREFIX = "inference_objective_"  # deprecated, as are those that follow
POOL_PREFIX = "inference_pool_"
EXTENSION_PREFIX = "inference_extension_"
SCHEDULER_PREFIX = "llm_d_inference_scheduler_"
KV_CACHE_PREFIX = "kvcache_"
OWN_PREFIX = "pointsman_"  # of series that the reference does not have

REQUEST_LABELS = ("model_name", "target_model_name", "fairness_id", "priority")
MODEL_LABELS = REQUEST_LABELS[:2]
S = TypeVar("S", bound=AnySeries)


class Deprecated(NamedTuple):
    """An older name of a series, with these `labels` of the series (None: all), some `renamed`."""

    prefix: str
    labels: Labels | None = None
    name: str = ""
    renamed: Mapping[str, str] = MappingProxyType({})


@dataclass
class Declared(Generic[S]):
    """A series declared on the class of a family. An instance has its own series under the same
    name in its `__dict__`, so that counting does not pass through this descriptor.
    """

    make: Callable[[Declaration], S]
    text: str
    labels: Labels = ()
    twin: Deprecated | None = None
    name: str = ""
    prefix: str = PREFIX
    attribute: str = field(default="", init=False)

    def __set_name__(self, family: type[object], attribute: str) -> None:
        self.attribute = attribute

    def __get__(self, family: object, kind: type[object]) -> S:
        raise AttributeError(self.attribute)

    def series(self, family_prefix: str) -> S:
        name, old = self.name or family_prefix + self.attribute, self.twin
        twins: tuple[Twin, ...] = ()
        if old is not None:
            labels = self.labels if old.labels is None else old.labels
            twins = (Twin(old.prefix + (old.name or name), labels, old.renamed),)
        return self.make(Declaration(self.prefix + name, self.text, self.labels, twins))


class Family:
    """Series that belong together; subclasses declare them. `declared` collects them, in order."""

    prefix: ClassVar[str] = ""

    def __init__(self, declared: list[AnySeries]) -> None:
        own = {
            name: one.series(self.prefix)
            for name, one in vars(type(self)).items()
            if isinstance(one, Declared)
        }
        vars(self).update(own)
        self.all: tuple[AnySeries, ...] = tuple(own.values())
        declared += self.all


def counter(
    text: str, labels: Labels = (), twin: Deprecated | None = None, name: str = ""
) -> Declared[Counter]:
    return Declared(Counter, text, labels, twin, name)


def gauge(
    text: str, labels: Labels = (), twin: Deprecated | None = None, name: str = ""
) -> Declared[Gauge]:
    return Declared(Gauge, text, labels, twin, name)


def histogram(
    text: str,
    bounds: Iterable[float],
    labels: Labels = (),
    twin: Deprecated | None = None,
    name: str = "",
) -> Declared[Histogram]:
    return Declared(partial(Histogram, bounds=bounds), text, labels, twin, name)


def own_counter(text: str, labels: Labels = (), name: str = "") -> Declared[Counter]:
    """Declare a counter that the reference does not have."""
    return Declared(Counter, text, labels, name=name, prefix=OWN_PREFIX)


def own_gauge(text: str, labels: Labels = (), name: str = "") -> Declared[Gauge]:
    """Declare a gauge that the reference does not have."""
    return Declared(Gauge, text, labels, name=name, prefix=OWN_PREFIX)


def of_requests(text: str, bounds: Iterable[float], old_name: str = "") -> Declared[Histogram]:
    """Declare a histogram with the labels of requests, and a twin with the labels of models."""
    twin = Deprecated(OBJECTIVE_PREFIX, MODEL_LABELS, old_name)
    return histogram(text, bounds, REQUEST_LABELS, twin)
