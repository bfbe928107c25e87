"""docs/doctor.md and the flags name every check."""

from __future__ import annotations

import re
from pathlib import Path

from fleet.doctor.command import CHECKS
from fleet.doctor.flags import CHECK_NAMES

PAGE = Path(__file__).parents[3] / "docs" / "doctor.md"


def test_every_check_is_in_the_table() -> None:
    """The table names no other check."""
    rows = re.findall(r"^\| `([a-z0-9]+-[a-z0-9-]+)` \| (.+?) \|", PAGE.read_text(), re.MULTILINE)
    assert [name for name, _ in rows] == [one.name for one in CHECKS]


def test_every_check_is_a_choice_of_only() -> None:
    """Help and completion list the checks without their code."""
    assert tuple(one.name for one in CHECKS) == CHECK_NAMES
