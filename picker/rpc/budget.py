"""A bound on the memory of unfinished messages and bodies, over all calls."""

import msgspec


class ByteBudget(msgspec.Struct, eq=False):
    """Owns the count of bytes in all shares. `max_bytes` None: they are only counted."""

    max_bytes: int | None = None
    held_bytes: int = 0


class ByteShare(msgspec.Struct, eq=False):
    """The part of a budget that one holder reserved, and releases at most once."""

    _budget: ByteBudget
    held_bytes: int = 0

    def grow(self, num_bytes: int) -> bool:
        """Reserve more bytes; return False and reserve nothing if they do not fit."""
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
