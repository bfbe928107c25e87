"""Recordings with lost lines: the replay repeats the remaining decisions and notes the loss."""

import asyncio
from pathlib import Path

from picker.config.build import DEFAULT_CONFIG
from picker.recording.lines import Config, DecisionLine, Lost, decoded, encoded
from tests.support.picker.recorded_traffic import Traffic, record, replayed

BUILT_IN = DEFAULT_CONFIG.decode()
OTHER = BUILT_IN.replace("weight: 3", "weight: 30")


def test_a_replay_continues_after_lost_lines(tmp_path: Path) -> None:
    traffic = Traffic([BUILT_IN], seed=2)
    asyncio.run(traffic.run(50))
    traffic.sink.lose("the disk was full", 0.0)
    asyncio.run(traffic.run(50))
    found = replayed(traffic.sink.write_to(tmp_path / "r"))
    assert any("lines were lost while recording" in note for note in found.notes)
    assert len(found.decisions) > 80
    assert found.different == []
    assert found.runs == 1  # the repeated header begins no other


def test_a_recording_whose_beginning_was_lost_can_be_read(tmp_path: Path) -> None:
    traffic = Traffic([BUILT_IN, OTHER], seed=2)
    traffic.sink.lose("the disk was full", 0.0)
    traffic.sink.lines.clear()
    traffic.reload(OTHER)
    asyncio.run(traffic.run(50))
    found = replayed(traffic.sink.write_to(tmp_path / "r"))
    assert any("lines were lost while recording" in note for note in found.notes)
    assert len(found.decisions) > 40
    assert found.runs == 1


def test_a_run_with_a_lost_beginning_does_not_continue_the_previous_run(tmp_path: Path) -> None:
    first, other = Traffic([BUILT_IN], seed=2), Traffic([OTHER], seed=3)
    content = record(first, 50, tmp_path / "r").read_bytes()
    other.sink.lose("the disk was full", 0.0)
    other.sink.lines.clear()
    path = record(other, 50, tmp_path / "r")
    path.write_bytes(content + path.read_bytes())
    found = replayed(path)
    assert found.runs == 2
    assert found.different == []


def test_a_decision_of_a_lost_configuration_is_noted(tmp_path: Path) -> None:
    traffic = Traffic([BUILT_IN, OTHER, BUILT_IN], seed=2)
    path = record(traffic, 300, tmp_path / "r")
    lines = [decoded(one) for one in traffic.sink.lines]
    lost = next(i for i, one in enumerate(lines) if isinstance(one, Config) and one.number == 1)
    path.write_bytes(b"".join(encoded(Lost(1) if i == lost else x) for i, x in enumerate(lines)))
    found = replayed(path)
    by = [one.config for one in lines if isinstance(one, DecisionLine)]
    assert len(found.decisions) == len(by) - by.count(1)
    text = "decided by a configuration that was lost, and not repeated"
    assert found.notes[text] == by.count(1) > 0
