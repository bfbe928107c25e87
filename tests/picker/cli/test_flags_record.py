"""The flags of a recording."""

from __future__ import annotations

from pathlib import Path

import pytest

from picker.cli.flags import build_parser, options_of
from picker.cli.options import RecordFlags


def recording(*argv: str) -> RecordFlags | None:
    """What a command line asks for."""
    return options_of(build_parser().parse_args(["--endpoints-file", "e.yaml", *argv])).record


def test_nothing_is_recorded_unless_it_is_asked_for() -> None:
    """Also where the flag is rendered empty."""
    assert recording() is None
    assert recording("--record", "") is None


def test_a_recording_has_a_size_and_prompts_unless_told_otherwise() -> None:
    """A gibibyte."""
    assert recording("--record", "r") == RecordFlags(Path("r"), 2**30, keeps_prompts=True)
    argv = ("--record=r", "--record-max-bytes=100Mi", "--no-record-prompts")
    assert recording(*argv) == RecordFlags(Path("r"), 100 * 2**20, keeps_prompts=False)


@pytest.mark.parametrize("size", ["1Ki", "-1", "much"])
def test_a_size_that_cannot_be_meant_is_refused(size: str) -> None:
    """As any flag that cannot be understood."""
    with pytest.raises(SystemExit):
        recording("--record", "r", f"--record-max-bytes={size}")
