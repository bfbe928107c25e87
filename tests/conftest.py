"""Fixtures that any test may ask for."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

import tests.depth  # noqa: F401 (its profile is that of every property test)

# As the engine process does: OpenMP threads that wait by spinning stall each other for seconds when
# anything else runs on their cores. Read once, when torch is first imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

_FLEETS, _SLOW = "tests/integration/", "tests/worker/test_"
_INTERPRETED = "tests/worker/ops/triton/test_kernels.py"  # runs that share nothing
DEFAULT_MODEL = Path.home() / ".cache/pointsman/models/SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="session")
def model_path() -> Path:
    """The real model's GGUF file: `POINTSMAN_MODEL`, the cache, or fetched into the cache once."""
    given = os.environ.get("POINTSMAN_MODEL")
    if given:
        return Path(given)
    if DEFAULT_MODEL.exists():
        return DEFAULT_MODEL
    from fleet.models import ensure_default_model

    return ensure_default_model()


@pytest.fixture
def ipv6() -> str:
    """This machine's own address, where it has one."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"no IPv6: {error}")
    return "::1"


@pytest.fixture
def short_path() -> Iterator[Path]:
    """An empty directory in which a socket may be: its whole name has at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="t-") as path:
        yield Path(path)


class _WholeFiles(LoadScopeScheduling):  # type: ignore[misc]
    """Of several test processes (`-n 2`) one runs all that starts whole fleets, so that these do
    not fight for the machine; every other file stays together, with what its tests share.
    """

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        if file == _INTERPRETED:
            return nodeid
        return "fleets" if file.startswith(_FLEETS) else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> _WholeFiles:
    """Divide the tests among processes, in the order in which they come."""
    config.option.loadscopereorder = False
    return _WholeFiles(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What takes long comes first, so that no process has it left at the end."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: not item.nodeid.startswith((_FLEETS, _SLOW, _INTERPRETED)))
