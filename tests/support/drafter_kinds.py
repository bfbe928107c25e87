"""Drafters that tests of speculation need: wrong ones, right ones, and one that breaks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random

from worker.engine.drafters.interface import DraftContext, Drafter
from worker.types import Drafts

LARGEST_TOKEN = 49151


class Garbage:
    """Implements `Drafter`: tokens that mean nothing, always as many as may be."""

    def propose(self, context: DraftContext, num_tokens: int) -> Drafts | None:
        """Random ones, the same for the same tokens."""
        rng = Random(hash(tuple(context.token_ids)))
        tokens = tuple(rng.randrange(LARGEST_TOKEN) for _ in range(num_tokens))
        return _drafts(context, tokens)

    def end(self, context: DraftContext, learns: bool) -> None:
        """Nothing to forget."""

    def learn(self, num_tokens: int) -> None:
        """Nothing to learn."""


class Raising:
    """Implements `Drafter` and does not work."""

    def propose(self, context: DraftContext, num_tokens: int) -> Drafts | None:
        """Raises."""
        raise RuntimeError("this drafter does not work")

    def end(self, context: DraftContext, learns: bool) -> None:
        """Raises, too."""
        raise RuntimeError("this drafter cannot even end")

    def learn(self, num_tokens: int) -> None:
        """Nothing to learn."""


class Knowing:
    """Implements `Drafter`: knows every answer beforehand, and tells `lie_every`th token wrong.

    With `varies` it drafts as many as it likes.
    """

    def __init__(
        self, truth: Mapping[tuple[int, ...], Sequence[int]], lie_every: int, varies: bool
    ) -> None:
        self._truth = truth
        self._lie_every = lie_every
        self._varies = varies

    def propose(self, context: DraftContext, num_tokens: int) -> Drafts | None:
        """What comes next, as far as it is known and told right."""
        num_outputs = len(context.token_ids) - context.num_prompt
        answer = self._truth[tuple(context.token_ids[: context.num_prompt])]
        rng = Random(hash((tuple(answer), num_outputs)))
        length = rng.randrange(num_tokens + 1) if self._varies else num_tokens
        tokens = [
            token if (index + 1) % self._lie_every else token ^ 1
            for index, token in enumerate(answer[num_outputs : num_outputs + length], num_outputs)
        ]
        return _drafts(context, tuple(tokens)) if tokens else None

    def end(self, context: DraftContext, learns: bool) -> None:
        """Nothing to forget."""

    def learn(self, num_tokens: int) -> None:
        """Nothing to learn."""


class Dealt:
    """Implements `Drafter`: to each sequence the one that its prompt is dealt to."""

    def __init__(
        self, kinds: Mapping[tuple[int, ...], str], drafters: Mapping[str, Drafter]
    ) -> None:
        self._kinds = kinds
        self._drafters = drafters

    def propose(self, context: DraftContext, num_tokens: int) -> Drafts | None:
        """As that one does."""
        return self._of(context).propose(context, num_tokens)

    def end(self, context: DraftContext, learns: bool) -> None:
        """As that one does."""
        self._of(context).end(context, learns)

    def learn(self, num_tokens: int) -> None:
        """They all do."""
        for drafter in self._drafters.values():
            drafter.learn(num_tokens)

    def _of(self, context: DraftContext) -> Drafter:
        return self._drafters[self._kinds[tuple(context.token_ids[: context.num_prompt])]]


def _drafts(context: DraftContext, tokens: tuple[int, ...]) -> Drafts:
    return Drafts(len(context.token_ids), tokens, (0.9,) * len(tokens))
