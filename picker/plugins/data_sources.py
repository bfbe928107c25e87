"""Locations of pages about endpoints (`scrape.sources.DataSource`): settings only.

metrics-data-source: where an endpoint's metrics page is. `port` is by default the endpoint's own.
`interval` is by default `--refresh-metrics-interval`, and is rounded to a multiple of it.

models-data-source: where an endpoint lists its models.

endpoint-notification-source: the endpoints themselves, as they join and change. Its extractors are
called once for each endpoint, and again when it changes.
"""

from picker.framework.registry import Parameters, PluginType
from picker.scrape.sources import PageLocation, PageParameters, checked_source


class MetricsDataSource(PageParameters, frozen=True, kw_only=True):
    path: str = "/metrics"
    port: int | None = None

    @property
    def location(self) -> PageLocation:
        return self.locate(self.path, self.port)


class ModelsDataSource(PageParameters, frozen=True, kw_only=True):
    path: str = "/v1/models"

    @property
    def location(self) -> PageLocation:
        return self.locate(self.path)


class EndpointNotificationSource(Parameters, frozen=True):
    @property
    def location(self) -> None:
        return None


PLUGINS = (
    PluginType("metrics-data-source", checked_source, parameters=MetricsDataSource),
    PluginType("models-data-source", checked_source, parameters=ModelsDataSource),
    PluginType("endpoint-notification-source", EndpointNotificationSource),
)
