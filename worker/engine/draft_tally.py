"""The tally of verified drafts, of one answer or of all."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from worker.engine.messages import SpeculationFigures


@dataclass(slots=True)
class DraftTally:
    """Counts of verified drafts, of one sequence or of all. `accepted_histogram[i]` counts the runs
    (one sequence's share of a step with drafts) of which exactly i drafts were accepted.
    """

    accepted_histogram: list[int]
    num_draft_tokens: int = 0

    @classmethod
    def up_to(cls, most: int) -> DraftTally:
        return cls([0] * (most + 1))

    def count(self, num_drafts: int, num_accepted: int) -> None:
        self.num_draft_tokens += num_drafts
        self.accepted_histogram[num_accepted] += 1

    @property
    def num_runs(self) -> int:
        return sum(self.accepted_histogram)

    @property
    def num_accepted_tokens(self) -> int:
        return sum(i * count for i, count in enumerate(self.accepted_histogram))

    @property
    def num_accepted_by_position(self) -> tuple[int, ...]:
        """The runs that accepted the first draft, the second, and so on."""
        return tuple(accumulate(self.accepted_histogram[:0:-1]))[::-1]

    def figures(self) -> SpeculationFigures:
        return SpeculationFigures(
            self.num_runs,
            self.num_draft_tokens,
            self.num_accepted_tokens,
            self.accepted_histogram[:],
        )
