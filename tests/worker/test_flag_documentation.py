"""No flag of the worker is undocumented."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_document_says_what_the_parser_says() -> None:
    """Names, choices, defaults and meanings; `scripts/document_flags.py --write` repairs it."""
    script = ROOT / "scripts" / "document_flags.py"
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")
