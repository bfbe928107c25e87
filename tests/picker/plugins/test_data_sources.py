"""Data sources give the locations of pages."""

import pytest

from picker.scrape.sources import DataSource, PageLocation, TlsFiles
from picker.types import Endpoint
from tests.support.picker.plugin_scenes import configured


def location(plugin: str, **parameters: object) -> PageLocation | None:
    made = configured(plugin, parameters)
    assert isinstance(made, DataSource)
    return made.location


@pytest.mark.parametrize(
    ("plugin", "expected"),
    [
        ("metrics-data-source", PageLocation("http", "/metrics")),
        ("models-data-source", PageLocation("http", "/v1/models")),
        ("endpoint-notification-source", None),
    ],
)
def test_sources_have_the_defaults_of_the_reference(
    plugin: str, expected: PageLocation | None
) -> None:
    assert location(plugin) == expected


def test_every_default_can_be_replaced() -> None:
    assert location(
        "metrics-data-source",
        scheme="https",
        path="/m?x=1",
        port=1,
        interval="1m30s",
        insecureSkipVerify=False,
        caCertPath="ca",
        clientCertPath="c",
        clientKeyPath="k",
        maxPageBytes=1000,
    ) == PageLocation("https", "/m?x=1", 1, 90.0, False, TlsFiles(True, "ca", "c", "k"), 1000)


@pytest.mark.parametrize(
    ("parameters", "endpoint", "address"),
    [
        ({}, Endpoint("a", "10.0.0.1", 8000), "10.0.0.1:8000"),
        ({"port": 9}, Endpoint("a", "fd00::1", 8000), "[fd00::1]:9"),
        ({}, Endpoint("a", "10.0.0.1", 8000, metrics_host_port="10.0.0.9:90"), "10.0.0.9:90"),
        ({"port": 9}, Endpoint("a", "10.0.0.1", 8000, metrics_host_port="h:90"), "h:9"),
    ],
)
def test_a_page_is_at_the_metrics_address_of_the_endpoint(
    parameters: dict[str, object], endpoint: Endpoint, address: str
) -> None:
    where = location("metrics-data-source", **parameters)
    assert where.address(endpoint) == address
