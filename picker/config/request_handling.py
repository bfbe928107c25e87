"""How requests are understood and refused: parsers and the saturation detector."""

from __future__ import annotations

from collections.abc import Iterable

from picker.config.findings import Findings
from picker.config.instances import Instance, PluginInstances
from picker.config.profiles import ProfilePlan
from picker.config.schema import EndpointPickerConfig
from picker.config.source import Path
from picker.framework.interfaces import Parser, SaturationDetector
from picker.framework.registry import Registry

DEFAULT_PARSERS = (
    "openai-parser",
    "anthropic-parser",
    "vllmhttp-parser",
    "sglanghttp-parser",
    "passthrough-parser",
)
DEFAULT_DETECTOR = "utilization-detector"


def plan_parsers(
    config: EndpointPickerConfig,
    plugins: PluginInstances,
    registry: Registry,
    findings: Findings,
) -> tuple[Parser, ...]:
    """The configured parsers, else the default ones. An unlisted type makes its plugin."""
    section = config.request_handler
    refs: list[tuple[Path, str]] = [
        (("requestHandler", "parsers", index, "pluginRef"), ref.plugin_ref)
        for index, ref in enumerate(section.parsers if section else ())
    ]
    if config.parser is not None:
        text = "'parser' is deprecated, use requestHandler.parsers"
        findings.warn(("parser",), text + ("; those apply" if refs else ""))
        refs = refs or [(("parser", "pluginRef"), config.parser.plugin_ref)]
    if not refs:
        instances = [plugins.default(name) for name in DEFAULT_PARSERS if name in registry]
        return tuple(
            one.plugin for one in instances if one is not None and isinstance(one.plugin, Parser)
        )
    found = [(path, plugins.referenced_or_type(name, path)) for path, name in refs]
    return tuple(_effective([(path, one) for path, one in found if one is not None], findings))


def _effective(refs: list[tuple[Path, Instance]], findings: Findings) -> list[Parser]:
    """Those that can ever be asked: one of each type, none after one that takes every path."""
    parsers: list[Parser] = []
    types: set[str] = set()
    fallback: str | None = None
    for path, instance in refs:
        parser = instance.plugin
        if not isinstance(parser, Parser):
            findings.error(path, f"'{instance.name}' is not a parser")
        elif instance.type_name in types:
            findings.warn(path, f"a second {instance.type_name} has no effect")
        elif fallback is not None:
            text = f"has no effect after '{fallback}', which takes every path that is left"
            findings.warn(path, text)
        else:
            types.add(instance.type_name)
            parsers.append(parser)
            fallback = None if parser.claims else instance.name
    return parsers


def plan_detector(
    config: EndpointPickerConfig,
    plugins: PluginInstances,
    registry: Registry,
    findings: Findings,
) -> Instance | None:
    """What says how full the pool is, whether or not flow control is on."""
    section = config.flow_control
    ref = section.saturation_detector if section else None
    path: Path = ("flowControl",)
    if config.saturation_detector is not None:
        text = "'saturationDetector' is deprecated, use flowControl.saturationDetector"
        findings.warn(("saturationDetector",), text + ("; that applies" if ref else ""))
        if ref is None:
            ref, path = config.saturation_detector, ()
    if ref is None:
        return plugins.default(DEFAULT_DETECTOR) if DEFAULT_DETECTOR in registry else None
    at: Path = (*path, "saturationDetector", "pluginRef")
    instance = plugins.referenced_or_type(ref.plugin_ref, at)
    if instance is not None and not isinstance(instance.plugin, SaturationDetector):
        findings.error(at, f"'{instance.name}' is not a saturation detector")
        return None
    return instance


def warn_of_filtering_detector(
    plans: Iterable[ProfilePlan], detector: Instance | None, findings: Findings
) -> None:
    """A detector among the plugins is a filter of the profile that is made by default, and a filter
    may refuse what flow control would let wait, or let go.
    """
    for plan in plans:
        filters = [] if plan.path else [part.instance for part in plan.filters]
        if detector is not None and detector in filters:
            text = f"'{detector.name}' is also a filter, for want of schedulingProfiles"
            findings.warn(detector.path, text)
