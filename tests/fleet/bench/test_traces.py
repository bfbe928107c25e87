"""Trace files: the fields of each format, and the errors."""

import time
from pathlib import Path
from typing import Any

import pytest

from fleet.bench.traces import read_trace
from fleet.bench.workload import TracedRequest
from fleet.errors import UsageError
from picker.recording.lines import DecisionLine, End, Header, RequestLine, encoded
from picker.types import Usage

RECORDING = Path(__file__).parents[2] / "golden" / "decisions" / "recording.jsonl"
MOONCAKE = """\
{"timestamp": 3000, "input_length": 1030, "output_length": 5, "hash_ids": [1, 2, 3]}
{"timestamp": 1000, "input_length": 512, "output_length": 0, "hash_ids": [1]}
"""
AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,3180,8
"""


def read(folder: Path, content: str | bytes) -> list[TracedRequest]:
    path = folder / "trace"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return list(read_trace(path, 9))


def header(at: float = 0.0, unix: float = 0.0) -> bytes:
    return encoded(Header(1, "test", "pool", "a.yaml", "first", 7, True, at, unix))


def decision(number: int, at: float, **request: Any) -> bytes:
    line = RequestLine("r", "openai", {}, at, **request)
    return encoded(DecisionLine(number, 0, at, 0, line))


def end(number: int, tokens: int) -> bytes:
    return encoded(End(number, "r", "completed", 0.0, Usage(completion_tokens=tokens)))


def test_mooncake(tmp_path: Path) -> None:
    """Some published traces have answers without tokens; each counts as one token."""
    first, second = read(tmp_path, MOONCAKE)
    assert (first.at_seconds, first.input_tokens, first.output_tokens) == (0.0, 512, 1)
    assert (second.at_seconds, second.input_tokens, second.output_tokens) == (2.0, 1030, 5)
    assert (list(second.block_ids), second.block_tokens) == ([1, 2, 3], 512)


def test_azure(tmp_path: Path) -> None:
    for text in (AZURE, AZURE.replace("9600,", "9600+00:00,")):
        first, second = read(tmp_path, text)
        assert second.at_seconds == pytest.approx(0.052, abs=1e-6)
        assert (first.input_tokens, first.output_tokens) == (4808, 10)


def test_azures_times_are_the_same_where_clocks_are_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = AZURE.replace("16 18:17:03", "05 00:17:03").replace("16 18:17", "05 03:17")
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "EST5EDT,M3.2.0,M11.1.0")
        time.tzset()
        _, second = read(tmp_path, text)
    time.tzset()
    assert second.at_seconds == pytest.approx(3 * 3600 + 0.052, abs=1e-6)


def test_a_recording_of_the_picker() -> None:
    found = read_trace(RECORDING, 9)
    assert len(found) > 10
    times = [one.at_seconds for one in found]
    assert (times[0], sorted(times)) == (0.0, times)
    assert len({one.input_tokens for one in found}) > 1


def test_recorded_prompts_are_lengths_and_equal_beginnings(tmp_path: Path) -> None:
    """Blocks are of 64 tokens of four bytes; an answer is as long as recorded, or as requested."""
    prompts = [b"a" * 512 + b"b" * 512, b"a" * 512 + b"c" * 516]
    lines = [
        decision(number, number, prompts=(prompt,), max_output_tokens=50)
        for number, prompt in enumerate(prompts)
    ]
    first, second = read(tmp_path, b"".join([header(), *lines, end(1, 20)]))
    assert (first.input_tokens, first.output_tokens) == (256, 50)
    assert (second.input_tokens, second.output_tokens) == (257, 20)
    assert (len(first.block_ids), len(second.block_ids)) == (4, 4)
    assert first.block_ids[:2] == second.block_ids[:2]
    assert not set(first.block_ids[2:]) & set(second.block_ids[2:])


def test_a_recording_of_two_runs_has_the_requests_of_both(tmp_path: Path) -> None:
    """Each run numbers its requests from the start, and may end within a line."""
    first = header(500.0, 1000.0) + decision(0, 501.0, prompt_bytes=(40,)) + end(0, 3)
    second = header(2.0, 1060.0) + decision(0, 3.0, prompt_bytes=(80,)) + end(0, 4)
    found = read(tmp_path, first + second + decision(1, 4.0)[:40])
    numbers = [(one.at_seconds, one.input_tokens, one.output_tokens) for one in found]
    assert numbers == [(0.0, 10, 3), (60.0, 20, 4)]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "has no request"),
        ("hello\n", "is not a known trace: Mooncake's JSON lines, Azure's CSV, or"),
        ("{}\n", "line 1: Object missing required field"),
        ("TIMESTAMP,ContextTokens\n2023-11-16 18:17:03,12\n", "is no column GeneratedTokens"),
        (AZURE + "yesterday,1,1\n", "line 4: Invalid RFC3339 encoded datetime - at `$.TIMESTAMP`"),
        (AZURE + "2023-11-16 18:17:05,1.5,1\n", "line 4: Expected `int` - at `$.ContextTokens`"),
        (AZURE + "2023-11-16 18:17:05,0,1\n", "line 4: Expected `int` >= 1 - at `$.ContextTok"),
        (AZURE + "2023-11-16 18:17:05,1,-1\n", "line 4: Expected `int` >= 0 - at `$.Generated"),
        (AZURE + "2023-11-16 18:17:05,1\n", "line 4: Expected `int`, got `null` - at `$.Gener"),
        *(
            (MOONCAKE + MOONCAKE[:80].replace(now, then), f"line 3: {why} - at `$.{field}`")
            for now, then, why, field in (
                ("3000", "-1", "Expected `float` >= 0.0", "timestamp"),
                ("1030", "0", "Expected `int` >= 1", "input_length"),
                ("1030", "10000000", "Expected `int` <= 9999999", "input_length"),
                ("1030", "10.5", "Expected `int`, got `float`", "input_length"),
                (": 5", ": -5", "Expected `int` >= 0", "output_length"),
            )
        ),
        (header() + decision(0, -3.0), ":2: a time or length is below 0"),
        (header() + decision(0, 3.0, prompt_bytes=(-4,)), ":2: a time or length is below 0"),
        (header() + end(0, -2), ":2: usage.completion_tokens is not from 0 to 9,999,999"),
        (header() + b"{}\n" + end(0, 2), ":2: no line of a recording: "),
    ],
)
def test_an_invalid_trace_is_one_sentence(text: str | bytes, reason: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        read(tmp_path, text)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_requested_length_is_no_length_of_an_answer(tmp_path: Path) -> None:
    for asked, length in ((-1, 9), (1 << 60, 9), (0, 9), (12, 12)):
        [one] = read(tmp_path, header() + decision(0, 3.0, max_output_tokens=asked))
        assert one.output_tokens == length


def test_a_trace_of_years_has_other_units(tmp_path: Path) -> None:
    """In other units, such as nanoseconds, the run would never end."""
    with pytest.raises(UsageError, match=r"lasts 126,493 years; .* milliseconds"):
        read(tmp_path, MOONCAKE.replace("3000", "4e15"))


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is no text; if it is compressed"):
        read(tmp_path, b"\xff\xfe\x00")
