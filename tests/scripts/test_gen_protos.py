"""The generated modules are those of the proto files."""

from pathlib import Path
from runpy import run_path

ROOT = Path(__file__).parents[2]


def test_the_generated_modules_are_as_they_would_be_written() -> None:
    assert run_path(str(ROOT / "scripts" / "gen_protos.py"))["different"]() == {}
