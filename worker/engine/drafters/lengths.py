"""How many drafts to verify, and how many to make: as many as the measured step time repays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from worker.config import SpeculativeConfig


@dataclass(frozen=True, slots=True)
class Offer:
    """The drafts at hand for one decoding sequence, maybe none, told by their confidences.

    `drafter` names who made them: estimates are kept apart by it.
    """

    seq_id: int
    drafter: str
    confidences: tuple[float, ...]


class DraftLengths:
    """Chooses draft lengths; owns what is known of acceptance and of step times. Pure."""

    def __init__(self, config: SpeculativeConfig) -> None:
        self._config = config

    def may_pay(self, seq_ids: Sequence[int]) -> bool:
        """Whether drafts may be verified, made or probed in the next step, were these sequences
        (all that decode) in it; False: that step can be scheduled ahead without asking anybody.
        """
        return bool(seq_ids) and self._limit(len(seq_ids)) > 0

    def to_verify(self, offers: Sequence[Offer], num_other_tokens: int) -> list[int]:
        """How many of its drafts to verify, by offer; one offer for each sequence that decodes.

        The step runs a known token of each, and `num_other_tokens` of prompts besides.
        """
        limit = self._limit(len(offers))
        return [min(limit, len(offer.confidences)) for offer in offers]

    def to_draft(self, seq_ids: Sequence[int], drafter: str, num_other_tokens: int) -> list[int]:
        """How many drafts the device's `drafter` makes after this step, by sequence (all that will
        decode in the next one).
        """
        return [self._limit(len(seq_ids))] * len(seq_ids)

    def observe_step(
        self,
        num_tokens: int,
        seconds: float,
        drafting_seconds: float,
        num_drafted: int,
        num_drafting: int,
        num_other_tokens: int = 0,
    ) -> None:
        """A step ran `num_tokens` (drafts included, and `num_other_tokens` of prompts) in `seconds`,
        of which `drafting_seconds` went into making `num_drafted` drafts for `num_drafting`
        sequences.
        """

    def observe(self, offer: Offer, num_verified: int, num_accepted: int) -> None:
        """Of an offer's drafts the first `num_verified` were verified, `num_accepted` stood."""

    def forget(self, seq_id: int) -> None:
        """The sequence has ended; unknown ones are ignored."""

    def _limit(self, num_sequences: int) -> int:
        """The most drafts of one sequence, when so many decode."""
        limit = self._config.num_speculative_tokens
        for first, _, most in self._config.num_speculative_tokens_per_batch_size:
            if first <= num_sequences:
                limit = min(most, self._config.num_speculative_tokens)
        return limit
