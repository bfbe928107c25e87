"""Trace files: what is read of each format, and what is refused."""

from __future__ import annotations

import json
from base64 import b64encode
from pathlib import Path

import pytest

from fleet.bench.traces import read_trace
from fleet.errors import UsageError

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
RECORDED = """\
{"line": "header"}
{"line": "decision", "request": {"received_at": -3, "max_output_tokens": -1, "prompt_bytes": [4]}}
{"line": "end", "usage": {"completion_tokens": -2}}
"""


def test_mooncake(tmp_path: Path) -> None:
    """Times begin at zero and ascend; blocks are of 512 tokens. An answer without tokens, as some
    published traces have, is one of one token.
    """
    path = tmp_path / "trace.jsonl"
    path.write_text(MOONCAKE)
    first, second = read_trace(path, 9)
    assert (first.at_seconds, first.input_tokens, first.output_tokens) == (0.0, 512, 1)
    assert (second.at_seconds, second.input_tokens, second.output_tokens) == (2.0, 1030, 5)
    assert (list(second.block_ids), second.block_tokens) == ([1, 2, 3], 512)


def test_azure(tmp_path: Path) -> None:
    """Of either year: with a zone, too."""
    for text in (AZURE, AZURE.replace("9600,", "9600+00:00,")):
        path = tmp_path / "trace.csv"
        path.write_text(text)
        first, second = read_trace(path, 9)
        assert second.at_seconds == pytest.approx(0.052, abs=1e-6)
        assert (first.input_tokens, first.output_tokens) == (4808, 10)


def test_a_recording_of_the_picker() -> None:
    """In the order of its times."""
    found = read_trace(RECORDING, 9)
    assert len(found) > 10
    times = [one.at_seconds for one in found]
    assert (times[0], sorted(times)) == (0.0, times)
    assert len({one.input_tokens for one in found}) > 1


def test_recorded_prompts_are_lengths_and_equal_beginnings(tmp_path: Path) -> None:
    """Blocks of 64 tokens of four bytes; an answer is as long as it was, or as was asked for."""
    prompts = [b"a" * 512 + b"b" * 512, b"a" * 512 + b"c" * 516]
    lines = ['{"line":"header"}']
    for number, prompt in enumerate(prompts):
        packed = b64encode(prompt).decode()
        request = {"received_at": number, "prompts": [packed], "max_output_tokens": 50}
        lines.append(json.dumps({"line": "decision", "number": number, "request": request}))
    lines.append(json.dumps({"line": "end", "number": 1, "usage": {"completion_tokens": 20}}))
    path = tmp_path / "recording.jsonl"
    path.write_text("\n".join(lines))
    first, second = read_trace(path, 9)
    assert (first.input_tokens, first.output_tokens) == (256, 50)
    assert (second.input_tokens, second.output_tokens) == (257, 20)
    assert (len(first.block_ids), len(second.block_ids)) == (4, 4)
    assert first.block_ids[:2] == second.block_ids[:2]
    assert not set(first.block_ids[2:]) & set(second.block_ids[2:])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "has no request"),
        ("hello\n", "is no trace that is known: Mooncake's JSON lines, Azure's CSV, or"),
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
        (RECORDED, "line 2: Expected `float` >= 0.0 - at `$.request.received_at`"),
        (RECORDED.replace("-3", "3"), "line 3: Expected `int` >= 0 - at `$.usage.completion_tok"),
    ],
)
def test_what_cannot_be_is_one_sentence(text: str, reason: str, tmp_path: Path) -> None:
    """With the line and the field; lengths that are 0 or below become nothing else."""
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        read_trace(path, 9)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_clients_asked_for_is_no_length_of_an_answer(tmp_path: Path) -> None:
    """Their `max_tokens` may be anything: what no server takes counts as none."""
    path = tmp_path / "recording.jsonl"
    for asked, length in ((-1, 9), (1 << 60, 9), (0, 9), (12, 12)):
        text = RECORDED.replace('-3, "max_output_tokens": -1', f'3, "max_output_tokens": {asked}')
        path.write_text("".join(text.splitlines(keepends=True)[:2]) + "\n")
        assert [one.output_tokens for one in read_trace(path, 9)] == [length]


def test_a_trace_of_years_has_other_units(tmp_path: Path) -> None:
    """Nanoseconds, say: nothing would wait for them, and nothing would end."""
    path = tmp_path / "trace"
    path.write_text(MOONCAKE.replace("3000", "4e15"))
    with pytest.raises(UsageError, match=r"lasts 126,493 years; .* milliseconds"):
        read_trace(path, 9)


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="is no text; if it is compressed"):
        read_trace(path, 9)
