"""What a drafter has to read before it can draft: what the target has run since it last did.

At most so many rows are read in one step, those first that have the fewest to read; what was read
is kept, and a sequence that is not through waits for its drafts until a later step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from worker.executor.attention_planning import Ints
from worker.executor.drafting.draft_cache import DraftCache
from worker.executor.drafting.interface import DraftRequest

MAX_ROWS = 2048


@dataclass(frozen=True, slots=True)
class Span:
    """Rows to run for one request: positions `start` to `end` - 1, at `slots`.

    One that `is_complete` ends with the request's last token, which the target has not run yet.
    """

    request: DraftRequest
    start: int
    end: int
    slots: Ints
    is_complete: bool

    @property
    def known_slots(self) -> Ints:
        """Without that of the last token."""
        return self.slots[: len(self.slots) - self.is_complete]


def plan_catch_up(
    cache: DraftCache,
    requests: Sequence[DraftRequest],
    first_position: int,
    max_rows: int = MAX_ROWS,
) -> list[Span]:
    """The rows to run now; none for a request that has to wait for all of its own."""
    firsts = cache.first_unsynced(
        [request.block_table for request in requests],
        [request.position - 1 for request in requests],
        first_position,
    )
    spans = []
    for first, request in sorted(
        zip(firsts, requests, strict=True), key=lambda pair: pair[1].position - pair[0]
    ):
        end = min(request.position, first + max_rows)
        max_rows -= end - first
        if end > first:
            slots = cache.slots(request.block_table, first, end)
            spans.append(Span(request, first, end, slots, end == request.position))
    return spans
