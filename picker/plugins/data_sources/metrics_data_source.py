"""metrics-data-source: where an endpoint's metrics page is. Settings only; `scrape` asks.

`scheme` http or https, `path` /metrics, `port` (none: the endpoint's own), `interval` (none: that
of `--refresh-metrics-interval`, of which it is rounded to a multiple), `maxPageBytes` 16777216. For
https: `insecureSkipVerify` true, `caCertPath`, `clientCertPath` and `clientKeyPath`.
"""

from __future__ import annotations

from picker.framework.registry import PluginType
from picker.scrape.page_parameters import PageParameters, checked_source
from picker.scrape.sources import PageLocation


class MetricsDataSource(PageParameters, frozen=True, kw_only=True):
    """`parameters` of a metrics-data-source, and the plugin itself."""

    path: str = "/metrics"
    port: int | None = None

    @property
    def location(self) -> PageLocation:
        """Where metrics pages are."""
        return self.locate(self.path, self.port)


PLUGIN = PluginType("metrics-data-source", MetricsDataSource, checked_source)
