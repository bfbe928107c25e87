"""topology-extractor: the location of an endpoint, from its labels.

Parameters `hostname`, `rack`, `zone` and `region` name the labels (`kubernetes.io/hostname`,
`topology.kubernetes.io/rack|zone|region`). Attribute `Topology/<name of the plugin>`; a tier whose
label is absent is "", the hostname then the address of the node, where that is known.
"""

from __future__ import annotations

from collections.abc import Mapping

from picker.framework.attributes import TOPOLOGY, Topology
from picker.framework.registry import Parameters, PluginType, Stability, named
from picker.types import Endpoint


class TopologyParameters(Parameters, frozen=True):
    """`parameters` of a topology-extractor: the labels of the tiers."""

    hostname: str = "kubernetes.io/hostname"
    rack: str = "topology.kubernetes.io/rack"
    zone: str = "topology.kubernetes.io/zone"
    region: str = "topology.kubernetes.io/region"


class TopologyExtractor:
    """Reads labels."""

    def __init__(self, name: str, parameters: TopologyParameters) -> None:
        self._attribute = f"{TOPOLOGY}/{name}"
        self._labels = parameters

    def describe(self, endpoint: Endpoint) -> Mapping[str, Topology]:
        """The endpoint's place."""
        labels, names = endpoint.labels, self._labels
        place = Topology(
            hostname=labels.get(names.hostname) or endpoint.node_address or "",
            rack=labels.get(names.rack, ""),
            zone=labels.get(names.zone, ""),
            region=labels.get(names.region, ""),
        )
        return {self._attribute: place}


PLUGIN = PluginType(
    "topology-extractor", TopologyParameters, named(TopologyExtractor), stability=Stability.ALPHA
)
