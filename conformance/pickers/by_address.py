"""A picker that runs already, and is left as it is."""

from collections.abc import Sequence

from conformance.case import Provision

_NEVER = frozenset({Provision.RESTART, Provision.POOL_CHANGES})


class RunningPicker:
    """A picker by its address; it is neither stopped nor changed."""

    def __init__(
        self, address: str, health_address: str | None, provides: frozenset[Provision]
    ) -> None:
        self.address = address
        self.health_address = health_address
        self.is_tls = Provision.TLS in provides
        known = {Provision.HEALTH} if health_address else set()
        self.provides = (provides | known) - _NEVER
        self.is_running = True

    async def start(self) -> None:
        """Do nothing: the picker runs already."""

    async def kill(self) -> None:
        """Raises RuntimeError: it is not the suite's to end."""
        raise RuntimeError("a picker that the suite has not started is not ended by it")

    def ask_to_end(self) -> None:
        """Raises RuntimeError: it is not the suite's to end."""
        raise RuntimeError("a picker that the suite has not started is not ended by it")

    async def end(self, limit_seconds: float) -> int | None:
        """None: it runs on."""
        del limit_seconds
        return None

    async def use_pool(self, endpoints: Sequence[str]) -> None:
        """Raises RuntimeError: its pool is not the suite's."""
        raise RuntimeError(f"cannot make {', '.join(endpoints)} the pool of a foreign picker")
