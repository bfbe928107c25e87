"""dcgm-extractor: the GPU load of an endpoint, from a DCGM exporter's page.

    GPUUtilization/dcgm-extractor = max(DCGM_FI_DEV_GPU_UTIL of its samples) / 100, in [0, 1]

A sample is the endpoint's when its `pod` label is the endpoint's pod, or when it has none. Takes no
parameters.
"""

from __future__ import annotations

from collections.abc import Sequence

from picker.framework.registry import Parameters, PluginType, Stability, itself
from picker.scrape.exposition import scan
from picker.scrape.sources import ExtractError, Extraction, Scrape
from picker.types import Endpoint

TYPE = "dcgm-extractor"
SERIES = "DCGM_FI_DEV_GPU_UTIL"
ATTRIBUTE = f"GPUUtilization/{TYPE}"


class DcgmExtractor(Parameters, frozen=True):
    """`parameters` of a dcgm-extractor, and the plugin itself."""

    def extract(self, scrape: Scrape) -> Extraction:
        """The busiest GPU's share. Raises `ExtractError` when the page tells of none."""
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
        """The one."""
        return (SERIES,)


def _pod_names(endpoint: Endpoint) -> tuple[str, ...]:
    """What the pod may be called; an endpoint of a rank is called `<pod>-rank-<rank>`."""
    return ("", endpoint.name, endpoint.name.removesuffix(f"-rank-{endpoint.rank_index}"))


PLUGIN = PluginType(TYPE, DcgmExtractor, itself, stability=Stability.ALPHA)
