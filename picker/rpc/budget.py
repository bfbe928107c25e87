"""A bound on the memory of unfinished messages and bodies, over all calls."""


class ByteBudget:
    """Owns the count of bytes in all shares. `max_bytes` None: they are only counted."""

    __slots__ = ("held_bytes", "max_bytes")

    def __init__(self, max_bytes: int | None = None) -> None:
        self.max_bytes = max_bytes
        self.held_bytes = 0


class ByteShare:
    """The part of a budget that one holder reserved, and releases at most once."""

    __slots__ = ("_budget", "held_bytes")

    def __init__(self, budget: ByteBudget) -> None:
        self._budget = budget
        self.held_bytes = 0

    def grow(self, num_bytes: int) -> bool:
        """Reserve more bytes; False, without a reservation, if they do not fit."""
        budget = self._budget
        if budget.max_bytes is not None and budget.held_bytes + num_bytes > budget.max_bytes:
            return False
        self.grow_beyond(num_bytes)
        return True

    def grow_beyond(self, num_bytes: int) -> None:
        self.held_bytes += num_bytes
        self._budget.held_bytes += num_bytes

    def release(self) -> None:
        self._budget.held_bytes -= self.held_bytes
        self.held_bytes = 0
