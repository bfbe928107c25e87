"""A file is read again when it may have changed, with or without a notification."""

import asyncio
import os
import struct
from contextlib import aclosing, suppress
from pathlib import Path

import pytest

from picker import file_changes
from picker.file_changes import concern, moments_to_look


def events(*names: str) -> bytes:
    """The kernel's form: names end with zeros up to a multiple of the head's size."""
    padded = [name.encode() + b"\0" * (16 - len(name) % 16) for name in names]
    return b"".join(struct.pack("iIII", 1, 0x80, 0, len(one)) + one for one in padded)


def open_watches() -> int:
    found = 0
    for one in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            found += "inotify" in os.readlink(one)
    return found


async def test_without_a_watch_there_is_still_a_moment_every_second(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine has a limited number of watches; the picker serves without them, too."""
    monkeypatch.setattr(file_changes, "RECHECK_MS", 1)
    async with aclosing(moments_to_look(tmp_path / "missing", "f")) as moments:
        await anext(moments)
        await anext(moments)
    assert "missing cannot be watched (" in caplog.text


async def test_the_watch_is_closed_with_the_moments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_changes, "RECHECK_MS", 1)
    before = open_watches()
    async with aclosing(moments_to_look(tmp_path, "f")) as moments:
        await anext(moments)
        assert open_watches() == before + 1
    assert open_watches() == before


@pytest.mark.parametrize("way", ["written", "replaced", "linked", "removed"])
async def test_a_change_of_the_file_is_reported_by_the_kernel(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_changes, "RECHECK_MS", 3_600_000)
    file, other = tmp_path / "f", tmp_path / "g"
    file.write_text("old")
    other.write_text("new")
    async with aclosing(moments_to_look(tmp_path, "f", debounce_ms=0)) as moments:
        moment = asyncio.ensure_future(anext(moments))
        await asyncio.sleep(0)
        match way:
            case "written":
                file.write_text("new")
            case "replaced":
                other.rename(file)
            case "linked":
                (tmp_path / "..data_tmp").symlink_to(other)
            case _:
                file.unlink()
        await moment


@pytest.mark.parametrize(
    ("changed", "counts"),
    [
        (("f",), True),
        (("..data",), True),
        (("",), True),
        (("g", "f.swp", "f"), True),
        (("g", "f.swp", "log"), False),
    ],
)
def test_only_changes_of_the_file_and_of_volumes_count(
    changed: tuple[str, ...], counts: bool
) -> None:
    assert concern(events(*changed), ("f", "h")) is counts


async def test_lines_of_a_growing_file_are_no_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A log in the same folder must not wake the picker with each line."""
    monkeypatch.setattr(file_changes, "RECHECK_MS", 3_600_000)
    growing = (tmp_path / "f").open("w")
    async with aclosing(moments_to_look(tmp_path, "f", debounce_ms=0)) as moments:
        moment = asyncio.ensure_future(anext(moments))
        await asyncio.sleep(0)
        growing.write("line\n")
        growing.flush()
        for _ in range(10):
            await asyncio.sleep(0)
        assert not moment.done()
        growing.close()
        await moment
