"""The wait for a burst's first answers, when all endpoints were just filled and none has answered.

A burst that meets an idle pool is decided before the first answer arrives. If one of the endpoints
fails every request, its share of the burst would be lost.
"""

import asyncio


class BurstWait:
    """Owns the requests that wait, each for `longest_seconds` at most."""

    def __init__(self, longest_seconds: float) -> None:
        self._longest_seconds = longest_seconds
        self._event = asyncio.Event()

    async def settled(self) -> None:
        event = self._event
        try:
            async with asyncio.timeout(self._longest_seconds):
                await event.wait()
        except TimeoutError:
            return  # an endpoint that is silent for so long does not fail at once

    def wake(self) -> None:
        self._event.set()
        self._event = asyncio.Event()
