"""What the scheduler has counted since start."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Totals; the scheduler's part of `EngineStats`, field by field. Tokens where not said."""

    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_preemptions: int = 0
    prompt_tokens: int = 0
    prompt_tokens_cached: int = 0
    generation_tokens: int = 0
    num_steps: int = 0
    num_corrupted_requests: int = 0
