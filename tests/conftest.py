"""Fixtures that any test may ask for."""

import gc
import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

from fleet.run.catalog import DEFAULT
from fleet.run.models import ensure_model
from tests import depth as depth  # registers the profile of hypothesis
from tests.deep_items import is_deep
from tests.durations import Recorder

# As the engine process does: OpenMP threads that wait by spinning stall each other for seconds when
# anything else runs on their cores. Read once, when torch is first imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

_FLEETS, _SLOW = "tests/integration/", "tests/worker/test_"
_INTERPRETED = "tests/worker/ops/triton/test_kernels.py"  # runs that share nothing


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--record-durations", type=Path, metavar="FILE", help="write each item's CPU seconds here"
    )
    parser.addoption(
        "--beyond-default", action="store_true", help="run what `make test-all` adds to `make test`"
    )


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("record_durations")
    if path is not None:
        config.pluginmanager.register(Recorder(path))


@pytest.fixture(scope="session")
def model_path() -> Path:
    given = os.environ.get("POINTSMAN_MODEL")
    return Path(given) if given else ensure_model(DEFAULT)


@pytest.fixture
def ipv6() -> str:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"no IPv6: {error}")
    return "::1"


@pytest.fixture
def short_path() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="t-") as path:
        yield Path(path)


class _WholeFiles(LoadScopeScheduling):  # type: ignore[misc]
    """Distributes whole files; one test process (of `-n 2`) runs all tests that start fleets.

    Fleets then do not compete for the machine, and the tests of a file share their fixtures.
    """

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        if file == _INTERPRETED:
            return nodeid
        return "fleets" if file.startswith(_FLEETS) else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> _WholeFiles:
    config.option.loadscopereorder = False
    return _WholeFiles(config, log)


def pytest_collection_finish() -> None:
    """Spare the garbage collector a million objects of modules and tests, which stay."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("beyond_default"):
        left_out = [item for item in items if not is_deep(item)]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if is_deep(item)]
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: not item.nodeid.startswith((_FLEETS, _SLOW, _INTERPRETED)))
