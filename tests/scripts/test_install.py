"""What `make up` installs, and how a failed installation ends."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from scripts import install

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("target", "arguments", "extra"),
    [
        ("up", "", "fleet"),
        ("up", "--workers 3 --engine torch", "fleet"),
        ("up", "--engine sim --workers 10", "sim"),
        ("up", "--engine=sim", "sim"),
        ("test", "", "dev"),
    ],
)
def test_make_installs_what_is_asked_for(
    target: str, arguments: str, extra: str, tmp_path: Path
) -> None:
    """In a clone that nothing has been installed for."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    command = ["make", "--dry-run", "-C", str(tmp_path), target, f"ARGS={arguments}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert f"scripts/install.py {extra}\n" in done.stdout


def test_pip_has_the_last_word_on_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its status and its output, which a success does not show."""
    script = "print('Collecting torch'); import sys; sys.exit('ERROR: disk full')"
    monkeypatch.setattr(install, "_PIP", (install.sys.executable, "-c", script))
    assert install.main("sim") == 1
    out, error = capsys.readouterr()
    assert out == ""
    assert error == "Collecting torch\nERROR: disk full\n\n"
