"""Commands whose output is not read to its end, with a real pipe."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fleet.broken_pipe import STATUS

FREE = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
TABLE = (
    "import sys; from rich.console import Console; from fleet.broken_pipe import status_of; "
    "sys.exit(status_of(lambda: Console().print('it') or 0))"
)


def unread(*words: str, environment: dict[str, str] | None = None) -> tuple[int, str]:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            [sys.executable, *words],
            stdout=writing,
            stderr=subprocess.PIPE,
            env=FREE if environment is None else environment,
            text=True,
            check=False,
            timeout=60,
        )
    finally:
        os.close(writing)
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    "words",
    [("doctor", "--list"), ("doctor", "--help"), ("config", "check", "{config}"), ("version",)],
    ids=lambda words: words[0] + words[-1],
)
def test_commands_end_without_a_word(words: tuple[str, ...], tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\n")
    given = [one.format(config=config) for one in words]
    assert unread("-m", "fleet.commands.cli", *given) == (141, "")


def test_tables_end_without_a_word() -> None:
    """The library that draws them ends the program itself."""
    assert unread("-c", TABLE) == (141, "")


def test_the_first_line_of_a_longer_report() -> None:
    """Like `head -1`, the reader disconnects in the middle."""
    with subprocess.Popen(
        [sys.executable, "-m", "fleet.commands.cli", "doctor", "--envoy-config", "/no/such"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        assert process.stdout.readline() == "Errors (1)\n"
        process.stdout.close()
        assert "Traceback" not in process.stderr.read()
        assert process.wait() in (2, STATUS)  # it may have written everything before


def test_other_pipes_and_other_ends_are_not_hidden() -> None:
    begin = "import sys; from fleet.broken_pipe import status_of; "
    for ending, status in (
        ("status_of(lambda: exec('raise BrokenPipeError'))", 1),
        ("status_of(lambda: sys.exit(3))", 3),
        ("sys.exit(status_of(lambda: 2))", 2),
    ):
        done = subprocess.run(
            [sys.executable, "-c", begin + ending], capture_output=True, check=False, timeout=60
        )
        assert done.returncode == status
        assert (b"BrokenPipeError" in done.stderr) == (status == 1)
