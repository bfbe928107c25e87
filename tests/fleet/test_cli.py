"""The `pointsman` command."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fleet.cli import main, with_default_model


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """`pointsman version` names the program and its version."""
    assert main(["version"]) == 0
    assert capsys.readouterr().out.startswith("pointsman 0.")


def test_a_problem_is_one_line_and_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    """What the user can act on comes without a traceback."""
    assert main(["up", "--engine", "sim", "--host", "0.0.0.0"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("pointsman: 0.0.0.0 can be reached from other machines")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--workers", "0"], "--workers is between 1 and 256, not 0"),
        (["--workers", "10000", "--config", "/no/such"], "between 1 and 256, not 10000"),
        (["--host", "localhost"], "takes an IP address"),
        (["--config", "/no/such"], "no configuration file at /no/such"),
    ],
)
def test_what_cannot_work_is_said_at_once(
    flags: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Impossible options never start a process."""
    assert main(["up", "--engine", "sim", *flags]) == 1
    assert reason in capsys.readouterr().err


def test_an_unknown_flag_is_refused() -> None:
    """Nothing is ignored silently, abbreviations included."""
    for argv in (["up", "--work", "2"], ["down"], []):
        with pytest.raises(SystemExit) as caught:
            main(argv)
        assert caught.value.code == 2


def test_a_worker_gets_the_model_it_was_asked_to_serve(tmp_path: Path) -> None:
    """Names are resolved to paths; other flags stay as they are."""
    model = tmp_path / "m.gguf"
    model.write_bytes(b"GGUF")
    completed = with_default_model(["--port", "1", f"--model={model}", "--dtype", "float32"])
    assert completed == [
        *("--port", "1", "--dtype", "float32"),
        *("--engine", "torch", "--model", str(model)),
    ]


@pytest.mark.parametrize("argv", [["--engine", "sim"], ["--help"], ["--engine=sim", "--port", "1"]])
def test_no_model_is_fetched_that_nobody_needs(argv: list[str]) -> None:
    """The simulator and the help text do without."""
    assert with_default_model(argv) == argv


def test_the_command_starts_light() -> None:
    """No subcommand's room is imported before it runs."""
    heavy = "{'torch', 'grpc', 'envoy', 'httpx', 'picker', 'worker'}"
    code = f"import sys, fleet.cli; print(*{heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr
