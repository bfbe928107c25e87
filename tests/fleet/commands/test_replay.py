"""The output and exit statuses of `pointsman replay`."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from fleet.command_lines import parser_of
from fleet.commands.cli import main
from fleet.commands.replay import replay_command
from tests.support.picker.recorded_traffic import BLEND, Traffic, record

given = parser_of("replay").parse_args


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(Traffic([BLEND], seed=4), 200, tmp_path_factory.mktemp("r") / "r.jsonl")


@pytest.fixture
def other(tmp_path: Path) -> Path:
    path = tmp_path / "new.yaml"
    path.write_text(BLEND.replace("weight: 3", "weight: 30"))
    return path


def test_identical_decisions_are_counted_and_status_0(
    recording: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(recording)]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    number, _, rest = line.partition(" ")
    assert rest == f"decisions, {number} identical"


def test_differences_are_listed_with_their_lines_and_status_1(
    recording: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "changed.jsonl"
    path.write_text(recording.read_text().replace('"waiting_requests":7', '"waiting_requests":6'))
    assert main(["replay", str(path), "--limit", "2"]) == 1
    lines = capsys.readouterr().out.splitlines()
    listed = [line for line in lines if line.startswith("line ")]
    assert len(listed) == 2
    assert "request " in listed[0]
    assert " → " in listed[0]
    assert any(line.startswith("… and ") for line in lines)


def test_nothing_of_a_recording_is_obeyed_by_a_terminal(recording: Path, tmp_path: Path) -> None:
    """Clients choose ids of requests, and senders of a recording choose all of it."""
    path = tmp_path / "changed.jsonl"
    text = recording.read_text().replace('"waiting_requests":7', '"waiting_requests":6')
    path.write_text(text.replace('"id":"', r'"id":"\u001b]0;owned\u0007\u009b2J'))
    out = Console(file=io.StringIO(), width=100)
    assert replay_command(given([str(path)]), out, lambda _: None) == 1
    printed = out.file.getvalue()  # type: ignore[attr-defined]
    assert "owned" in printed
    assert not {"\x1b", "\x07", "\x9b"} & set(printed)
    path.write_text(r'{"line":"\u001b]0;owned\u0007"}')
    errors: list[str] = []
    assert replay_command(given([str(path)]), out, errors.append) == 2
    assert errors
    assert "\x1b" not in "".join(errors)


def test_another_configuration_shows_what_it_would_change(
    recording: Path, other: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(recording), "--config", str(other)]) == 0
    text = capsys.readouterr().out
    assert f"decisions, now by {other}" in text
    assert "matched at the chosen endpoint" in text
    assert "requests per endpoint\n  endpoint " in text
    assert "moves\n  requests  from " in text
    assert "\x1b" not in text


def test_a_terminal_is_shown_tables(recording: Path, other: Path) -> None:
    out = Console(file=io.StringIO(), force_terminal=True, width=100)
    assert replay_command(given([str(recording), "--config", str(other)]), out, lambda _: None) == 0
    assert "┃" in out.file.getvalue()  # type: ignore[attr-defined]


def test_json_is_complete(recording: Path, other: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(recording), "--config", str(other), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    shares = report["comparison"]
    assert (report["file"], report["config"], report["runs"]) == (str(recording), str(other), 1)
    for when in ("before", "now"):
        assert sum(share[when] for share in shares["shares"]) == shares["decisions"]
    assert sum(move["requests"] for move in shares["moves"]) == shares["moved"] > 0
    assert shares["matched_tokens_now"] > shares["matched_tokens_before"]
    assert report["notes"] == {}


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "No such file"),
        (b"hello\n", ":1: no recording"),
        (b'{"line":"header"}\n', ":1: no recording: Object missing required field"),
    ],
)
def test_a_broken_recording_is_reported_with_its_line(
    tmp_path: Path, content: bytes | None, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "r.jsonl"
    if content is not None:
        path.write_bytes(content)
    assert main(["replay", str(path)]) == 2
    shares = capsys.readouterr().err
    assert shares.startswith(f"pointsman: {path}:")
    assert why in shares


def test_a_broken_configuration_is_reported(
    recording: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text(BLEND.replace("queue-scorer", "queue-scorrer"))
    assert main(["replay", str(recording), "--config", str(bad)]) == 2
    assert f"{bad}:4:" in capsys.readouterr().err
    assert main(["replay", str(recording), "--config", str(tmp_path / "none.yaml")]) == 2


def test_a_half_written_end_is_tolerated_and_reported(
    recording: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The picker was killed while it wrote."""
    path = tmp_path / "r.jsonl"
    path.write_bytes(recording.read_bytes()[:-30])
    assert main(["replay", str(path)]) == 0
    assert "is half-written" in capsys.readouterr().out
