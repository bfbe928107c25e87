"""Gauges of the state of plugins, computed on demand."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

from base.series import Computed, Declaration, Labels, Rows
from picker.decisions.steps import BoundPlugin
from picker.framework.attributes import EndpointLoad, FlowLoads
from picker.framework.flow import ProgramShare, SharesByProgram
from picker.metrics.declarations import PREFIX
from picker.metrics.label_caps import OVERFLOW
from picker.metrics.picker_metrics import PickerMetrics
from picker.pool.inflight import InflightLoad
from picker.telemetry.meters import StrictSelections

MAX_ROWS = 1000  # with a label for the tenant, on a page
FLOW_LABELS = ("endpoint_name", "fairness_id", "namespace", "priority", "producer_name")
PROGRAM = ("program_id",)
Row = tuple[str, str, str, str, str]
_NOTHING = EndpointLoad()


class ConfiguredPlugin(Protocol):
    """A plugin as a configuration made it; see `config.instances.Instance`."""

    @property
    def name(self) -> str: ...

    @property
    def type_name(self) -> str: ...

    @property
    def plugin(self) -> object: ...


class PluginsInUse(Protocol):
    """The configuration in use; see `config.build.Assembly`."""

    @property
    def instances(self) -> Mapping[str, ConfiguredPlugin]: ...

    @property
    def screeners(self) -> Sequence[BoundPlugin[Any]]: ...


@runtime_checkable
class SizedIndex(Protocol):
    @property
    def index_size(self) -> int: ...


@dataclass(frozen=True, slots=True)
class PluginCollector:
    """Reports gauges of plugins. If no plugin counts the load in flight, reports `inflight`, with
    the last three labels empty; reporting both would count every request twice.
    """

    assembly: Callable[[], PluginsInUse]
    inflight: InflightLoad
    metrics: PickerMetrics

    def collect(self) -> Iterator[Computed]:
        assembly = self.assembly()
        producers = {
            name: one.plugin
            for name, one in assembly.instances.items()
            if isinstance(one.plugin, FlowLoads)
        }
        rows = self._flows(producers) if producers else self._whole()
        yield _gauge(
            "inflight_requests",
            "Requests that this picker has under way.",
            FLOW_LABELS,
            lambda: ((row, load.requests) for row, load in rows.items()),
        )
        counted = rows if producers else {}
        yield _gauge(
            "inflight_tokens",
            "Their tokens.",
            FLOW_LABELS,
            lambda: ((row, load.tokens) for row, load in counted.items()),
        )
        yield self._revisions(assembly)
        yield from self._programs(assembly)

    def _whole(self) -> dict[Row, EndpointLoad]:
        rows: dict[Row, EndpointLoad] = {}
        for key, count in self.inflight.own_counts.items():
            namespace, _, name = key.partition("/")
            rows[name, "", namespace, "", ""] = EndpointLoad(count)
        return rows

    def _flows(self, producers: Mapping[str, FlowLoads]) -> dict[Row, EndpointLoad]:
        """Sum up the load by labels; tenants beyond the limits share a label."""
        rows: dict[Row, EndpointLoad] = {}
        for producer, plugin in producers.items():
            for flow, load in plugin.flow_loads().items():
                namespace, _, name = flow.endpoint_key.partition("/")
                fairness_id = self.metrics.labels.tenant(flow.fairness_id)
                row = (name, fairness_id, namespace, str(flow.priority), producer)
                if len(rows) >= MAX_ROWS and row not in rows:
                    row = (name, OVERFLOW, namespace, str(flow.priority), producer)
                known = rows.get(row, _NOTHING)
                rows[row] = EndpointLoad(known.requests + load.requests, known.tokens + load.tokens)
        return rows

    def _revisions(self, assembly: PluginsInUse) -> Computed:
        def shares() -> Iterator[tuple[Labels, float]]:
            for screener in assembly.screeners:
                meter = screener.meter
                if isinstance(meter, StrictSelections):
                    (plugin_type, plugin_name), mode = meter.labels, meter.gate.gating_mode
                    for revision, share in meter.shares().items():
                        yield (mode, plugin_name, plugin_type, revision), share

        return _gauge(
            "disaggregatedset_revision_gating_share",
            "Chance of a revision to be drawn for the next request.",
            ("mode", "plugin_name", "plugin_type", "revision"),
            shares,
        )

    def _programs(self, assembly: PluginsInUse) -> Iterator[Computed]:
        """Report the programs of fairness policies; those beyond the limit share a label."""
        shares: dict[str, list[ProgramShare]] = {}
        for one in assembly.instances.values():
            if isinstance(one.plugin, SharesByProgram):
                for program, share in one.plugin.program_shares().items():
                    shares.setdefault(self.metrics.labels.tenant(program), []).append(share)
        attained = {
            label: sum(one.attained_tokens for one in found) for label, found in shares.items()
        }
        squares = sum(value * value for value in attained.values())
        index = sum(attained.values()) ** 2 / (len(attained) * squares) if squares else None
        yield _gauge(
            "program_aware_jains_fairness_index",
            "How equally programs were served lately: 1 is equally, 1/n is one of n alone.",
            (),
            lambda: () if index is None else (((), index),),
        )
        yield _gauge(
            "program_aware_avg_wait_time_milliseconds",
            "How long requests of a program waited on average.",
            PROGRAM,
            lambda: (
                ((label,), sum(one.average_wait_seconds for one in found) / len(found) * 1000)
                for label, found in shares.items()
            ),
        )
        yield _gauge(
            "program_aware_attained_service_tokens",
            "Tokens that a program was served lately, completion tokens twice.",
            PROGRAM,
            lambda: (((label,), value) for label, value in attained.items()),
        )


def _gauge(name: str, text: str, labels: Labels, rows: Rows) -> Computed:
    return Computed(Declaration(PREFIX + name, text, labels), rows)


def expose_sizes(
    metrics: PickerMetrics, now: Iterable[ConfiguredPlugin], before: Iterable[ConfiguredPlugin] = ()
) -> None:
    """Report the sizes of the indexes in use, and remove those of dropped ones."""
    gauge = metrics.prefix_indexer_size
    sized = {
        (one.name, one.type_name): one.plugin for one in now if isinstance(one.plugin, SizedIndex)
    }
    for labels, index in sized.items():
        gauge.labels(*labels).set_function(partial(getattr, index, "index_size"))
    for one in before:
        gone = (one.name, one.type_name)
        if isinstance(one.plugin, SizedIndex) and gone not in sized:
            gauge.remove(*gone)
