"""The plugin types of this program, found in the tree: one file, one type, one `PLUGIN`.

A module or package whose name begins with `_` is a helper and defines none.
"""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType
from typing import Any

from picker import plugins
from picker.errors import ConfigError
from picker.framework.registry import PluginType, Registry


def builtin_plugins() -> Registry:
    """All plugin types under `picker.plugins`.

    Raises `ConfigError` for a file whose `PLUGIN` is not called like the file.
    """
    return Registry(
        _row(importlib.import_module(info.name))
        for info in pkgutil.walk_packages(plugins.__path__, f"{plugins.__name__}.")
        if not info.ispkg and "._" not in info.name
    )


def _row(module: ModuleType) -> PluginType[Any]:
    row = getattr(module, "PLUGIN", None)
    expected = module.__name__.rpartition(".")[2].replace("_", "-")
    if not isinstance(row, PluginType) or row.name != expected:
        raise ConfigError(f"{module.__name__} must define PLUGIN, the plugin type '{expected}'")
    return row
