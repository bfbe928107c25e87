"""The section `flowControl` → settings with their policies, and the saturation detector.

Defaults are those of the reference: a limit of a band that is 0 or missing is 1e9 bytes or 5000
requests; there is no limit for all bands together, and a time of 0 never ends. `maxMemory`, an
addition to the reference, is 1Gi if missing, and unlimited if 0.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from picker.config.decode import duration_seconds, quantity_bytes
from picker.config.findings import Findings, Path
from picker.config.instances import Instance, Origin, PluginInstances
from picker.config.profiles import ProfilePlan
from picker.config.schema import (
    FLOW_CONTROL_GATE,
    EndpointPickerConfig,
    FlowControl,
    PluginSpec,
    PriorityBandTemplate,
    gate_settings,
)
from picker.errors import ConfigError
from picker.flowcontrol.settings import (
    DEFAULT_BAND_BYTES,
    DEFAULT_BAND_REQUESTS,
    DEFAULT_MEMORY_BYTES,
    DEFAULT_TTL_SECONDS,
    BandSettings,
    FlowControlSettings,
)
from picker.framework.flow import (
    EvictionFilter,
    EvictionOrder,
    FairnessPolicy,
    OrderingPolicy,
    UsageLimitPolicy,
)
from picker.framework.interfaces import SaturationDetector

DEFAULT_DETECTOR = "utilization-detector"
DEFAULT_FAIRNESS = "global-strict-fairness-policy"
DEFAULT_ORDERING = "fcfs-ordering-policy"
DEFAULT_USAGE_LIMITS = "static-usage-limit-policy"
DEFAULT_EVICTION_FILTER = "sheddable-eviction-filter"
DEFAULT_EVICTION_ORDER = "priority-then-time-eviction-order-policy"

_SECTION: Path = ("flowControl",)
_ENABLE_EVICTION: Path = (*_SECTION, "enableEviction")
T = TypeVar("T")


def plan_flow_control(
    config: EndpointPickerConfig, plugins: PluginInstances, detector: Instance | None
) -> FlowControlSettings | None:
    """Plan flow control; return None if its gate is off, or after errors."""
    # Without the gate the section is not checked either: `schema` warns that it has no effect.
    if not gate_settings(config)[FLOW_CONTROL_GATE]:
        return None
    section = config.flow_control or FlowControl()
    at: Path = (*_SECTION, "defaultRequestTTL")
    ttl = _seconds(section.default_request_ttl, at, plugins.findings, DEFAULT_TTL_SECONDS)
    return _Planner(section, plugins, plugins.findings, ttl).settings(detector)


@dataclass(frozen=True, slots=True)
class _Planner:
    section: FlowControl
    plugins: PluginInstances
    findings: Findings
    request_ttl: float

    def settings(self, detector: Instance | None) -> FlowControlSettings | None:
        section, at = self.section, _SECTION
        default = self._band(section.default_priority_band, (*at, "defaultPriorityBand"))
        negative = default
        if section.default_negative_priority_band is not None:
            where = (*at, "defaultNegativePriorityBand")
            negative = self._band(section.default_negative_priority_band, where)
        bands = self._bands()
        limits_ref = section.usage_limit_policy_plugin_ref or DEFAULT_USAGE_LIMITS
        limits_at = (*at, "usageLimitPolicyPluginRef")
        limits = self._policy(limits_ref, limits_at, _USAGE_LIMITS)
        max_bytes = self._quantity(section.max_bytes, (*at, "maxBytes"))
        max_requests = self._quantity(section.max_requests, (*at, "maxRequests"))
        max_memory = DEFAULT_MEMORY_BYTES
        if section.max_memory is not None:
            max_memory = self._quantity(section.max_memory, (*at, "maxMemory"))
        no_endpoint_ttl = self._ttl(section.no_endpoint_request_ttl, (*at, "noEndpointRequestTTL"))
        eviction = None
        if section.enable_eviction:
            chosen, order = self._only(_EVICTION_FILTER), self._only(_EVICTION_ORDER)
            eviction = None if chosen is None or order is None else (chosen, order)
        if default is None or negative is None or limits is None or detector is None:
            return None
        if not isinstance(detector.plugin, SaturationDetector):
            return None
        return FlowControlSettings(
            default_band=default,
            default_negative_band=negative,
            usage_limits=limits,
            detector=detector.plugin,
            detector_name=detector.name,
            bands=MappingProxyType(bands),
            max_bytes=max_bytes or None,
            max_requests=max_requests or None,
            max_memory_bytes=max_memory or None,
            no_endpoint_ttl_seconds=no_endpoint_ttl or None,
            eviction=eviction,
        )

    # Bands

    def _bands(self) -> dict[int, BandSettings]:
        bands: dict[int, BandSettings] = {}
        seen: set[int] = set()
        for index, band in enumerate(self.section.priority_bands):
            at: Path = (*_SECTION, "priorityBands", index)
            settings = self._band(band, at)
            priority: object = band.priority
            if not isinstance(priority, int):  # reported by the decoder
                continue
            if band.priority in seen:
                text = f"the priority {band.priority} has a band already; merge the two"
                self.findings.error((*at, "priority"), text)
            seen.add(band.priority)
            if settings is not None:
                bands[band.priority] = settings
        return bands

    def _band(self, band: PriorityBandTemplate | None, at: Path) -> BandSettings | None:
        band = band or PriorityBandTemplate()
        fairness_ref = band.fairness_policy_ref or DEFAULT_FAIRNESS
        ordering_ref = band.ordering_policy_ref or DEFAULT_ORDERING
        fairness = self._policy(fairness_ref, (*at, "fairnessPolicyRef"), _FAIRNESS)
        ordering = self._policy(ordering_ref, (*at, "orderingPolicyRef"), _ORDERING)
        max_bytes = self._quantity(band.max_bytes, (*at, "maxBytes"))
        max_requests = self._quantity(band.max_requests, (*at, "maxRequests"))
        request_ttl = self._ttl(band.default_request_ttl, (*at, "defaultRequestTTL"))
        if fairness is None or ordering is None:
            return None
        return BandSettings(
            fairness=fairness,
            ordering=ordering,
            max_bytes=max_bytes or DEFAULT_BAND_BYTES,
            max_requests=max_requests or DEFAULT_BAND_REQUESTS,
            request_ttl_seconds=request_ttl or None,
        )

    # Values

    def _ttl(self, text: str | None, at: Path) -> float:
        return _seconds(text, at, self.findings, self.request_ttl)

    def _quantity(self, value: int | str | None, at: Path) -> int:
        text = "0" if value is None else str(value)
        if text.startswith("-"):
            self.findings.error(at, f"must not be negative, got {value}; 0 is the default")
            return 0
        try:
            return quantity_bytes(text)
        except ConfigError:
            text = f"'{value}' is no quantity; write for example 500, 5k or 4Gi"
            self.findings.error(at, text)
            return 0

    # Policies

    def _policy(self, ref: str, at: Path, kind: _Kind[T]) -> T | None:
        types = [name for name in self.plugins.registry.names if name.endswith(kind.endings)]
        # A default is created and not looked up, so it cannot be missing.
        if ref == kind.default:
            instance = self.plugins.default(ref)
        else:
            instance = self.plugins.referenced_or_type(ref, at, types)
        if instance is None:
            return None
        policy = kind.of(instance.plugin)
        if policy is None:
            fitting = {one.name for one in self.plugins if kind.of(one.plugin) is not None}
            text = f"'{ref}' is not {kind.name}"
            self.findings.unknown(at, text, ref, fitting.union(types))
        return policy

    def _only(self, kind: _Kind[T]) -> T | None:
        found = [one for one in self.plugins if kind.of(one.plugin) is not None]
        # The reference names no eviction plugins: it uses those that are configured.
        for other in found[1:]:
            self.plugins.use(other)  # this warning replaces that of an unused plugin
            text = f"has no effect: '{found[0].name}' is {kind.name} already"
            self.findings.warn(other.path, text)
        if not found:
            self.plugins.add(PluginSpec(kind.default), _ENABLE_EVICTION, Origin.DEFAULT)
            found = [one for one in self.plugins if one.name == kind.default]
        if not found:
            return None
        self.plugins.use(found[0])
        return kind.of(found[0].plugin)


@dataclass(frozen=True, slots=True)
class _Kind(Generic[T]):
    """A kind of policy: its name for messages, its default type, and a test for it. `endings` are
    the suffixes of the names of its types, for references that may create one.
    """

    name: str
    default: str
    protocol: Any  # mypy takes no protocol for a `type[T]`
    endings: tuple[str, ...] = ()
    rank_parameters: int | None = None  # both orders have `rank`; that of eviction takes two values

    def of(self, plugin: object) -> T | None:
        found: Any = plugin if isinstance(plugin, self.protocol) else None
        wanted = self.rank_parameters
        if None not in (found, wanted) and len(inspect.signature(found.rank).parameters) != wanted:
            return None
        policy: T | None = found
        return policy


def _seconds(text: str | None, at: Path, findings: Findings, default: float) -> float:
    """Return a duration in seconds; 0 if it never ends, or if it is invalid, which is reported."""
    if text is None:
        return default
    try:
        return duration_seconds(text)
    except ConfigError as error:
        negative = "must not be negative; 0s never ends"
        findings.error(at, negative if text.startswith("-") else str(error))
        return 0.0


_SHARES = ("-fairness", "-fairness-policy")
_CEILINGS = ("-limit-policy", "-holdback-policy", "-ceiling-policy")
_FAIRNESS: _Kind[FairnessPolicy] = _Kind(
    "a fairness policy", DEFAULT_FAIRNESS, FairnessPolicy, _SHARES
)
_ORDERING: _Kind[OrderingPolicy] = _Kind(
    "an ordering policy", DEFAULT_ORDERING, OrderingPolicy, ("-ordering-policy",), 1
)
_USAGE_LIMITS: _Kind[UsageLimitPolicy] = _Kind(
    "a usage-limit policy", DEFAULT_USAGE_LIMITS, UsageLimitPolicy, _CEILINGS
)
_EVICTION_FILTER: _Kind[EvictionFilter] = _Kind(
    "an eviction filter", DEFAULT_EVICTION_FILTER, EvictionFilter
)
_EVICTION_ORDER: _Kind[EvictionOrder] = _Kind(
    "an eviction order", DEFAULT_EVICTION_ORDER, EvictionOrder, (), 2
)


def plan_detector(config: EndpointPickerConfig, plugins: PluginInstances) -> Instance | None:
    """Return the saturation detector, which is also used without flow control."""
    findings = plugins.findings
    section = config.flow_control
    ref = section.saturation_detector if section else None
    path: Path = ("flowControl",)
    if config.saturation_detector is not None:
        text = "'saturationDetector' is deprecated, use flowControl.saturationDetector"
        findings.warn(("saturationDetector",), text + ("; that applies" if ref else ""))
        if ref is None:
            ref, path = config.saturation_detector, ()
    if ref is None:
        return plugins.default(DEFAULT_DETECTOR) if DEFAULT_DETECTOR in plugins.registry else None
    at: Path = (*path, "saturationDetector", "pluginRef")
    instance = plugins.referenced_or_type(ref.plugin_ref, at)
    if instance is not None and not isinstance(instance.plugin, SaturationDetector):
        findings.error(at, f"'{instance.name}' is not a saturation detector")
        return None
    return instance


def warn_of_filtering_detector(
    plans: Iterable[ProfilePlan], detector: Instance | None, findings: Findings
) -> None:
    """Warn of a detector that the default profile includes as a filter: a filter may refuse a
    request that flow control would queue or dispatch.
    """
    for plan in plans:
        filters = [] if plan.path else [part.instance for part in plan.filters]
        if detector is not None and detector in filters:
            text = f"'{detector.name}' is also a filter, for want of schedulingProfiles"
            findings.warn(detector.path, text)
