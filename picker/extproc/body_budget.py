"""Bounds what request bodies that are still arriving take together, over all streams."""

from __future__ import annotations

from picker.errors import Code, DropReason, RefusedError

RETRY_AFTER_SECONDS = 1  # when other bodies will be complete is not known; the least there is


class BodyBudget:
    """Owns the count of bytes that all streams hold. `max_bytes` None: they are only counted."""

    __slots__ = ("held_bytes", "max_bytes")

    def __init__(self, max_bytes: int | None = None) -> None:
        self.max_bytes = max_bytes
        self.held_bytes = 0


class BodyShare:
    """What one holder has of a budget. Owns the amount, and gives it back at most once."""

    __slots__ = ("_budget", "_held_bytes")

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self._held_bytes = 0

    def grow(self, num_bytes: int) -> bool:
        """Hold so much more; False where that does not fit, and nothing is taken then."""
        budget = self._budget
        if budget.max_bytes is not None and budget.held_bytes + num_bytes > budget.max_bytes:
            return False
        self.grow_beyond(num_bytes)
        return True

    def grow_beyond(self, num_bytes: int) -> None:
        """Hold so much more whether it fits or not."""
        self._held_bytes += num_bytes
        self._budget.held_bytes += num_bytes

    def release(self) -> None:
        """Hold nothing."""
        self._budget.held_bytes -= self._held_bytes
        self._held_bytes = 0


def no_room() -> RefusedError:
    """429: what is arriving already leaves no room for this body."""
    return RefusedError(
        Code.RESOURCE_EXHAUSTED,
        "the endpoint picker has no room for this request body while others are arriving",
        DropReason.SATURATED,
        RETRY_AFTER_SECONDS,
    )
