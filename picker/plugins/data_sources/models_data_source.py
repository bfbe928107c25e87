"""models-data-source: where an endpoint lists the models it serves. Settings only.

`scheme` http or https, `path` /v1/models, `interval` (none: that of `--refresh-metrics-interval`,
of which it is rounded to a multiple), `maxPageBytes` 16777216. For https: `insecureSkipVerify`
true, `caCertPath`, `clientCertPath` and `clientKeyPath`.
"""

from __future__ import annotations

from picker.framework.registry import PluginType
from picker.scrape.page_parameters import PageParameters, checked_source
from picker.scrape.sources import PageLocation


class ModelsDataSource(PageParameters, frozen=True, kw_only=True):
    """`parameters` of a models-data-source, and the plugin itself."""

    path: str = "/v1/models"

    @property
    def location(self) -> PageLocation:
        """Where model lists are."""
        return self.locate(self.path)


PLUGIN = PluginType("models-data-source", ModelsDataSource, checked_source)
