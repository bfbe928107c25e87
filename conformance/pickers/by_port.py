"""One port of a picker that has several, each for a pool."""

from collections.abc import Sequence

from conformance.case import Provision
from conformance.pickers.picker import Picker


class PortOf:
    """A picker as seen at another of its ports; it is started and ended as a whole."""

    def __init__(self, picker: Picker, address: str) -> None:
        self._picker = picker
        self.address = address

    @property
    def health_address(self) -> str | None:
        """The health address of the whole picker."""
        return self._picker.health_address

    @property
    def is_tls(self) -> bool:
        """All ports speak alike."""
        return self._picker.is_tls

    @property
    def provides(self) -> frozenset[Provision]:
        """The provisions of the whole picker."""
        return self._picker.provides

    @property
    def is_running(self) -> bool:
        """True while the whole picker runs."""
        return self._picker.is_running

    async def start(self) -> None:
        """Start the whole picker, with all ports."""
        await self._picker.start()

    async def kill(self) -> None:
        """Kill the whole picker, with all ports."""
        await self._picker.kill()

    def ask_to_end(self) -> None:
        """Ask the whole picker to end, with all ports."""
        self._picker.ask_to_end()

    async def end(self, limit_seconds: float) -> int | None:
        """End the whole picker, with all ports."""
        return await self._picker.end(limit_seconds)

    async def use_pool(self, endpoints: Sequence[str]) -> None:
        """Raises RuntimeError: which of the pools is not said."""
        raise RuntimeError(f"cannot make {', '.join(endpoints)} the pool of one port")
