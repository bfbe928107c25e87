"""Recordings are read, or refused with the number of the invalid line."""

from pathlib import Path

import pytest

from picker.recording.lines import Header, RecordingError, Stop, encoded, read_recording

HEADER = Header(1, "0", "pool", "c.yaml", "kind: x", 7, True, 1.0, 2.0)
FIRST, LAST = encoded(HEADER), encoded(Stop("ended", 3.0))


def read(path: Path, content: bytes) -> list[object]:
    path.write_bytes(content)
    return [one.line for one in read_recording(path)]


def test_a_half_written_last_line_is_tolerated(tmp_path: Path) -> None:
    for cut in range(1, len(LAST) - 1):
        assert read(tmp_path / "r", FIRST + LAST[:cut]) == [HEADER, None]
    assert read(tmp_path / "r", FIRST + LAST[:-1]) == [HEADER, Stop("ended", 3.0)]


def test_only_another_run_may_follow_a_half_written_line(tmp_path: Path) -> None:
    torn = LAST[:9] + b"\n"
    assert read(tmp_path / "r", FIRST + torn + FIRST) == [HEADER, None, HEADER]
    with pytest.raises(RecordingError, match=r"r:2: no line of a recording"):
        read(tmp_path / "r", FIRST + torn + LAST)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", r"r: empty, no recording"),
        (b"hello\n", r"r:1: no recording"),
        (LAST, r"r:1: no recording: it does not begin with a header"),
        (FIRST[:20], r"r:1: no recording"),
        (FIRST + b"\n" + LAST, r"r:2: no line of a recording"),
        (FIRST + b'{"line":"stop","reason":1,"at":2}\n' + LAST, r"r:2: .*\$\.reason"),
        (FIRST + b'{"line":"other"}\n' + LAST, r"r:2: no line of a recording: .*'other'"),
        (FIRST + b"\xff\xfe\n" + LAST, r"r:2: no line"),
        (FIRST + b"[" * 100_000 + b"\n" + LAST, r"r:2: no line"),
        (FIRST.replace(b'"format_version":1', b'"format_version":2'), r"r:1: format 2, .* reads 1"),
    ],
)
def test_an_error_names_its_line(tmp_path: Path, content: bytes, why: str) -> None:
    with pytest.raises(RecordingError, match=why):
        read(tmp_path / "r", content)


def test_a_file_that_cannot_be_opened_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match="No such file"):
        list(read_recording(tmp_path / "missing"))
    with pytest.raises(RecordingError, match="directory"):
        list(read_recording(tmp_path))
