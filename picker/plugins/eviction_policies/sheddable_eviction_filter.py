"""sheddable-eviction-filter: only running requests of negative priority may be stopped."""

from __future__ import annotations

from picker.framework.flow import QueuedRequest
from picker.framework.registry import Parameters, PluginType, Stability, plain


class SheddableEvictionFilter:
    """Judges by priority. Stateless."""

    def is_evictable(self, item: QueuedRequest) -> bool:
        """Whether its priority is below 0."""
        return item.request.priority < 0


PLUGIN = PluginType(
    "sheddable-eviction-filter",
    Parameters,
    plain(SheddableEvictionFilter),
    stability=Stability.ALPHA,
)
