"""The interface of a drafter that guesses from tokens alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from worker.types import Drafts


@dataclass(frozen=True, slots=True)
class DraftContext:
    """One sequence as a drafter sees it.

    `token_ids` is the prompt, `num_prompt` tokens, and the outputs so far: a live view that only
    ever grows by appending, so that a drafter may take up where it left off for this `seq_id`.
    Nothing of one `group` (tenant, as the API derives it from key and header, and cache salt) may
    show in the drafts of another.
    """

    seq_id: int
    token_ids: Sequence[int]
    num_prompt: int
    group: tuple[str, str] = ("", "")


class Drafter(Protocol):
    """Guesses what comes next. One for the engine; owns whatever it remembers of sequences.

    Pure: no clock, no randomness. Whatever it raises turns it off for that sequence, no more.
    """

    def propose(self, context: DraftContext, num_tokens: int) -> Drafts | None:
        """Up to `num_tokens` (at least 1) drafts for position `len(context.token_ids)` on, or None.

        The same tokens get the same drafts, whenever and how often it is asked, as long as no other
        sequence ends and nothing is learnt in between.
        """
        ...

    def end(self, context: DraftContext, learns: bool) -> None:
        """The sequence has ended: forget it, and then, if `learns`, remember its output to learn
        from. Also called for sequences that were never asked about, and once for each. Forgetting
        comes first: whatever fails after it, nothing is left of the sequence.
        """
        ...

    def learn(self, num_tokens: int) -> None:
        """Learn up to `num_tokens` more tokens of outputs that are to be learnt from. Once a step:
        no step waits for all that has ended with one.
        """
        ...
