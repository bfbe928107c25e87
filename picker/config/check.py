"""Everything there is to say about a configuration, without starting anything."""

from __future__ import annotations

from picker.config.build import Assembly, BuildOptions, build
from picker.config.findings import Finding, InvalidConfigError
from picker.config.load import LoadedConfig, load_config
from picker.framework.registry import Registry
from picker.metrics.picker_metrics import PickerMetrics


def check_config(
    content: bytes, name: str, registry: Registry, options: BuildOptions
) -> tuple[Finding, ...]:
    """All findings, in the order of the file; errors are what would keep a picker from starting."""
    try:
        _, assembly = assemble(content, name, registry, options)
    except InvalidConfigError as error:
        return error.findings
    return assembly.warnings


def assemble(
    content: bytes, name: str, registry: Registry, options: BuildOptions
) -> tuple[LoadedConfig, Assembly]:
    """The configuration and what it builds. Raises `InvalidConfigError`."""
    loaded = load_config(content, name)
    return loaded, build(loaded, registry, PickerMetrics(), lambda: 0.0, options)
