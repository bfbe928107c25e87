"""metrics-data-source: where an endpoint's metrics page is. Settings only; `app` builds the
fetcher from them.

`scheme` http or https, `path` /metrics, `port` (none: the endpoint's own), `interval` (none: that
of `--refresh-metrics-interval`). For https: `insecureSkipVerify` true, `caCertPath`,
`clientCertPath` and `clientKeyPath`.
"""

from __future__ import annotations

from picker.framework.registry import Parameters, PluginType
from picker.framework.services import Services


class MetricsDataSource(Parameters, frozen=True):
    """`parameters` of a metrics-data-source, and the plugin itself."""

    scheme: str = "http"
    path: str = "/metrics"
    port: int | None = None
    insecure_skip_verify: bool = True
    ca_cert_path: str = ""
    client_cert_path: str = ""
    client_key_path: str = ""
    interval: str = ""


def _create(_name: str, parameters: MetricsDataSource, _services: Services) -> MetricsDataSource:
    if parameters.scheme not in ("http", "https"):
        raise ValueError(f"scheme must be http or https, got '{parameters.scheme}'")
    if not parameters.path.startswith("/"):
        raise ValueError(f"path must begin with '/', got '{parameters.path}'")
    if parameters.port is not None and not 1 <= parameters.port <= 65535:
        raise ValueError(f"port must be within 1..65535, got {parameters.port}")
    if bool(parameters.client_cert_path) != bool(parameters.client_key_path):
        raise ValueError("clientCertPath and clientKeyPath go together")
    return parameters


PLUGIN = PluginType("metrics-data-source", MetricsDataSource, _create)
