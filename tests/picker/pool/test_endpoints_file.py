"""Entries of an endpoints file become endpoints; bad ones are reported."""

import pytest
import yaml

from picker.errors import ConfigError
from picker.pool.endpoints_file import EndpointList, endpoints_of
from picker.types import Endpoint


def parse(text: str) -> EndpointList:
    return endpoints_of(yaml.safe_load(text))


def test_an_entry_becomes_an_endpoint() -> None:
    text = """
endpoints:
- {name: a, address: 10.0.0.1, port: "8000", namespace: prod, labels: {llm-d.ai/role: decode}}
- {"name": "b", "address": "fd00::1", "port": 9000}
"""
    found = parse(text)
    assert found.problems == ()
    assert found.endpoints == (
        Endpoint("a", "10.0.0.1", 8000, "prod", {"llm-d.ai/role": "decode"}),
        Endpoint("b", "fd00::1", 9000),
    )


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ("just text", "expected a mapping"),
        ("{address: 10.0.0.1, port: 1}", "'name' must be"),
        ("{name: 5, address: 10.0.0.1, port: 1}", "'name' must be"),
        ("{name: x, address: a_b.c, port: 1}", "must be an IP address or a host name, got 'a_b.c'"),
        ("{name: x, address: '', port: 1}", "'address' must be a non-empty string"),
        ("{name: x, address: 0.0.0.0, port: 1}", "must be the address of one host"),
        ("{name: x, address: 'fe80::1%eth0', port: 1}", "must be the address of one host"),
        ("{name: x/y, address: 10.0.0.1, port: 1}", "no blanks and no '/'"),
        ("{name: x, namespace: 'a b', address: 10.0.0.1, port: 1}", "'namespace' must have"),
        ("{name: x, address: 10.0.0.1, port: 1, rank: -1}", "'rank' must be a number from 0"),
        ("{name: x, address: 10.0.0.1, port: 1, nodeAddress: n}", "'nodeAddress' must be an IP"),
        ("{name: x, address: 10.0.0.1, port: 1, labels: {metricsAddress: a_b}}", "got 'a_b'"),
        (
            "{name: x, address: 10.0.0.1, port: 1, labels: {metricsAddress: a, metricsPort: http}}",
            "'metricsPort' must be a number",
        ),
        ("{name: x, address: 10.0.0.1}", "'port' must be a number from 1 to 65535, got None"),
        ("{name: x, address: 10.0.0.1, port: 0}", "'port' must be"),
        ("{name: x, address: 10.0.0.1, port: '65536'}", "'port' must be"),
        ("{name: x, address: 10.0.0.1, port: true}", "'port' must be"),
        ("{name: x, address: 10.0.0.1, port: 1, labels: [a]}", "'labels' must be a mapping"),
        ("{name: x, address: 10.0.0.1, port: 1, labels: {a: 1}}", "label 'a' must map"),
        ("{name: x, adress: 10.0.0.1, port: 1}", "unknown key 'adress', allowed: name"),
        ("{name: good, address: 10.0.0.9, port: 1}", "'default/good' is already taken"),
    ],
)
def test_a_bad_entry_is_skipped_and_reported(entry: str, problem: str) -> None:
    text = f"endpoints:\n- {{name: good, address: 10.0.0.1, port: 1}}\n- {entry}\n"
    found = parse(text)
    assert [endpoint.name for endpoint in found.endpoints] == ["good"]
    assert len(found.problems) == 1
    assert found.problems[0].path == ("endpoints", 1)
    assert problem in found.problems[0].text


@pytest.mark.parametrize("text", ["", "[]", "endpoints: 5", "endpoints: {}", "endpoint: []"])
def test_a_malformed_list_of_endpoints_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="expected a mapping with a list"):
        parse(text)


def test_an_empty_list_is_an_empty_pool() -> None:
    assert parse("endpoints: []") == EndpointList(())


@pytest.mark.parametrize(
    ("labels", "host_port"),
    [
        ("{metricsAddress: 10.0.0.11, metricsPort: '9090'}", "10.0.0.11:9090"),
        ("{metricsAddress: 10.0.0.11}", "10.0.0.11:8000"),
        ("{metricsPort: '9090'}", None),
        ("{metricsAddress: 'fd00::1'}", "[fd00::1]:8000"),
        ("{metricsAddress: metrics.example.com, metricsPort: '1'}", "metrics.example.com:1"),
        ("{metricsAddress: '12345'}", "12345:8000"),
    ],
)
def test_labels_say_where_metrics_are(labels: str, host_port: str | None) -> None:
    text = f"endpoints: [{{name: a, address: 10.0.0.1, port: '8000', labels: {labels}}}]"
    (found,) = parse(text).endpoints
    assert found.metrics_host_port == host_port


@pytest.mark.parametrize(
    "name", ["trailing.", "Upper", "under_score", "a:b", "a@b", "-lead", "a..b", "", "x" * 300]
)
def test_a_metrics_address_is_an_address_or_a_name(name: str) -> None:
    labels = f"{{metricsAddress: '{name}'}}"
    text = f"endpoints: [{{name: a, address: 10.0.0.1, port: 1, labels: {labels}}}]"
    found = parse(text)
    assert found.endpoints == ()
    assert "must be an IP address or a DNS name" in found.problems[0].text


def test_an_entry_may_be_a_rank_on_a_node() -> None:
    """The reference's files have no such keys."""
    text = "endpoints: [{name: a, address: 10.0.0.1, port: 1, rank: 3, nodeAddress: 10.9.0.1}]"
    (found,) = parse(text).endpoints
    assert (found.rank_index, found.node_address) == (3, "10.9.0.1")


def test_problems_stay_short_whatever_is_in_the_file() -> None:
    """Anchors make small files of huge values."""
    levels = "".join(f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 9)}]\n" for n in range(1, 12))
    text = (
        f"l0: &l0 [x, x]\n{levels}endpoints: [{{name: a, address: 10.0.0.1, port: *l11}}, *l11]\n"
    )
    text += f"{'k' * 900}: 1\n0x{'f' * 900}: 1\n"
    found = parse(text)
    assert found.endpoints == ()
    assert [one.text for one in found.problems[-2:]] == [
        "'a': 'port' must be a number from 1 to 65535, got a list",
        "expected a mapping, got a list",
    ]
    assert max(len(one.text) for one in found.problems) < 200
