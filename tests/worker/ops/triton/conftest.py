"""The depth of the parity tests, which the interpreter makes slow: one case of each by default."""

from __future__ import annotations

import pytest

from tests.depth import FULL


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the last case of each parity test: tables go from the simplest case to the hardest."""
    if FULL:
        return
    last = {item.nodeid.partition("[")[0]: item for item in items if _is_parity(item)}
    left_out = [item for item in items if _is_parity(item) and item not in last.values()]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


def _is_parity(item: pytest.Item) -> bool:
    return item.path.name.startswith("parity_")
