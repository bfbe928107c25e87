"""What a drafter has to read before it can draft: what the target has run since it last did.

The last few rows before the drafts belong to every round of drafting, and are run with its first
draft. All before them is *catch-up*: a prompt, or what was decoded while nobody asked for drafts.

Catch-up is bounded in each step, by twice the tokens of the step itself (or `LEAST_ROWS`, if that
is more): how long a step may take, until it counts as hung, is known by its tokens (see
`engine.heartbeat`), and a decode step that read thousands of rows besides would seem to be. So the
chunks of a prompt, which are large, are read as they come, and what is left a little in each step.
Those go first that have the fewest rows to read; what was read is kept, and a sequence that is not
through waits for its drafts until a later step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from worker.executor.attention_planning import Ints
from worker.executor.drafting.draft_cache import DraftCache
from worker.executor.drafting.interface import DraftRequest

LEAST_ROWS = 64
MOST_ROWS = 2048  # whatever the step: a prompt is read after it is known that drafts pay
_ROWS_OF_A_STEP = 2  # for each token of it


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


@dataclass(frozen=True, slots=True)
class CatchUp:
    """What is read first, and then run with the first draft: complete, of all who are through."""

    behind: list[Span]
    ready: list[Span]


def most_rows(num_step_tokens: int) -> int:
    """Rows of catch-up that a step of so many tokens may have besides."""
    return min(MOST_ROWS, max(LEAST_ROWS, _ROWS_OF_A_STEP * num_step_tokens))


def plan_catch_up(
    cache: DraftCache, requests: Sequence[DraftRequest], first_position: int, max_rows: int
) -> CatchUp:
    """The rows to run now, `max_rows` of catch-up at most."""
    plan = CatchUp([], [])
    if not requests:
        return plan
    firsts = cache.first_unsynced(
        [request.block_table for request in requests],
        [request.position - 1 for request in requests],
        first_position,
    )
    for first, request in sorted(
        zip(firsts, requests, strict=True), key=lambda pair: pair[1].position - pair[0]
    ):
        start = max(first, request.position - _num_usual(request))
        end = min(start, first + max_rows)
        max_rows -= end - first
        if end > first:
            slots = cache.slots(request.block_table, first, end)
            plan.behind.append(Span(request, first, end, slots, is_complete=False))
        if end == start < request.position:
            slots = cache.slots(request.block_table, start, request.position)
            plan.ready.append(Span(request, start, request.position, slots, is_complete=True))
    return plan


def _num_usual(request: DraftRequest) -> int:
    """Rows of every round: of as many drafts as are asked for, had they stood, the token drawn
    behind them, and the last token.
    """
    return request.num_drafts + 2
