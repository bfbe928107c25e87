"""The parameters that all HTTP data sources share; `maxPageBytes` (16777216) bounds a page."""

from base.durations import parse_duration
from picker.framework.registry import Parameters, PositiveInt
from picker.scrape.sources import (
    MAX_PAGE_BYTES,
    DataSource,
    PageLocation,
    TlsFiles,
    is_request_path,
)


class PageParameters(Parameters, frozen=True, kw_only=True):
    scheme: str = "http"
    insecure_skip_verify: bool = True
    ca_cert_path: str = ""
    client_cert_path: str = ""
    client_key_path: str = ""
    interval: str = ""
    max_page_bytes: PositiveInt = MAX_PAGE_BYTES

    def locate(
        self, path: str, port: int | None = None, *, use_node_address: bool = False
    ) -> PageLocation:
        if self.scheme not in ("http", "https"):
            raise ValueError(f"scheme must be http or https, got '{self.scheme}'")
        if not is_request_path(path):
            raise ValueError(f"path must begin with '/' and be printable ASCII, got '{path}'")
        if port is not None and not 1 <= port <= 65535:
            raise ValueError(f"port must be within 1..65535, got {port}")
        if bool(self.client_cert_path) != bool(self.client_key_path):
            raise ValueError("clientCertPath and clientKeyPath go together")
        return PageLocation(
            scheme=self.scheme,
            path=path,
            port=port,
            interval_seconds=self._interval_seconds(),
            use_node_address=use_node_address,
            max_page_bytes=self.max_page_bytes,
            tls=TlsFiles(
                verify=not self.insecure_skip_verify,
                ca_cert_path=self.ca_cert_path,
                client_cert_path=self.client_cert_path,
                client_key_path=self.client_key_path,
            ),
        )

    def _interval_seconds(self) -> float | None:
        if not self.interval:
            return None
        seconds = parse_duration(self.interval)
        if seconds <= 0:
            raise ValueError(f"interval must be more than nothing, got '{self.interval}'")
        return seconds


def checked_source(parameters: DataSource) -> DataSource:
    """Build a data source from its parameters. Raises `ValueError` for senseless values."""
    _ = parameters.location
    return parameters
