"""multicluster-session-affinity-filter: session-affinity-filter where the endpoints are clusters.

The same formula and the same parameters: a session stays with the cluster that it was sent to.
"""

from __future__ import annotations

from picker.framework.registry import PluginType, Stability, named
from picker.plugins._shared.session_affinity import SessionAffinityParameters
from picker.plugins.filters.session_affinity_filter import SessionAffinityFilter

PLUGIN = PluginType(
    "multicluster-session-affinity-filter",
    SessionAffinityParameters,
    named(SessionAffinityFilter),
    stability=Stability.ALPHA,
)
