"""docs/doctor.md names every check."""

import re
from pathlib import Path

from fleet.doctor.command import CHECKS

PAGE = Path(__file__).parents[3] / "docs" / "doctor.md"


def test_every_check_is_in_the_table() -> None:
    rows = re.findall(r"^\| `([a-z0-9]+-[a-z0-9-]+)` \| (.+?) \|", PAGE.read_text(), re.MULTILINE)
    assert rows == [(one.name, one.about) for one in CHECKS]
