"""Suffix decoding: what followed the last tokens in the sequence itself, or in the outputs of
sequences that ended lately.
"""

from worker.engine.drafters.finished_outputs import FinishedOutputs
from worker.engine.drafters.interface import DraftContext
from worker.engine.drafters.suffix_paths import PathLimits, SequenceCorpus, best_path
from worker.engine.drafters.texts import SequenceTexts, tokens_of
from worker.types import Drafts


class SuffixDrafter:
    """Drafts along the likeliest path; see `suffix_paths` for what that is.

    Looks in the sequence (prompt and output) and in the finished outputs of its group, and takes
    the path with the better score, the sequence's own if they are equal. Prompts of others are
    never looked at. Owns the text of each live sequence; what has ended is `FinishedOutputs`'.

    Confidence. As in prompt lookup a match of L tokens is worth L / (L + 1), and draft i, if those
    before it stand, ends a match of L + i tokens; here each is multiplied by the share of the
    places on the path that continue with the draft. So it grows with the match and with agreement,
    in (0, 1). (Shares alone say little: most paths are 1 all along, right or wrong.)
    """

    def __init__(self, limits: PathLimits, finished: FinishedOutputs) -> None:
        self._limits = limits
        self._finished = finished
        self._texts = SequenceTexts()

    @property
    def num_sequences(self) -> int:
        return len(self._texts)

    def propose(self, context: DraftContext, num_tokens: int) -> Drafts | None:
        """The likeliest path; see `Drafter`."""
        text = self._texts.read(context.seq_id, context.token_ids)
        path = best_path(SequenceCorpus(text), text, self._limits, num_tokens)
        finished = self._finished.of(context.group)
        if finished is not None:
            other = best_path(finished, text, self._limits, num_tokens)
            if other.score > path.score:
                path = other
        if not path.text:
            return None
        lengths = range(path.match_tokens, path.match_tokens + len(path.text))
        confidences = tuple(
            share * length / (length + 1)
            for share, length in zip(path.shares, lengths, strict=True)
        )
        return Drafts(len(text), tokens_of(path.text), confidences)

    def end(self, context: DraftContext, learns: bool) -> None:
        """Forget the sequence; its output will be looked in, for its group, if `learns`."""
        self._texts.forget(context.seq_id)
        if learns:
            self._finished.add(context.group, context.token_ids[context.num_prompt :])

    def learn(self, num_tokens: int) -> None:
        """Index this number of further tokens of finished outputs."""
        self._finished.learn(num_tokens)
