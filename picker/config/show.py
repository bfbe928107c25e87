"""The effective configuration with all defaults, and the origin of each line.

The output is itself a configuration with the same meaning; only parameters without effect are
missing.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

import msgspec
import yaml

from picker.config import schema
from picker.config.build import Assembly
from picker.config.data_layer import written_discovery
from picker.config.decode import duration_seconds
from picker.config.findings import Path, Source
from picker.config.instances import Instance
from picker.config.load import LoadedConfig
from picker.config.profiles import ProfilePart, ProfilePlan
from picker.config.schema import FlowControl, PriorityBandTemplate, gate_settings
from picker.flowcontrol.settings import DEFAULT_TTL_SECONDS, BandSettings, FlowControlSettings
from picker.framework.registry import Parameters

DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class ConfigLine:
    """A line of YAML. `origin` is `file:line`, "default" or "auto-created"; None: no value."""

    text: str
    origin: str | None


def effective_lines(loaded: LoadedConfig, assembly: Assembly) -> list[ConfigLine]:
    shown = _Shown(loaded.source)
    version = loaded.config.api_version
    if version not in schema.API_VERSIONS:
        version = schema.API_VERSION
    shown.put(("apiVersion",), version, ("apiVersion",))
    shown.put(("kind",), schema.KIND, ("kind",))
    _put_gates(shown, loaded)
    for index, instance in enumerate(assembly.instances.values()):
        _put_plugin(shown, ("plugins", index), instance)
    for index, plan in enumerate(assembly.plans):
        _put_profile(shown, ("schedulingProfiles", index), plan)
    _put_data_layer(shown, loaded, assembly)
    names = {id(one.plugin): one.name for one in assembly.instances.values()}
    for index, parser in enumerate(assembly.pipeline.parsers.parsers):
        refs = loaded.config.request_handler
        parsers = refs.parsers if refs else ()
        name = names[id(parser)]
        written = [i for i, ref in enumerate(parsers) if ref.plugin_ref == name]
        source: Path = ("requestHandler", "parsers", written[0], "pluginRef") if written else ()
        if not parsers and loaded.config.parser is not None:
            source = ("parser", "pluginRef")
        shown.put(("requestHandler", "parsers", index, "pluginRef"), name, source)
    if assembly.pipeline.propagates_priority:
        propagation = ("requestHandler", "propagatePriority")
        shown.put(propagation, True, propagation)
    section = loaded.config.flow_control or FlowControl()
    if assembly.flow_control is not None:
        _put_flow_control(shown, section, assembly.flow_control, names)
    if assembly.detector is not None:
        source = _DETECTOR if section.saturation_detector is None else (*_SECTION, *_DETECTOR)
        shown.put((*_SECTION, *_DETECTOR), assembly.detector.name, source)
    return list(shown.lines())


def aligned(lines: list[ConfigLine], *, with_origin: bool) -> str:
    """Join the lines; with origins, these are comments in a column."""
    if not with_origin:
        return "".join(f"{line.text}\n" for line in lines)
    width = min(72, max((len(line.text) for line in lines if line.origin), default=0))
    return "".join(
        f"{line.text:<{width}}  # {line.origin}\n" if line.origin else f"{line.text}\n"
        for line in lines
    )


@dataclass(frozen=True, slots=True)
class _Leaf:
    value: Any
    origin: str


class _Shown:
    """Owns the document; its paths may differ from those in the source."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._document: dict[str | int, Any] = {}  # lists are mappings of their indexes

    def put(self, path: Path, value: Any, written: Path, otherwise: str = DEFAULT) -> None:
        """Put `value` at `path`; `written` is its path in the source, () if it is not there."""
        if isinstance(value, dict) and value:
            for key, one in value.items():
                self.put((*path, key), one, (*written, key) if written else (), otherwise)
        elif isinstance(value, list) and value:
            for index, one in enumerate(value):
                self.put((*path, index), one, (*written, index) if written else (), otherwise)
        else:
            line = self._source.line_of(written) if written else None
            origin = otherwise if line is None else f"{self._source.name}:{line}"
            node = self._document
            for step in path[:-1]:
                node = node.setdefault(step, {})
            node[path[-1]] = _Leaf(value, origin)

    def lines(self) -> Iterator[ConfigLine]:
        return _lines(self._document, 0)


def _lines(node: dict[str | int, Any], indent: int) -> Iterator[ConfigLine]:
    pad = " " * indent
    for step, part in node.items():
        if isinstance(step, int):
            yield from _element(part, indent)
        elif isinstance(part, _Leaf):
            yield ConfigLine(f"{pad}{_scalar(step)}: {_scalar(part.value)}", part.origin)
        else:
            yield ConfigLine(f"{pad}{_scalar(step)}:", None)
            is_list = isinstance(next(iter(part)), int)
            yield from _lines(part, indent if is_list else indent + 2)


def _element(part: Any, indent: int) -> Iterator[ConfigLine]:
    pad = " " * indent
    if isinstance(part, _Leaf):
        yield ConfigLine(f"{pad}- {_scalar(part.value)}", part.origin)
        return
    first, *others = _lines(part, indent + 2)
    yield ConfigLine(f"{pad}- {first.text[indent + 2 :]}", first.origin)
    yield from others


def _scalar(value: Any) -> str:
    # In a list, since a single scalar would end with a document marker.
    text = yaml.safe_dump([value], default_flow_style=True, width=10**6, allow_unicode=True)
    return text[1:-2]


def _put_gates(shown: _Shown, loaded: LoadedConfig) -> None:
    written = [entry.partition("=")[0] for entry in loaded.config.feature_gates]
    last = {name: index for index, name in enumerate(written)}
    for index, (name, is_on) in enumerate(gate_settings(loaded.config).items()):
        at: Path = ("featureGates", last[name]) if name in last else ()
        shown.put(("featureGates", index), f"{name}={str(is_on).lower()}", at)


def _put_plugin(shown: _Shown, path: Path, instance: Instance) -> None:
    origin, at = instance.origin.value, instance.path
    shown.put((*path, "type"), instance.type_name, (*at, "type") if at else (), origin)
    named = origin if not at else DEFAULT
    shown.put((*path, "name"), instance.name, (*at, "name") if at else (), named)
    parameters = parameters_in_force(instance.parameters)
    if parameters:
        written = (*at, "parameters") if at else ()
        shown.put((*path, "parameters"), parameters, written, named)


def parameters_in_force(parameters: Parameters) -> dict[str, Any]:
    """Return the parameters with an effect, as plain values."""
    shown: dict[str, Any] = _without_none(msgspec.to_builtins(parameters))
    for name in parameters.without_effect:
        *outer, last = name.split(".")
        reduce(dict.__getitem__, outer, shown).pop(last, None)
    return shown


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(one) for key, one in value.items() if one is not None}
    return [_without_none(one) for one in value] if isinstance(value, list | tuple) else value


def _put_profile(shown: _Shown, path: Path, plan: ProfilePlan) -> None:
    shown.put((*path, "name"), plan.name, (*plan.path, "name") if plan.path else ())
    scorers = {part.instance.name for part in plan.scorers}
    for index, part in enumerate(_parts(plan)):
        at = part.path if plan.path else ()
        target = (*path, "plugins", index)
        shown.put((*target, "pluginRef"), part.instance.name, (*at, "pluginRef") if at else ())
        if part.instance.name in scorers:
            shown.put((*target, "weight"), part.weight, (*at, "weight") if at else ())


def _parts(plan: ProfilePlan) -> list[ProfilePart]:
    pickers = (plan.picker,) if plan.picker is not None else ()
    every = (*plan.filters, *plan.scorers, *pickers)
    # A plugin may be filter and scorer at once, from one entry.
    parts = {(part.path, part.instance.name): part for part in every}
    return sorted(parts.values(), key=lambda part: (not part.path, part.path))


def _put_data_layer(shown: _Shown, loaded: LoadedConfig, assembly: Assembly) -> None:
    layer = assembly.data_layer
    section = loaded.config.data_layer
    is_written = section is not None and section.inject_defaults is False
    injects: Path = ("dataLayer", "injectDefaults")
    shown.put(injects, False, injects if is_written else ())
    for index, bound in enumerate(layer.sources):
        target: Path = ("dataLayer", "sources", index)
        at = bound.path
        shown.put((*target, "pluginRef"), bound.source.name, (*at, "pluginRef") if at else ())
        for position, extractor in enumerate(bound.extractors):
            inner: Path = ("extractors", position, "pluginRef")
            shown.put((*target, *inner), extractor.name, (*at, *inner) if at else ())
    for ref, name in written_discovery(loaded.config):
        shown.put(ref, name, ref)


_SECTION: Path = ("flowControl",)
_TTL = "defaultRequestTTL"
_DETECTOR: Path = ("saturationDetector", "pluginRef")


def _put_flow_control(
    shown: _Shown, section: FlowControl, settings: FlowControlSettings, names: Mapping[int, str]
) -> None:
    def put(key: str, value: str | int | bool, written: str | None = None) -> None:
        shown.put((*_SECTION, key), value, (*_SECTION, written or key))

    put("maxBytes", settings.max_bytes or 0)
    put("maxRequests", settings.max_requests or 0)
    put("maxMemory", settings.max_memory_bytes or 0)
    written = section.default_request_ttl
    ttl_seconds = DEFAULT_TTL_SECONDS if written is None else duration_seconds(written) or None
    put(_TTL, _duration(ttl_seconds))
    is_own = section.no_endpoint_request_ttl is not None
    source = "noEndpointRequestTTL" if is_own else _TTL
    put("noEndpointRequestTTL", _duration(settings.no_endpoint_ttl_seconds), source)

    def put_band(
        at: Path, band: BandSettings, spec: PriorityBandTemplate | None, written: Path
    ) -> None:
        own_ttl = spec is not None and spec.default_request_ttl is not None
        for key, value, where in (
            ("maxBytes", band.max_bytes, written),
            ("maxRequests", band.max_requests, written),
            (_TTL, _duration(band.request_ttl_seconds), written if own_ttl else _SECTION),
            ("fairnessPolicyRef", names[id(band.fairness)], written),
            ("orderingPolicyRef", names[id(band.ordering)], written),
        ):
            shown.put((*at, key), value, (*where, key))

    default: Path = (*_SECTION, "defaultPriorityBand")
    negative: Path = (*_SECTION, "defaultNegativePriorityBand")
    put_band(default, settings.default_band, section.default_priority_band, default)
    spec, origin = section.default_negative_priority_band, negative
    if spec is None:
        spec, origin = section.default_priority_band, default
    put_band(negative, settings.default_negative_band, spec, origin)
    for index, (priority, band) in enumerate(settings.bands.items()):
        at = (*_SECTION, "priorityBands", index)
        shown.put((*at, "priority"), priority, (*at, "priority"))
        put_band(at, band, section.priority_bands[index], at)
    put("usageLimitPolicyPluginRef", names[id(settings.usage_limits)])
    put("enableEviction", settings.eviction is not None)


def _duration(seconds: float | None) -> str:
    """Format a duration as Go does, in seconds: `60s`, `0.5s`; `0s` means that it never ends."""
    return "0s" if seconds is None else f"{seconds:.9f}".rstrip("0").rstrip(".") + "s"
