"""A bound on the memory of what drafts are drawn from: a row of the vocabulary for each draft.

It may shorten what is asked for, and so decides which drafts are judged. That must not depend on
which tokens are drawn (docs/decisions/0017): it goes by the numbers of drafts and sequences alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from worker.executor.drafting.interface import DraftRequest

MAX_PROPOSAL_BYTES = 256 << 20
_ROW_ITEM_BYTES = 4  # float32


def bound_drawn(
    requests: Sequence[DraftRequest], vocab_size: int, max_bytes: int = MAX_PROPOSAL_BYTES
) -> list[DraftRequest]:
    """The requests, in order, with drafts of those that sample cut where their rows would take more
    than `max_bytes`: the longest runs first, to one length; and then those that come last. What is
    cut to nothing is left out. Greedy requests need no rows and keep all of theirs.
    """
    counts = [r.num_drafts if r.params.temperature > 0 else 0 for r in requests]
    room = max_bytes // (vocab_size * _ROW_ITEM_BYTES)
    if sum(counts) <= room:
        return list(requests)
    length = _common_length(counts, room)
    spare = room - sum(min(count, length) for count in counts)
    bounded = []
    for request, count in zip(requests, counts, strict=True):
        if count > length:
            extra = 1 if spare > 0 else 0
            spare -= extra
            request = dataclasses.replace(request, num_drafts=length + extra)
        if request.num_drafts > 0:
            bounded.append(request)
    return bounded


def _common_length(counts: Sequence[int], room: int) -> int:
    """The largest length to which all counts can be cut so that their sum is at most `room`."""
    length, left = 0, room
    while True:
        longer = sum(count > length for count in counts)
        if longer == 0 or longer > left:
            return length
        left -= longer
        length += 1
