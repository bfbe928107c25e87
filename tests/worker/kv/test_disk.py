"""Files of blocks: what is written is read again; whatever is wrong with a file, it is no hit."""

import os
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from tests.support.worker.kv_engines import until
from worker.errors import ConfigError
from worker.kv.disk import (
    READ_SECONDS,
    BlockFiles,
    DiskRead,
    Found,
    Left,
    Lost,
    StoredBlock,
    Written,
    check_directory,
)

SIZE = 64
BLOCKS = [StoredBlock(bytes([n] * 32), b"facts of %d" % n) for n in range(4)]


def data(number: int) -> memoryview:
    return memoryview(bytearray([number]) * SIZE)


Report = Written | Found | Lost | Left


def reports(files: BlockFiles, count: int) -> list[Report]:
    found: list[Report] = []

    def has_all() -> bool:
        found.extend(files.take_reports())
        return len(found) >= count

    until(has_all)
    return found


def finished(read: DiskRead) -> bytes | None:
    until(lambda: read.done)
    part = None if read.part is None else bytes(read.part.data)
    read.close()
    return part


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[..., BlockFiles]]:
    with ExitStack() as stack:

        def make(identity: str = "i", clock: Callable[[], float] = lambda: 0.0) -> BlockFiles:
            files = BlockFiles(tmp_path, identity, SIZE, clock)
            stack.callback(files.close)
            return files

        yield make


@pytest.fixture
def files(opened: Callable[..., BlockFiles]) -> BlockFiles:
    files = opened()
    for number, block in enumerate(BLOCKS):
        files.write(number, block, data(number), 7)
    assert reports(files, 5) == [Found(()), *(Written(n, True, 7) for n in range(4))]
    return files


def left(*numbers: int) -> frozenset[str]:
    return frozenset({"lock", *(BLOCKS[number].digest.hex() for number in numbers)})


def path(files: BlockFiles, number: int) -> Path:
    return files.directory / f"{BLOCKS[number].digest.hex()}.kv"


def test_written_blocks_are_read(files: BlockFiles) -> None:
    read = files.read(BLOCKS[1:3], 16, 24)
    assert finished(read) == bytes(data(1)) + bytes(data(2))
    read = files.read(BLOCKS[1:3], 16, 24)
    until(lambda: read.done)
    assert (read.part.start, read.part.end) == (16, 24)
    read.close()
    assert read.part is None
    assert (files.bytes_written, files.bytes_read) == (4 * SIZE, 4 * SIZE)
    assert files.num_failures == 0


def test_a_restart_finds_files(opened: Callable[..., BlockFiles], files: BlockFiles) -> None:
    for number, seconds in ((0, 30), (1, 10), (2, 20)):
        os.utime(path(files, number), (seconds, seconds))
    files.delete([BLOCKS[3].digest])
    files.close()
    (files.directory / "0.kv.tmp").write_bytes(b"half")
    (files.directory / "1.kv").write_bytes(b"half")
    again = opened()
    assert again.directory == files.directory
    assert reports(again, 1) == [Found(tuple(BLOCKS[n].facts for n in (1, 2, 0)))]
    assert sorted(again.directory.glob("*.*")) == sorted(path(files, n) for n in range(3))
    assert again.num_failures == 1
    assert finished(again.read(BLOCKS[:3], 0, 12)) == b"".join(map(bytes, map(data, range(3))))


def test_each_engine_has_a_directory_of_its_own(opened: Callable[..., BlockFiles]) -> None:
    one, other, third = opened(), opened(), opened("j")
    assert len({one.directory, other.directory, third.directory}) == 3
    one.close()
    assert opened().directory == one.directory


@pytest.mark.parametrize("damage", ["cut", "longer", "head", "facts", "data", "other", "dir"])
def test_a_wrong_file_ends_a_read(files: BlockFiles, damage: str) -> None:
    file = path(files, 1)
    whole = bytearray(file.read_bytes())
    if damage in ("head", "facts", "data"):
        whole[{"head": 3, "facts": -SIZE - 3, "data": -5}[damage]] ^= 1
    file.unlink()
    if damage == "cut":
        file.write_bytes(whole[:-1])
    elif damage == "longer":
        file.write_bytes(whole + b"x")
    elif damage == "other":
        path(files, 2).rename(file)
    elif damage == "dir":
        file.mkdir()
    else:
        file.write_bytes(whole)
    assert finished(files.read(BLOCKS[:3], 0, 12)) == bytes(data(0))
    lost = Lost(BLOCKS[1].digest)
    assert reports(files, 1) == [lost]
    until(lambda: damage == "dir" or not file.exists())
    assert finished(files.read(BLOCKS[1:2], 4, 8)) is None
    gone = Left(left(0, 3) if damage == "other" else left(0, 2, 3))
    assert reports(files, 1) == [lost if damage == "dir" else gone]


def test_a_full_disk_is_reported(files: BlockFiles) -> None:
    half = path(files, 0).with_suffix(".kv.tmp")
    half.symlink_to("/dev/full")
    files.write(5, BLOCKS[0], data(9), 8)
    files.write(6, BLOCKS[1], data(1), 8)
    assert reports(files, 2) == [Written(5, False, 8), Written(6, True, 8)]
    assert files.num_failures == 1
    assert not half.is_symlink()
    assert finished(files.read(BLOCKS[:1], 0, 4)) == bytes(data(0))


def test_others_deletions_are_reported(files: BlockFiles, caplog: pytest.LogCaptureFixture) -> None:
    """The number of lost blocks is logged once, not for each file."""
    for number in (0, 2):
        path(files, number).unlink()
    assert finished(files.read(BLOCKS[:1], 0, 4)) is None
    assert finished(files.read(BLOCKS[1:3], 4, 12)) == bytes(data(1))
    assert reports(files, 2) == [Left(left(1, 3))] * 2
    assert files.num_failures == 2
    assert not caplog.records


def test_a_directory_that_was_deleted_is_made_again(
    files: BlockFiles, opened: Callable[..., BlockFiles], caplog: pytest.LogCaptureFixture
) -> None:
    shutil.rmtree(files.directory)
    files.write(5, BLOCKS[0], data(0), 8)
    files.write(6, BLOCKS[1], data(1), 8)
    written = [Written(5, True, 8), Written(6, True, 8)]
    assert reports(files, 3) == [Left(left()), *written]
    assert finished(files.read(BLOCKS[:2], 0, 8)) == bytes(data(0)) + bytes(data(1))
    shutil.rmtree(files.directory)
    other = opened()  # which takes the name meanwhile
    assert finished(files.read(BLOCKS[:1], 0, 4)) is None
    assert reports(files, 1) == [Left(left())]
    files.write(7, BLOCKS[2], data(2), 8)
    assert reports(files, 1) == [Written(7, True, 8)]
    assert finished(files.read(BLOCKS[2:3], 8, 12)) == bytes(data(2))
    assert files.directory != other.directory
    assert len(caplog.records) == 2


def test_without_a_directory_a_disk_is_off(
    opened: Callable[..., BlockFiles], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = opened("sub/i")
    shutil.rmtree(tmp_path / "sub")
    (tmp_path / "sub").write_text("")
    for number in range(2):
        files.write(number, BLOCKS[0], data(0), 8)
        assert finished(files.read(BLOCKS[:1], 0, 4)) is None
    nothing = Left(frozenset())
    tried = [[nothing, Written(number, False, 8), nothing] for number in range(2)]
    assert reports(files, 7)[1:] == tried[0] + tried[1]
    logged = [record.getMessage() for record in caplog.records]
    assert [text.partition(":")[0] for text in logged] == [
        "KV on disk cannot be listed",
        "KV cannot be written to disk",
    ]
    (tmp_path / "sub").unlink()
    files.write(2, BLOCKS[0], data(0), 8)
    assert reports(files, 2) == [Left(left()), Written(2, True, 8)]


def test_a_read_that_hangs_is_given_up(opened: Callable[..., BlockFiles], tmp_path: Path) -> None:
    """The clock decides, although the thread still hangs in it; then others are not begun."""
    now = 0.0
    files = opened(clock=lambda: now)
    assert reports(files, 1) == [Found(())]  # no thread looks for files any more
    file = path(files, 0)
    os.mkfifo(file)  # a reader waits for a writer
    first, second = files.read(BLOCKS[:1], 0, 4), files.read(BLOCKS[1:2], 4, 8)
    writers: list[int] = []

    def is_read() -> bool:
        with suppress(OSError):  # no reader has opened it yet
            writers.append(os.open(file, os.O_WRONLY | os.O_NONBLOCK))
        return bool(writers)

    until(is_read)
    assert [first.done, second.done, files.is_stuck] == [False] * 3
    now = READ_SECONDS + 1
    assert first.done
    assert second.done
    assert files.is_stuck
    first.close()
    second.close()
    assert (first.part, second.part, files.num_failures) == (None, None, 2)
    os.close(writers[0])
    assert reports(files, 1) == [Lost(BLOCKS[0].digest)]
    until(lambda: not files.is_stuck)
    assert finished(files.read(BLOCKS[2:3], 0, 4)) is None


def test_reads_wait_for_room(
    opened: Callable[..., BlockFiles], files: BlockFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One read alone may be larger than the room."""
    monkeypatch.setattr("worker.kv.disk.MAX_INBOUND_BYTES", SIZE)
    first = files.read(BLOCKS[:2], 0, 8)
    until(lambda: first.done)
    second = files.read(BLOCKS[2:3], 8, 12)
    third = files.read(BLOCKS[3:4], 12, 16)
    third.close()
    assert not second.done
    first.close()
    assert finished(second) == bytes(data(2))


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_a_directory_that_cannot_be_made_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("")
    for begin in (check_directory, lambda parent: BlockFiles(parent, "i", SIZE)):
        with pytest.raises(ConfigError, match=r"--kv-offloading-path .*: Not a directory; give a"):
            begin(tmp_path / name)


def test_a_full_disk_may_be_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    check_directory(tmp_path / "made")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        check_directory(tmp_path / "made")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list((tmp_path / "made").iterdir())
    assert [record.levelname for record in caplog.records] == ["WARNING"]
