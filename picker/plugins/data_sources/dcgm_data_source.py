"""dcgm-data-source: where the DCGM exporter reports an endpoint's GPU load. Settings only.

`scheme` http or https, `path` /metrics, `port` 9400 at the endpoint's address, or with
`useNodeAddress` (false) at that of its node; an endpoint whose node is unknown then cannot be asked
about, which counts as a failed scrape. `interval` and `maxPageBytes` as for metrics-data-source.
For https: `insecureSkipVerify` true, `caCertPath`, `clientCertPath` and `clientKeyPath`.
"""

from __future__ import annotations

from picker.framework.registry import PluginType, Stability
from picker.scrape.page_parameters import PageParameters, checked_source
from picker.scrape.sources import PageLocation


class DcgmDataSource(PageParameters, frozen=True, kw_only=True):
    """`parameters` of a dcgm-data-source, and the plugin itself."""

    path: str = "/metrics"
    port: int = 9400
    use_node_address: bool = False

    @property
    def location(self) -> PageLocation:
        """Where the exporter's pages are."""
        return self.locate(self.path, self.port, use_node_address=self.use_node_address)


PLUGIN = PluginType("dcgm-data-source", DcgmDataSource, checked_source, stability=Stability.ALPHA)
