"""The depth of the parity tests, which the interpreter makes slow: one case of each by default."""

import pytest

from tests.depth import FULL


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the last case of each parity test, since tables go from the simplest to the hardest,
    and none of a test that is marked `full`.
    """
    if FULL:
        return
    parities = [item for item in items if item.path.name.startswith("parity_")]
    last = {item.nodeid.partition("[")[0]: item for item in parities}
    left_out = [
        item
        for item in parities
        if item not in last.values() or item.get_closest_marker("full") is not None
    ]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]
