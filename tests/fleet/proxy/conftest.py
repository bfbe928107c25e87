"""Fixtures of proxies."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from tests.support.fleet.sidecar_house import House


@pytest.fixture
async def house() -> AsyncIterator[House]:
    async with AsyncExitStack() as stack:
        yield House(stack)
