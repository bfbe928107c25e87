"""Discoveries: where the endpoints are listed. Settings only; `pool.endpoints_file` reads the file.

file-discovery: endpoints from a file. `path` is required; `watchFile` (false) follows changes of
the file.
"""

from typing import ClassVar

from picker.framework.registry import Parameters, PluginType


class FileDiscoverySettings(Parameters, frozen=True):
    routes_to_names: ClassVar[bool] = False  # a proxy needs addresses

    path: str
    watch_file: bool = False


PLUGINS = (PluginType("file-discovery", FileDiscoverySettings),)
