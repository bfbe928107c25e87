"""The interface of a drafter that guesses from tokens alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from worker.types import Drafts


@dataclass(frozen=True, slots=True)
class DraftContext:
    """One sequence as a drafter sees it.

    `token_ids` is the prompt, `num_prompt` tokens, and the outputs so far: a live view that only
    grows. Nothing of one `group` (tenant and cache salt) may show in the drafts of another.
    """

    seq_id: int
    token_ids: Sequence[int]
    num_prompt: int
    group: tuple[str, str] = ("", "")


class Drafter(Protocol):
    """Guesses what comes next; owns whatever it remembers of sequences. Pure: no clock, no
    randomness. An exception turns it off for that sequence only.
    """

    def propose(self, context: DraftContext, num_tokens: int) -> Drafts | None:
        """Return up to `num_tokens` drafts for positions from `len(context.token_ids)` on, or None.

        The same tokens get the same drafts as long as no other sequence ends and nothing is learnt.
        """

    def end(self, context: DraftContext, learns: bool) -> None:
        """Forget a sequence that has ended, then, if `learns`, remember its output. Called once for
        each sequence, even for those that were never asked about.
        """

    def learn(self, num_tokens: int) -> None:
        """Learn up to `num_tokens` more tokens of outputs. Called once a step, to keep it short."""
