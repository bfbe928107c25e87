"""The GPU load of endpoints, as a DCGM exporter reports it.

dcgm-data-source: where the DCGM exporter reports an endpoint's GPU load. It is metrics-data-source
at another port; with `useNodeAddress`, it asks at the address of the endpoint's node, and the
scrape fails while that is unknown.

dcgm-extractor: GPU load, from a DCGM exporter's page.

    GPUUtilization/dcgm-extractor = max(DCGM_FI_DEV_GPU_UTIL of its samples) / 100, in [0, 1]

A sample belongs to an endpoint when its `pod` label names the endpoint's pod, or when it has none.
"""

from collections.abc import Sequence

from picker.framework.registry import Parameters, PluginType, Stability
from picker.scrape.exposition import scan
from picker.scrape.sources import (
    ExtractError,
    Extraction,
    PageLocation,
    PageParameters,
    Scrape,
    checked_source,
)
from picker.types import Endpoint

EXTRACTOR = "dcgm-extractor"
SERIES = "DCGM_FI_DEV_GPU_UTIL"
ATTRIBUTE = f"GPUUtilization/{EXTRACTOR}"


class DcgmDataSource(PageParameters, frozen=True, kw_only=True):
    path: str = "/metrics"
    port: int = 9400
    use_node_address: bool = False

    @property
    def location(self) -> PageLocation:
        return self.locate(self.path, self.port, use_node_address=self.use_node_address)


class DcgmExtractor(Parameters, frozen=True):
    def extract(self, scrape: Scrape) -> Extraction:
        names = _pod_names(scrape.endpoint)
        shares = [
            sample.value / 100
            for sample in scan(scrape.page, (SERIES,)).get(SERIES, ())
            if sample.labels.get("pod", "") in names and 0 <= sample.value <= 100
        ]
        if not shares:
            raise ExtractError(f"series '{SERIES}' has no usable sample of this endpoint")
        return Extraction(attributes={ATTRIBUTE: max(shares)})

    def series(self, endpoint: Endpoint) -> Sequence[str]:
        return (SERIES,)


def _pod_names(endpoint: Endpoint) -> tuple[str, ...]:
    return ("", endpoint.name, endpoint.name.removesuffix(f"-rank-{endpoint.rank_index}"))


PLUGINS = (
    PluginType("dcgm-data-source", checked_source, Stability.ALPHA, parameters=DcgmDataSource),
    PluginType(EXTRACTOR, DcgmExtractor, Stability.ALPHA),
)
