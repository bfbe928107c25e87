"""The plugin types of this program, found in the tree: one row for each type.

A module of `picker.plugins` defines `PLUGIN`, the one type that is named like the file, or
`PLUGINS`, the types of one subject; a module of the shelf `picker.contrib` defines `PLUGINS`. The
shelf is never imported by name, so it can be deleted.
"""

import importlib
import importlib.util
import pkgutil
from collections.abc import Iterator
from types import ModuleType

from picker.errors import ConfigError
from picker.framework.registry import PluginType, Registry

PACKAGES = ("picker.plugins", "picker.contrib")


def builtin_plugins() -> Registry:
    return Registry(row for package in PACKAGES for _, rows in modules_of(package) for row in rows)


def modules_of(package: str) -> Iterator[tuple[ModuleType, tuple[PluginType, ...]]]:
    """Yield the plugin modules of a package, each with its types; none if there is no package."""
    spec = importlib.util.find_spec(package)
    if spec is None:
        return
    for info in pkgutil.walk_packages(spec.submodule_search_locations, f"{package}."):
        # Modules named `_…` are helpers without a type.
        if not info.ispkg and "._" not in info.name:
            module = importlib.import_module(info.name)
            yield module, _rows(module)


def _rows(module: ModuleType) -> tuple[PluginType, ...]:
    rows = getattr(module, "PLUGINS", ())
    if rows:
        return tuple(rows)
    row = getattr(module, "PLUGIN", None)
    expected = module.__name__.rpartition(".")[2].replace("_", "-")
    if not isinstance(row, PluginType) or row.name != expected:
        raise ConfigError(
            f"{module.__name__} must define PLUGIN, the plugin type '{expected}', or PLUGINS"
        )
    return (row,)
