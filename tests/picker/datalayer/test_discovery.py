"""Endpoints come from a file, bad entries are skipped, and changes of the file apply."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from pathlib import Path

import pytest

from picker.datalayer.datastore import Datastore, EndpointChanges
from picker.datalayer.discovery import MAX_FILE_BYTES, FileDiscovery, parse_endpoints
from picker.errors import ConfigError
from picker.metrics import PickerMetrics
from picker.types import Endpoint

ONE = "endpoints: [{name: a, address: 10.0.0.1, port: 8000}]\n"
TWO = (
    "endpoints: [{name: a, address: 10.0.0.1, port: 8000}, {name: b, address: '::1', port: '1'}]\n"
)


def test_an_entry_becomes_an_endpoint() -> None:
    """Ports may be strings or numbers, addresses of either family; JSON is YAML too."""
    content = b"""
endpoints:
- {name: a, address: 10.0.0.1, port: "8000", namespace: prod, labels: {llm-d.ai/role: decode}}
- {"name": "b", "address": "fd00::1", "port": 9000}
"""
    found = parse_endpoints(content)
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
        ("{name: x, address: example.com, port: 1}", "must be an IP address, got 'example.com'"),
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
    """The good one beside it applies."""
    text = f"endpoints:\n- {{name: good, address: 10.0.0.1, port: 1}}\n- {entry}\n"
    found = parse_endpoints(text.encode())
    assert [endpoint.name for endpoint in found.endpoints] == ["good"]
    assert len(found.problems) == 1
    assert found.problems[0].startswith("endpoints[1]: ")
    assert problem in found.problems[0]


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"endpoints: 5", b"a: [", b"\xff\xfe\xff", b"x" * (MAX_FILE_BYTES + 1)],
)
def test_what_is_no_list_of_endpoints_is_refused(content: bytes) -> None:
    """There is nothing to skip in it."""
    with pytest.raises(ConfigError):
        parse_endpoints(content)


def test_an_empty_list_is_an_empty_pool() -> None:
    """All workers may be gone."""
    assert parse_endpoints(b"endpoints: []").endpoints == ()


def test_an_unreadable_file_is_fatal_at_the_start(tmp_path: Path) -> None:
    """The message names the file."""
    discovery = FileDiscovery(tmp_path / "none.yaml", Datastore(), PickerMetrics())
    with pytest.raises(ConfigError, match=r"none\.yaml: cannot read .* No such file"):
        discovery.load()


async def test_changes_of_the_file_apply_and_a_broken_one_changes_nothing(tmp_path: Path) -> None:
    """Written in place, replaced by renaming, broken and mended."""
    path = tmp_path / "endpoints.yaml"
    path.write_text(ONE)
    store = Datastore()
    changed = asyncio.Event()

    def note(_: EndpointChanges) -> None:
        changed.set()

    store.subscribe(note)
    discovery = FileDiscovery(path, store, PickerMetrics())
    discovery.load()
    changed.clear()
    task = asyncio.create_task(discovery.run())
    try:
        path.write_text(TWO)
        await asyncio.wait_for(changed.wait(), 30)
        assert len(store.snapshot().candidates) == 2
        changed.clear()
        path.write_text("endpoints: [")
        replacement = tmp_path / "endpoints.yaml.new"
        replacement.write_text("endpoints: []\n")
        os.replace(replacement, path)
        await asyncio.wait_for(changed.wait(), 30)
        assert store.snapshot().candidates == ()
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def test_a_reload_of_a_broken_file_keeps_the_endpoints(tmp_path: Path) -> None:
    """Loading raises; the pool stays."""
    path = tmp_path / "endpoints.yaml"
    path.write_text(ONE)
    store = Datastore()
    discovery = FileDiscovery(path, store, PickerMetrics())
    discovery.load()
    path.write_text("endpoints: {")
    with pytest.raises(ConfigError, match="not valid YAML"):
        discovery.load()
    assert len(store.snapshot().candidates) == 1
