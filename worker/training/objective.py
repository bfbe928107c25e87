"""The loss of a head, and the measure of its drafts."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from worker.training.dataset import TrainingBatch
from worker.training.twin import HeadTwin

# Weight of a pass relative to the one before: a later draft counts only if earlier ones hold.
_PASS_DECAY = 0.8


@dataclass(frozen=True, slots=True)
class HeadObjective:
    """The loss over `num_passes` drafts in a row, with the result of the function `local_ids`."""

    num_passes: int
    local_ids: Tensor

    def loss(self, twin: HeadTwin, batch: TrainingBatch) -> Tensor:
        """Return the cross entropy with the target's own distribution over the draft vocabulary.

        Rows whose token is not in the draft vocabulary are skipped (unless there is no other row):
        most of the target's distribution there is outside the head's vocabulary.
        """
        teacher = twin.teacher
        sayable = self.local_ids[batch.said_ids] < len(teacher.lm_rows)
        sayable |= ~sayable.any()
        states = teacher.normalised(batch.expected[sayable])
        with torch.no_grad():
            shares = functional.linear(states, teacher.lm_rows).float().softmax(dim=-1)
        rows = batch.rows[sayable]
        total, weight = torch.zeros(()), 1.0
        for states in twin.passes(batch.features, batch.next_ids, self.num_passes):
            # The first j rows of pass j have no predecessors, but answers begin later than that.
            own = twin.output_states(states.flatten(0, 1)[rows])
            scores = functional.linear(own, teacher.lm_rows)
            entropy: Tensor = _CrossEntropy.apply(scores, shares)  # type: ignore[no-untyped-call]
            total = total + weight * entropy
            weight *= _PASS_DECAY
        return total / sum(_PASS_DECAY**n for n in range(self.num_passes))


class _CrossEntropy(torch.autograd.Function):
    """Mean cross entropy of softmax(scores [N, Vd]) with the distributions `shares` [N, Vd].

    Its gradient, softmax minus shares, is computed in the forward pass: these matrices are the
    largest of all, and every pass over them counts.
    """

    @staticmethod
    def forward(ctx: Any, scores: Tensor, shares: Tensor) -> Tensor:
        wide = scores.float()
        expected = torch.linalg.vecdot(shares, wide)
        total = wide.logsumexp(dim=-1)
        gradient = wide.sub_(total[:, None]).exp_().sub_(shares)
        ctx.save_for_backward(gradient.to(scores.dtype))
        mean: Tensor = (total - expected).mean()
        return mean

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * (gradients[0] / len(gradient)).to(gradient.dtype), None


def local_ids(draft_vocab: Tensor, vocab_size: int) -> Tensor:
    """Return each token's column in the draft vocabulary, [V] int64; Vd for tokens outside it."""
    columns = torch.arange(len(draft_vocab), device=draft_vocab.device)
    result = torch.full((vocab_size,), len(draft_vocab), device=draft_vocab.device)
    return result.scatter_(0, draft_vocab, columns)


@dataclass(frozen=True, slots=True)
class DraftAcceptance:
    """Counts of runs: in `held[j]` of `starts`, the first j+1 greedy drafts equal the target's."""

    starts: int
    held: tuple[int, ...]

    @property
    def conditional(self) -> tuple[float, ...]:
        """The share of drafts, by position, that held where all drafts before them did."""
        before = (self.starts, *self.held[:-1])
        return tuple(h / b if b else 0.0 for h, b in zip(self.held, before, strict=True))

    def expected_tokens(self, length: int) -> float:
        """Return the mean tokens of a step with `length` drafts, the target's own included."""
        return 1.0 + sum(self.held[:length]) / self.starts if self.starts else 1.0


@torch.no_grad()
def measure(
    twin: HeadTwin,
    lm_head: Tensor,
    draft_vocab: Tensor,
    batches: Iterable[TrainingBatch],
    length: int,
) -> DraftAcceptance:
    """Draft `length` tokens greedily from every position where the target continued greedily.

    `lm_head` [V, H] is the target's whole head: its next token may be outside the draft vocabulary.
    """
    starts, held = 0, [0] * length
    for batch in batches:
        size = batch.next_ids.shape
        span = size[1] - length + 1
        if span < 1:
            continue
        says = functional.linear(twin.teacher.normalised(batch.expected), lm_head).argmax(dim=-1)
        # A run from row s drafts at rows s, s+1, …; in all of them the text must be greedy.
        greedy = _at(batch, says == batch.said_ids)
        alive = torch.ones(size[0], span, dtype=torch.bool, device=greedy.device)
        for offset in range(length):
            alive &= greedy[:, offset : offset + span]
        starts += int(alive.sum())
        passes = twin.passes(batch.features, batch.next_ids, length)
        for offset, states in enumerate(passes):
            drafts = twin.logits(states.flatten(0, 1)[batch.rows]).argmax(dim=-1)
            holds = _at(batch, draft_vocab[drafts] == says)
            alive &= holds[:, offset : offset + span]
            held[offset] += int(alive.sum())
    return DraftAcceptance(starts, tuple(held))


def _at(batch: TrainingBatch, flags: Tensor) -> Tensor:
    size = batch.next_ids.shape
    placed = torch.zeros(size.numel(), dtype=torch.bool, device=flags.device)
    placed[batch.rows] = flags
    return placed.view(size)
