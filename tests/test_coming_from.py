"""The page for users of other routers names flags, plugins and keys that exist here."""

import argparse
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

import fleet.command_lines
from fleet.commands.config import schema
from fleet.policies import POLICIES
from picker.config.catalog import builtin_plugins

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "coming-from.md").read_text()
CODE = re.compile(r"`([^`]+)`")
NO_COUNTERPART = "no counterpart"
# Every flag of llm-d-router 0.10.0 but klog's.
REFERENCE = """
--grpc-port --ha-enable-leader-election --drain-timeout --grpc-max-recv-msg-size
--grpc-max-send-msg-size --pool-group --pool-namespace --pool-name --endpoint-selector
--endpoint-target-ports --disable-endpoint-subset-filter --emit-endpoint-scores
--refresh-metrics-interval --refresh-prometheus-metrics-interval --metrics-staleness-threshold
--total-queued-requests-metric --total-running-requests-metric --kv-cache-usage-percentage-metric
--lora-info-metric --cache-info-metric --tracing --health-checking --metrics-port
--grpc-health-port --enable-pprof --cert-path --enable-cert-reload --enable-grpc-stream-metrics
--secure-serving --tls-min-version --tls-cipher-suites --metrics-endpoint-auth
--metrics-client-ca-file --metrics-cert-dir --config-file --config-text
--allow-experimental-plugins
"""


def rows() -> Iterator[tuple[str, str]]:
    for line in PAGE.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| ") and cells[0] not in ("theirs", "you have"):
            theirs, ours = cells
            yield theirs, ours


def names(document: Any) -> Iterator[str]:
    """Yield every name of a field in a YAML or JSON document."""
    if isinstance(document, dict):
        yield from document
    for one in document.values() if isinstance(document, dict) else document:
        if isinstance(one, dict | list):
            yield from names(one)


@cache
def known() -> set[str]:
    """Everything of ours that the page may name, but for commands and their flags."""
    registry = builtin_plugins()
    types = registry.names
    parameters = {
        field.encode_name
        for name in types
        for field in msgspec.structs.fields(registry.get(name).parameters)
    }
    bootstraps = [
        yaml.safe_load(path.read_text()) for path in (ROOT / "deploy" / "envoy").glob("*.yaml")
    ]
    definitions = [yaml.safe_load(path.read_text()) for path in (ROOT / "crds").glob("*_*.yaml")]
    kinds = {one["spec"]["names"]["kind"] for one in definitions}
    return {*types, *parameters, *names(schema()), *names(bootstraps), *kinds, *POLICIES}


@cache
def flags(command: str) -> set[str]:
    """Return the flags that a command takes; those that it only refuses are hidden."""
    actions = fleet.command_lines.parser_of(command)._actions
    return {name for one in actions if one.help != argparse.SUPPRESS for name in one.option_strings}


ROWS = list(rows())
OURS = sorted({code for _, ours in ROWS for code in CODE.findall(ours)})


@pytest.mark.parametrize("code", OURS)
def test_a_name_that_the_page_calls_ours_exists(code: str) -> None:
    word = code.removesuffix("…").partition("=")[0]
    if code.startswith("pointsman "):
        words = code.split()[1:]
        assert fleet.command_lines.parser_of(words[0])
        assert set(words[1:]) <= flags(words[0])
    elif word.startswith("--"):
        assert word in flags("picker") | flags("up")
    elif word.isupper() or word.startswith("OTEL"):
        assert word in (ROOT / "docs" / "configuration.md").read_text()
    else:
        assert word in known()


def test_every_row_has_a_counterpart_or_says_that_there_is_none() -> None:
    assert len(ROWS) > 70
    for theirs, ours in ROWS:
        assert theirs, ours
        assert ours, theirs
    assert sum(ours.startswith(NO_COUNTERPART) for _, ours in ROWS) > 10


def test_every_flag_of_the_reference_is_taken_or_listed() -> None:
    assert set(REFERENCE.split()) - flags("picker") <= set(CODE.findall(PAGE))
