"""One ended request, as the histograms see it."""

from __future__ import annotations

from dataclasses import dataclass

from worker.types import FinishReason


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One ended sequence. Times are on one monotonic clock; None: never came.

    `num_cached_tokens` counts prompt tokens found in the prefix cache. A request with several
    sequences (n > 1) gives one record for each; only the record of the last one to end carries `n`
    and `max_num_generation_tokens`, the longest of them.
    """

    reason: FinishReason
    num_prompt_tokens: int
    num_generation_tokens: int
    max_tokens: int
    num_preemptions: int
    arrival_seconds: float
    scheduled_seconds: float | None
    first_token_seconds: float | None
    last_token_seconds: float | None
    finished_seconds: float
    num_cached_tokens: int = 0
    n: int | None = None
    max_num_generation_tokens: int | None = None
