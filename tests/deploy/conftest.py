"""Fixtures of the tests of deploy/."""

from pathlib import Path

import pytest

from tests.support.kube.kube_tools import NEWEST, WHEELS, MissingToolError, tool


def _found(name: str, version: str = NEWEST) -> Path:
    try:
        return tool(name, version)
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


@pytest.fixture(scope="session", params=[one for one in WHEELS if one != NEWEST])
def older_kubectl(request: pytest.FixtureRequest) -> str:
    """A version whose kubectl is at hand; tests that ask for it are skipped where it is not."""
    version: str = request.param
    _found("kubectl", version)
    return version
