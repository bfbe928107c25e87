"""shellcheck has nothing to say about any script of the repository."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHEBANG = re.compile(rb"#!.*\b(?:ba|da)?sh\b")


def scripts() -> list[Path]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    found = []
    for name in listed.stdout.splitlines():
        path = ROOT / name
        if path.is_file() and (path.suffix == ".sh" or _is_for_a_shell(path)):
            found.append(path)
    return found


def _is_for_a_shell(path: Path) -> bool:
    with path.open("rb") as file:
        return SHEBANG.match(file.readline(80)) is not None


def _checked(*paths: Path) -> subprocess.CompletedProcess[str]:
    command = [
        str(Path(sys.executable).with_name("shellcheck")),
        "--external-sources",
        *map(str, paths),
    ]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_scripts_have_no_fault() -> None:
    found = scripts()
    assert {"run", "drain.sh"} <= {path.name for path in found}
    done = _checked(*found)
    assert done.returncode == 0, done.stdout


if not (ROOT / ".git").exists():
    pytest.skip("needs the repository's list of files", allow_module_level=True)
