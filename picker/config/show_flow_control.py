"""The part of `config show` that is about flow control: its settings, with nothing left out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from picker.config.build import Assembly
from picker.config.load import LoadedConfig
from picker.config.schema import FlowControl, PriorityBandTemplate
from picker.config.source import Path
from picker.config.units import duration_seconds
from picker.flowcontrol.settings import (
    DEFAULT_TTL_SECONDS,
    BandSettings,
    FlowControlSettings,
)

# (where it is shown, what it is, where it may be written).
Put: TypeAlias = Callable[[Path, str | int | bool, Path], None]
_SECTION: Path = ("flowControl",)
_TTL = "defaultRequestTTL"
_DETECTOR: Path = ("saturationDetector", "pluginRef")


def put_flow_control(put: Put, loaded: LoadedConfig, assembly: Assembly) -> None:
    """The saturation detector, and while flow control is on everything else of it too."""
    section = loaded.config.flow_control or FlowControl()
    if assembly.flow_control is not None:
        names = {id(one.plugin): one.name for one in assembly.instances.values()}
        _put_settings(put, section, assembly.flow_control, names)
    if assembly.detector is not None:
        source = _DETECTOR if section.saturation_detector is None else (*_SECTION, *_DETECTOR)
        put((*_SECTION, *_DETECTOR), assembly.detector.name, source)


def _put_settings(
    put: Put, section: FlowControl, settings: FlowControlSettings, names: Mapping[int, str]
) -> None:
    def one(key: str, value: str | int | bool, written: str | None = None) -> None:
        put((*_SECTION, key), value, (*_SECTION, written or key))

    one("maxBytes", settings.max_bytes or 0)
    one("maxRequests", settings.max_requests or 0)
    one("maxMemory", settings.max_memory_bytes or 0)
    written = section.default_request_ttl
    ttl_seconds = DEFAULT_TTL_SECONDS if written is None else duration_seconds(written) or None
    one(_TTL, _duration(ttl_seconds))
    is_said = section.no_endpoint_request_ttl is not None
    source = "noEndpointRequestTTL" if is_said else _TTL
    one("noEndpointRequestTTL", _duration(settings.no_endpoint_ttl_seconds), source)
    default, negative = (
        (*_SECTION, "defaultPriorityBand"),
        (*_SECTION, "defaultNegativePriorityBand"),
    )
    _Band(section.default_priority_band, default).put(put, default, settings.default_band, names)
    chosen = section.default_negative_priority_band
    written_band = _Band(chosen, negative)
    if chosen is None:
        written_band = _Band(section.default_priority_band, default)
    written_band.put(put, negative, settings.default_negative_band, names)
    for index, (priority, band) in enumerate(settings.bands.items()):
        at = (*_SECTION, "priorityBands", index)
        put((*at, "priority"), priority, (*at, "priority"))
        _Band(section.priority_bands[index], at).put(put, at, band, names)
    one("usageLimitPolicyPluginRef", names[id(settings.usage_limits)])
    one("enableEviction", settings.eviction is not None)


@dataclass(frozen=True, slots=True)
class _Band:
    """A band as it is written, and where."""

    spec: PriorityBandTemplate | None
    path: Path

    def put(self, put: Put, at: Path, band: BandSettings, names: Mapping[int, str]) -> None:
        """What is in force; a time to live that it does not name is that of all bands."""
        own_ttl = self.spec is not None and self.spec.default_request_ttl is not None
        for key, value, where in (
            ("maxBytes", band.max_bytes, self.path),
            ("maxRequests", band.max_requests, self.path),
            (_TTL, _duration(band.request_ttl_seconds), self.path if own_ttl else _SECTION),
            ("fairnessPolicyRef", names[id(band.fairness)], self.path),
            ("orderingPolicyRef", names[id(band.ordering)], self.path),
        ):
            put((*at, key), value, (*where, key))


def _duration(seconds: float | None) -> str:
    """As Go writes it, in seconds: `60s`, `0.5s`; 0s never ends."""
    return "0s" if seconds is None else f"{seconds:.9f}".rstrip("0").rstrip(".") + "s"
