"""A bound on what unfinished messages and bodies take together, over all calls."""

from __future__ import annotations


class ByteBudget:
    """Owns the count of bytes that all shares hold. `max_bytes` None: they are only counted."""

    __slots__ = ("held_bytes", "max_bytes")

    def __init__(self, max_bytes: int | None = None) -> None:
        self.max_bytes = max_bytes
        self.held_bytes = 0


class ByteShare:
    """What one holder has of a budget. Owns the amount, and gives it back at most once."""

    __slots__ = ("_budget", "held_bytes")

    def __init__(self, budget: ByteBudget) -> None:
        self._budget = budget
        self.held_bytes = 0

    def grow(self, num_bytes: int) -> bool:
        """Hold so much more; False where that does not fit, and nothing is taken then."""
        budget = self._budget
        if budget.max_bytes is not None and budget.held_bytes + num_bytes > budget.max_bytes:
            return False
        self.grow_beyond(num_bytes)
        return True

    def grow_beyond(self, num_bytes: int) -> None:
        """Hold so much more whether it fits or not."""
        self.held_bytes += num_bytes
        self._budget.held_bytes += num_bytes

    def release(self) -> None:
        """Hold nothing."""
        self._budget.held_bytes -= self.held_bytes
        self.held_bytes = 0
