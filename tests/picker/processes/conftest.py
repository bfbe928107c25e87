"""A picker of several real processes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from metrics_pages import page, pods
from processes_scene import Processes, processes


@pytest.fixture
async def two(tmp_path: Path) -> AsyncIterator[Processes]:
    """Two processes in front of two idle pods."""
    async with processes(tmp_path, pods(page(), page())) as running:
        yield running
