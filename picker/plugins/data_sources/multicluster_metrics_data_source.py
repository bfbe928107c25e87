"""multicluster-metrics-data-source: where other clusters' pickers report the load of their pools.

Parameters are those of metrics-data-source, but for the defaults: the way is between clusters, so
`scheme` is https and certificates are checked (`insecureSkipVerify` false). The labels
`metricsAddress` and `metricsPort` of an endpoint, which stands for a pool, name where to ask.
"""

from __future__ import annotations

from picker.framework.registry import PluginType, Stability
from picker.scrape.page_parameters import PageParameters, checked_source
from picker.scrape.sources import PageLocation


class MulticlusterMetricsDataSource(PageParameters, frozen=True, kw_only=True):
    """`parameters` of a multicluster-metrics-data-source, and the plugin itself."""

    scheme: str = "https"
    insecure_skip_verify: bool = False
    path: str = "/metrics"
    port: int | None = None

    @property
    def location(self) -> PageLocation:
        """Where metrics pages of pickers are."""
        return self.locate(self.path, self.port)


PLUGIN = PluginType(
    "multicluster-metrics-data-source",
    MulticlusterMetricsDataSource,
    checked_source,
    stability=Stability.ALPHA,
)
