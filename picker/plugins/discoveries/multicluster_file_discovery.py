"""multicluster-file-discovery: the pools of other clusters from a file. Settings only.

Parameters and file are those of file-discovery; an endpoint stands for a whole pool, and its
`address`, that of the pool's gateway, may be a DNS name as well, which stays one: the gateway in
front has to be one that can route to names. The labels `metricsAddress` and `metricsPort` say where
the picker of that pool tells its metrics.
"""

from __future__ import annotations

from typing import ClassVar

from picker.framework.registry import PluginType, Stability, itself
from picker.plugins.discoveries.file_discovery import FileDiscoverySettings


class MulticlusterFileDiscoverySettings(FileDiscoverySettings, frozen=True):
    """`parameters` of a multicluster-file-discovery, and the plugin itself."""

    routes_to_names: ClassVar[bool] = True


PLUGIN = PluginType(
    "multicluster-file-discovery",
    MulticlusterFileDiscoverySettings,
    itself,
    stability=Stability.ALPHA,
)
