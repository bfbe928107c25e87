"""Endpoints come from a file: bad entries are skipped, and changes of the file apply."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path

import pytest
import yaml

from picker.config.pool_file import pool_contents
from picker.errors import ConfigError
from picker.metrics.picker_metrics import PickerMetrics
from picker.pool.datastore import Datastore, EndpointChanges
from picker.pool.endpoints_file import EndpointList, FileDiscovery, endpoints_of
from picker.pool.policies import RequestRules
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


ONE = "endpoints:\n- {name: a, address: 10.0.0.1, port: 8000}\n"
TWO = (
    "endpoints: [{name: a, address: 10.0.0.1, port: 8000}, {name: b, address: '::1', port: '1'}]\n"
)


def follower(
    path: Path,
    store: Datastore | None = None,
    rules: RequestRules | None = None,
    metrics: PickerMetrics | None = None,
) -> FileDiscovery:
    return FileDiscovery(
        path,
        store or Datastore(),
        rules or RequestRules(),
        metrics or PickerMetrics(),
        partial(pool_contents, pool="default"),
    )


def test_an_unreadable_file_is_fatal_at_the_start(tmp_path: Path) -> None:
    discovery = follower(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match=r"none\.yaml: cannot read .* No such file"):
        discovery.load()


class Watched:
    def __init__(self, path: Path) -> None:
        self.store = Datastore()
        self.metrics = PickerMetrics()
        self.changed = asyncio.Event()
        self.store.subscribe(self.note)
        self.rules = RequestRules()
        self.discovery = follower(path, self.store, self.rules, self.metrics)
        self.discovery.load()
        self.changed.clear()

    def note(self, _: EndpointChanges) -> None:
        self.changed.set()

    async def next(self) -> list[str]:
        await asyncio.wait_for(self.changed.wait(), 120)
        self.changed.clear()
        return [candidate.endpoint.name for candidate in self.store.snapshot().candidates]


@asynccontextmanager
async def watching(path: Path) -> AsyncIterator[Watched]:
    watched = Watched(path)
    task = asyncio.create_task(watched.discovery.run())
    try:
        yield watched
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def test_changes_of_the_file_apply_and_a_broken_one_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "endpoints.yaml"
    path.write_text(ONE)
    async with watching(path) as watched:
        path.write_text(TWO)
        assert await watched.next() == ["a", "b"]
        path.write_text("endpoints: [")
        replacement = tmp_path / "endpoints.yaml.new"
        replacement.write_text("endpoints: []\n")
        os.replace(replacement, path)
        assert await watched.next() == []
        path.unlink()
        path.write_text(ONE)
        assert await watched.next() == ["a"]


class Names:
    def __init__(self, **addresses: tuple[str, ...]) -> None:
        self.addresses = addresses

    def resolve(self, name: str) -> tuple[str, ...]:
        if name not in self.addresses:
            raise OSError(-2, "Name or service not known")
        return self.addresses[name]


NAMED = (
    "endpoints: [{name: a, address: one, port: 1}, {name: b, address: Two, port: 1},"
    " {name: c, address: none, port: 1}, {name: d, address: 10.0.0.9, port: 1}]\n"
)


@pytest.mark.looptime
async def test_host_names_are_resolved_and_followed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "endpoints.yaml").write_text(NAMED)
    names, store, changed = Names(one=("10.0.0.1",), two=("10.0.1.1", "10.0.1.2")), Datastore(), []
    discovery = FileDiscovery(
        tmp_path / "endpoints.yaml",
        store,
        RequestRules(),
        PickerMetrics(),
        partial(pool_contents, pool="default"),
        names.resolve,
        follows=False,
    )

    def known() -> dict[str, str]:
        found = (one.endpoint for one in store.snapshot().candidates)
        return {one.name: one.host_port for one in found}

    discovery.load()
    first = {"a": "10.0.0.1:1", "b-10.0.1.1": "10.0.1.1:1", "b-10.0.1.2": "10.0.1.2:1"}
    assert known() == first | {"d": "10.0.0.9:1"}
    reason = "the host name 'none' cannot be resolved: Name or service not known"
    assert discovery.problem() == reason
    arrived = asyncio.Event()
    store.subscribe(lambda _: (changed.append(known()), arrived.set()))  # type: ignore[arg-type]
    task = asyncio.create_task(discovery.run())
    names.addresses = {"two": ("10.0.1.1",), "none": ("10.0.2.1",)}
    await arrived.wait()
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    second = {"a": "10.0.0.1:1", "b": "10.0.1.1:1", "c": "10.0.2.1:1", "d": "10.0.0.9:1"}
    assert changed == [second]
    assert discovery.problem() == reason.replace("none", "one")
    assert caplog.text.count("cannot be resolved") == 2


async def test_links_may_be_turned(tmp_path: Path) -> None:
    """The file itself is a link, as is the folder of a Kubernetes volume, or any folder above."""
    for version, text in (("v1", ONE), ("v2", TWO), ("v3", "endpoints: []")):
        (tmp_path / version).mkdir()
        (tmp_path / version / "endpoints.yaml").write_text(text)
    current, link = tmp_path / "..data", tmp_path / "endpoints.yaml"
    current.symlink_to("v1")
    link.symlink_to("..data/endpoints.yaml")
    async with watching(link) as watched:
        turn(current, "v2")
        assert await watched.next() == ["a", "b"]
        turn(link, "v3/endpoints.yaml")
        assert await watched.next() == []
    async with watching(current / "endpoints.yaml") as watched:
        turn(current, "v1")
        assert await watched.next() == ["a"]


def turn(link: Path, target: str) -> None:
    new = link.with_name("new")
    new.symlink_to(target)
    os.replace(new, link)


def test_a_bad_entry_is_reported_and_counted_and_the_others_apply(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "endpoints.yaml"
    path.write_text(ONE + "- {name: worse, address: a_b.c, port: 1}\n")
    watched = Watched(path)
    assert [one.endpoint.name for one in watched.store.snapshot().candidates] == ["a"]
    assert (
        "endpoints.yaml:3:3: endpoints[1]: 'worse': 'address' must be an IP address" in caplog.text
    )
    value = watched.metrics.registry.get_sample_value("pointsman_discovery_errors_total")
    assert value == 1


@pytest.mark.parametrize("what", ["folder", "pipe"])
def test_a_path_other_than_a_file_is_not_waited_for(tmp_path: Path, what: str) -> None:
    """A pipe would never end."""
    path = tmp_path / "endpoints.yaml"
    path.mkdir() if what == "folder" else os.mkfifo(path)
    with pytest.raises(ConfigError, match="is not a file"):
        follower(path).load()


def test_a_reload_of_a_broken_file_keeps_the_endpoints(tmp_path: Path) -> None:
    path = tmp_path / "endpoints.yaml"
    path.write_text(ONE)
    store = Datastore()
    discovery = follower(path, store)
    discovery.load()
    path.write_text("endpoints: {")
    with pytest.raises(ConfigError, match="not valid YAML"):
        discovery.load()
    assert len(store.snapshot().candidates) == 1


OBJECTIVE = """\
---
apiVersion: llm-d.ai/v1alpha2
kind: InferenceObjective
metadata: {name: chat}
spec: {poolRef: {name: default}, priority: 5}
"""


async def test_objectives_change_with_the_endpoints(tmp_path: Path) -> None:
    path = tmp_path / "endpoints.yaml"
    path.write_text(ONE)
    async with watching(path) as watched:
        known: list[int | None] = []
        watched.store.subscribe(lambda _: known.append(watched.rules.priority("chat")))
        path.write_text(TWO + OBJECTIVE)
        assert await watched.next() == ["a", "b"]
        path.write_text(OBJECTIVE)
        replacement = tmp_path / "endpoints.yaml.new"
        replacement.write_text(ONE + OBJECTIVE.replace("5", "6"))
        os.replace(replacement, path)
        assert await watched.next() == ["a"]
        path.write_text("endpoints: []\n")
        assert await watched.next() == []
    assert known == [5, 6, None]


def test_skipped_entries_and_remarks_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "endpoints.yaml"
    other = OBJECTIVE.replace("name: default", "name: other").replace("chat", "far")
    path.write_text(ONE + OBJECTIVE + OBJECTIVE.replace("5", "five") + other)
    watched = Watched(path)
    assert watched.rules.current.priorities == (5,)
    assert (
        "skipped " + str(path) + ":12:34: spec.priority: InferenceObjective 'chat'" in caplog.text
    )
    assert ":17:8: spec.poolRef: InferenceObjective 'far': is for the InferencePool" in caplog.text
    value = watched.metrics.registry.get_sample_value("pointsman_discovery_errors_total")
    assert value == 1
