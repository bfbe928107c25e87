"""The configuration file is followed through any replacement; an invalid one changes nothing."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from picker.config.build import DEFAULT_CONFIG
from picker.config.findings import Finding
from picker.config.load import MAX_CONFIG_BYTES, LoadedConfig
from picker.config.watch import ConfigWatch, read_config_file
from picker.errors import ConfigError
from picker.metrics.picker_metrics import PickerMetrics

PATIENCE_SECONDS = 120.0


class Recorder:
    def __init__(self) -> None:
        self.applied: list[LoadedConfig] = []
        self.happened = asyncio.Event()
        self.breaks = False

    def __call__(self, loaded: LoadedConfig) -> tuple[Finding, ...]:
        self.happened.set()
        if self.breaks:
            raise ZeroDivisionError
        loaded.findings.refuse_errors()
        if any(spec.type == "refuse" for spec in loaded.config.plugins):
            raise ConfigError("no")
        self.applied.append(loaded)
        return ()


def config(plugin: str) -> bytes:
    return b"apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\n" + (
        f"plugins: [{{type: {plugin}}}]\n".encode()
    )


def reloads(metrics: PickerMetrics) -> dict[str, float]:
    return {labels[0]: number for labels, number in metrics.config_reloads_total.numbers()}


def healthy(metrics: PickerMetrics) -> float:
    ((_, number),) = metrics.config_last_reload_successful.numbers()
    return number


def loaded_at(metrics: PickerMetrics) -> float:
    ((_, number),) = metrics.config_last_reload_success_timestamp_seconds.numbers()
    return number


@asynccontextmanager
async def following(
    path: Path, recorder: Recorder, content: bytes = DEFAULT_CONFIG
) -> AsyncIterator[PickerMetrics]:
    metrics = PickerMetrics()
    watch = ConfigWatch(path, content, recorder, metrics, lambda: 12.0)
    task = asyncio.create_task(watch.run())
    yield metrics
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def called(recorder: Recorder) -> None:
    await asyncio.wait_for(recorder.happened.wait(), PATIENCE_SECONDS)
    recorder.happened.clear()


async def test_a_file_replaced_by_renaming_is_applied(tmp_path: Path) -> None:
    path, recorder = tmp_path / "c.yaml", Recorder()
    path.write_bytes(DEFAULT_CONFIG)
    async with following(path, recorder) as metrics:
        other = tmp_path / "other.yaml"
        other.write_bytes(config("queue-scorer"))
        other.rename(path)
        await called(recorder)
        assert [one.config.plugins[0].type for one in recorder.applied] == ["queue-scorer"]
        assert reloads(metrics) == {"success": 1, "failure": 0}


async def test_a_volume_of_kubernetes_is_followed_through_its_links(tmp_path: Path) -> None:
    """The file is a link to `..data/config.yaml`, and Kubernetes replaces the link `..data`."""
    for version, plugin in (("..1", "queue-scorer"), ("..2", "random-picker")):
        (tmp_path / version).mkdir()
        (tmp_path / version / "config.yaml").write_bytes(config(plugin))
    (tmp_path / "..data").symlink_to("..1")
    path, recorder = tmp_path / "config.yaml", Recorder()
    path.symlink_to("..data/config.yaml")
    async with following(path, recorder, config("queue-scorer")):
        (tmp_path / "..tmp").symlink_to("..2")
        (tmp_path / "..tmp").rename(tmp_path / "..data")
        await called(recorder)
        assert recorder.applied[-1].config.plugins[0].type == "random-picker"


class Watched:
    def __init__(self, path: Path) -> None:
        self.path, self.recorder, self.metrics = path, Recorder(), PickerMetrics()
        path.write_bytes(DEFAULT_CONFIG)
        clock = map(float, range(100, 200)).__next__
        self._watch = ConfigWatch(path, DEFAULT_CONFIG, self.recorder, self.metrics, clock)

    def becomes(self, content: bytes | None, looks: int = 1) -> tuple[dict[str, float], float]:
        if content is not None:
            self.path.write_bytes(content)
        for _ in range(looks):
            self._watch.check()
        return reloads(self.metrics), healthy(self.metrics)


@pytest.fixture
def watched(tmp_path: Path) -> Watched:
    return Watched(tmp_path / "c.yaml")


def test_an_invalid_change_is_reported_once_until_a_valid_one(
    watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    assert (healthy(watched.metrics), loaded_at(watched.metrics)) == (1, 100)
    assert watched.becomes(config("refuse"), looks=2) == ({"success": 0, "failure": 1}, 0)
    assert "the previous configuration remains in use" in caplog.records[-1].message
    assert watched.becomes(b"a: [") == ({"success": 0, "failure": 2}, 0)
    assert watched.becomes(config("queue-scorer")) == ({"success": 1, "failure": 2}, 1)
    assert loaded_at(watched.metrics) == 101
    assert len(watched.recorder.applied) == 1


def test_a_missing_file_is_reported_once(watched: Watched) -> None:
    watched.path.unlink()
    assert watched.becomes(None, looks=2) == ({"success": 0, "failure": 1}, 0)
    assert watched.becomes(DEFAULT_CONFIG)[1] == 1
    assert len(watched.recorder.applied) == 1


def test_unchanged_content_is_not_applied(watched: Watched) -> None:
    assert watched.becomes(DEFAULT_CONFIG) == ({"success": 0, "failure": 0}, 1)
    assert watched.recorder.applied == []


def test_only_the_limit_and_one_byte_of_a_file_are_read(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_bytes(b"#" * (MAX_CONFIG_BYTES + 100))
    assert len(read_config_file(path, "--config-file")) == MAX_CONFIG_BYTES + 1
    with pytest.raises(ConfigError, match="--config-file: cannot read"):
        read_config_file(tmp_path / "none", "--config-file")


def test_an_unexpected_error_does_not_end_the_watch(
    watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    watched.recorder.breaks = True
    failed = {"success": 0, "failure": 1}
    assert watched.becomes(config("queue-scorer"), looks=2) == (failed, 0)
    assert "ZeroDivisionError" in caplog.text
    watched.recorder.breaks = False
    assert watched.becomes(config("random-picker"))[1] == 1
    assert len(watched.recorder.applied) == 1
