"""What tests of deploy/ share."""

from __future__ import annotations

from pathlib import Path

import pytest
from kube_tools import MissingToolError, tool


def _found(name: str) -> Path:
    try:
        return tool(name)
    except MissingToolError as why:
        pytest.skip(f"needs {name}: {why}")


@pytest.fixture(scope="session")
def kubectl() -> Path:
    """The program; tests that ask for it are skipped where it is not to be had."""
    return _found("kubectl")


@pytest.fixture(scope="session")
def helm() -> Path:
    """The program; tests that ask for it are skipped where it is not to be had."""
    return _found("helm")
