"""file-discovery: endpoints from a file. Settings only; the work is `pool.endpoints_file`.

`path` is required; `watchFile` (false) follows changes of the file.
"""

from __future__ import annotations

from typing import ClassVar

from picker.framework.registry import Parameters, PluginType, itself


class FileDiscoverySettings(Parameters, frozen=True):
    """`parameters` of a file-discovery, and the plugin itself."""

    routes_to_names: ClassVar[bool] = False  # the proxy wants addresses

    path: str
    watch_file: bool = False


PLUGIN = PluginType("file-discovery", FileDiscoverySettings, itself)
