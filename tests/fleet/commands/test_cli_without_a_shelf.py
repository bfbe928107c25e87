"""A command about a shelf is refused in a sentence where the shelf is not installed."""

import subprocess
import sys

import pytest

WITHOUT = """
import sys
shelf, *arguments = sys.argv[1:]
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == shelf:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Finder())
from fleet.commands.cli import main
sys.exit(main(arguments))
"""


@pytest.mark.parametrize(
    ("shelf", "command"),
    [
        ("picker.planner", ["plan"]),
        ("worker.sim", ["simulate"]),
        ("worker.training", ["train-draft", "--model", "missing.gguf"]),
    ],
)
def test_the_command_names_the_missing_shelf(shelf: str, command: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, shelf, *command],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert done.stderr == f"pointsman: {command[0]} needs {shelf}, which is not installed\n"
