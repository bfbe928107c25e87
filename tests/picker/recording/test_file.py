"""The file of a recording: private, bounded, and asynchronous."""

import asyncio
import fcntl
import logging
import os
import stat
from pathlib import Path
from queue import SimpleQueue

import pytest

from base.series import Counter, Gauge
from picker.errors import ConfigError
from picker.metrics.picker_metrics import PickerMetrics, RecordingSeries
from picker.recording.file import DiskWriter, LineBatch, Progress, RecordingFile
from picker.recording.lines import AnyLine, Header, Stop, decoded, encoded, read_recording
from tests.support.waiting import until

HEADER = Header(1, "0", "pool", "c.yaml", "kind: x", 7, True, 1.0, 2.0)
LINE = encoded(Stop("filler", 1.0))
JOIN_SECONDS = 120.0


def series() -> RecordingSeries:
    return PickerMetrics().recording


def value(one: Counter | Gauge) -> float:
    ((_, number),) = one.numbers()
    return number


def lines(path: Path) -> list[AnyLine]:
    return [decoded(line) for line in path.read_bytes().splitlines()]


async def write(path: Path, *texts: bytes, max_bytes: int = 10**6) -> RecordingSeries:
    counted = series()
    file = RecordingFile(path, max_bytes, counted)
    assert value(counted.active) == 1
    for text in texts:
        file.write(text, 1.0)
    await file.close(9.0)
    return counted


async def test_only_the_owner_can_read_a_new_file(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    before = os.umask(0)
    try:
        counted = await write(path, encoded(HEADER))
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert lines(path) == [HEADER, Stop("ended", 9.0)]
    assert value(counted.active) == 0
    assert value(counted.bytes_total) == path.stat().st_size


async def test_an_existing_recording_continues_with_another_run(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    await write(path, encoded(HEADER))
    with path.open("ab") as file:
        file.write(b'{"line":"deci')
    await write(path, encoded(HEADER))
    read = [one.line for one in read_recording(path)]
    assert read == [HEADER, Stop("ended", 9.0), None, HEADER, Stop("ended", 9.0)]


@pytest.mark.parametrize("content", [b"notes\n", b'{"line":"stop","reason":"","at":1}\n', b"{"])
async def test_a_file_that_is_no_recording_is_refused_and_unchanged(
    tmp_path: Path, content: bytes
) -> None:
    path = tmp_path / "notes.txt"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="is no recording"):
        RecordingFile(path, 10**6, series())
    assert path.read_bytes() == content


def test_an_unusable_file_is_refused(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path, why in (
        (tmp_path, "cannot write to"),
        (pipe, "is no regular file"),
        (tmp_path / "missing" / "r.jsonl", "cannot write to"),
    ):
        with pytest.raises(ConfigError, match=why):
            RecordingFile(path, 10**6, series())
    path = tmp_path / "r.jsonl"
    with path.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="another picker"):
            RecordingFile(path, 10**6, series())


async def test_the_file_never_grows_beyond_its_size(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "r.jsonl"
    with caplog.at_level(logging.WARNING):
        counted = await write(path, encoded(HEADER), *[LINE] * 100, max_bytes=1000)
    assert path.stat().st_size <= 1000
    assert lines(path)[-1] == Stop("size", 1.0)
    assert len(lines(path)) > 5
    assert value(counted.lost_lines_total) == 0
    assert "requests continue" in caplog.text
    counted = await write(path, encoded(HEADER), max_bytes=1000)
    assert path.stat().st_size <= 1000 + len(encoded(Stop("size", 1.0)))


async def test_a_full_file_does_not_grow_with_another_start(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    await write(path, encoded(HEADER), LINE)
    before = path.read_bytes()
    for _ in range(3):
        await write(path, encoded(HEADER), LINE, max_bytes=len(before))
    assert path.read_bytes() == before


async def test_lines_are_written_while_the_picker_runs(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    file = RecordingFile(path, 10**6, series())
    async with asyncio.timeout(JOIN_SECONDS):
        running = asyncio.create_task(file.run())
        file.write(encoded(HEADER), 1.0)
        await until(lambda: bool(lines(path)))
        running.cancel()
        await file.close(2.0)
    assert lines(path) == [HEADER, Stop("ended", 2.0)]


async def test_no_lines_are_accepted_after_a_loss_until_a_new_beginning(tmp_path: Path) -> None:
    path, counted = tmp_path / "r.jsonl", series()
    file = RecordingFile(path, 10**6, counted)
    file.write(encoded(HEADER), 1.0)
    file.lose("reason", 1.0)
    assert file.is_broken
    file.write(LINE, 1.0)
    assert file.begin_anew() == 2
    assert not file.is_broken
    file.write(LINE, 1.0)
    await file.close(2.0)
    assert lines(path) == [HEADER, decoded(LINE), Stop("ended", 2.0)]
    assert value(counted.lost_lines_total) == 2


def test_a_full_disk_costs_whole_batches_until_the_next_epoch(tmp_path: Path) -> None:
    path, counted, progress = tmp_path / "r.jsonl", series(), Progress()
    batches: SimpleQueue[LineBatch | None] = SimpleQueue()
    fd = os.open(path, os.O_RDONLY | os.O_CREAT, 0o600)  # every write fails
    thread = DiskWriter(path, (fd, 0), batches, progress, counted)
    thread.start()
    for _ in range(2):
        with progress.lock:
            progress.claimed_bytes += len(LINE)
            progress.waiting_bytes += len(LINE)
        batches.put(LineBatch(0, LINE, 1))
    while progress.lost < 2:
        thread.join(0.01)
    assert progress.failed_epoch == 0
    assert (progress.claimed_bytes, progress.waiting_bytes) == (0, 0)
    writable = os.open(path, os.O_RDWR)
    os.dup2(writable, fd)
    os.close(writable)
    progress.waiting_bytes += len(LINE)
    batches.put(LineBatch(1, LINE, 1))
    batches.put(None)
    thread.join(JOIN_SECONDS)
    assert path.read_bytes() == LINE
    assert value(counted.lost_lines_total) == 2
    assert value(counted.bytes_total) == len(LINE)


async def test_a_slow_disk_costs_lines_but_no_memory(tmp_path: Path) -> None:
    path, counted = tmp_path / "r.jsonl", series()
    file = RecordingFile(path, 10**12, counted)
    file._progress.waiting_bytes += 2**40  # as if the disk hung
    file.write(LINE, 1.0)
    assert file.is_broken
    assert value(counted.lost_lines_total) == 1
    file._progress.waiting_bytes -= 2**40
    assert file.begin_anew() == 1
    file.write(LINE, 1.0)
    await file.close(2.0)
    assert lines(path) == [decoded(LINE), Stop("ended", 2.0)]
