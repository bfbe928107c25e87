"""Fixtures that any test may ask for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# As the engine process does: OpenMP threads that wait by spinning stall each other for seconds when
# anything else runs on their cores. Read once, when torch is first imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

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


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of several test processes (`-n 2 --dist loadgroup`) one runs all that starts whole fleets,
    so that these do not fight for the machine; every other file stays together, with what its
    tests share.
    """
    if not config.pluginmanager.hasplugin("xdist"):
        return
    for item in items:
        file = item.path.relative_to(config.rootpath).as_posix()
        group = "fleets" if file.startswith("tests/integration/") else file
        item.add_marker(pytest.mark.xdist_group(group))
