"""Suffix decoding: what followed the last tokens, in the sequence itself or in finished outputs."""

from worker.engine.drafters.finished_outputs import FinishedOutputs
from worker.engine.drafters.interface import DraftContext
from worker.engine.drafters.suffix_paths import PathLimits, SequenceCorpus, best_path
from worker.engine.drafters.texts import SequenceTexts, tokens_of
from worker.types import Drafts


class SuffixDrafter:
    """Drafts along the likeliest path (see `suffix_paths`), in the sequence or in the finished
    outputs of its group, whichever scores better. Owns the text of each live sequence.

    The confidence is that of prompt lookup, L / (L + 1) for a match of L tokens, times the share of
    the places on the path that continue with the draft. Shares alone say little: on most paths all
    of them are 1.
    """

    def __init__(self, limits: PathLimits, finished: FinishedOutputs) -> None:
        self._limits = limits
        self._finished = finished
        self.texts = SequenceTexts()

    def propose(self, context: DraftContext, num_tokens: int) -> Drafts | None:
        text = self.texts.read(context.seq_id, context.token_ids)
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
        self.texts.forget(context.seq_id)
        if learns:
            self._finished.add(context.group, context.token_ids[context.num_prompt :])

    def learn(self, num_tokens: int) -> None:
        self._finished.learn(num_tokens)
