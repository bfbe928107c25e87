"""The next tokens of a step: greedy, or drawn after temperature, min-p, top-k and top-p.

The order is vLLM's: `adjust` (masks, bias, penalties), temperature, min-p, top-k, top-p, draw. A
draw is Gumbel-max: argmax(score + noise) has exactly the softmax distribution, and the noise is a
pure function of the request's seed and the position (see `noise`).

`choose` defines what one row gives. `Sampler` gives that for many rows at once, with arithmetic
that may round otherwise: it reports only tokens that win by more than all rounding, and leaves the
others, less than one draw in 640, to `choose`. So no draw depends on its batch, device or kernel.

Adjusting a row. Changes to one row of logits before temperature, in vLLM's order.

Masks of a grammar, allowed ids, bad words, banned ids, logit bias, then repetition, frequency and
presence penalties.
A token that must not be drawn gets -inf, which no later change brings back.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from worker.ops.logprobs import LogprobQuery, token_logprobs
from worker.ops.noise import Stream, gumbel_noise, gumbel_rows
from worker.ops.truncate import Truncations, floors, surviving, truncate, truncates
from worker.types import Draw, SampleSpec, SamplingParams

NOT_NUMBERS = "the model's logits are not finite numbers"
ALL_MASKED = "no token may be drawn: every one is excluded by the request's parameters"

# Finding the largest of a row's largest parts is many times as fast as finding its place at once.
_PART_SIZES = (128, 64, 32)

# For each byte of a mask what to add to eight logits: a look-up is many times as fast as shifts.
_BYTES, _BITS = torch.arange(256)[:, None], torch.arange(8)
_SCORES_OF_BITS = torch.where((_BYTES >> _BITS & 1) == 1, 0.0, -torch.inf)

_SEED_BITS = (1 << 64) - 1
_LEAST_HEAT = 1e-37
# How far two sums of score and noise must be apart to be in order whatever rounds how: logarithms
# are right to two units in the last place, and noise is below 23.
NOISE_ERROR, SUM_ERROR = 1.2e-5, 3e-7

SAMPLING = Stream()

# One draw: `row` of the logits, or row `adjusted` of the adjusted ones (-1: not adjusted). top-p 1,
# log min-p -inf and top-k 0 are off; temperature 0 is greedy. Kernels of C read it as a struct.
DRAWS = np.dtype(
    [
        *(("seed", "u8"), ("position", "u8"), ("top_p", "f8"), ("log_min_p", "f8")),
        *(("temperature", "f4"), ("top_k", "i4"), ("row", "i4"), ("adjusted", "i4")),
        *(("token", "i4"), ("state", "i4")),
    ]
)
_NOT_ADJUSTED = (-1, 0, 0)


class DrawState(IntEnum):
    """What became of a draw."""

    DRAWN = 0
    UNDECIDED = 1
    NOT_NUMBERS = 2
    ALL_MASKED = 3


@dataclass(frozen=True, slots=True)
class Undrawable:
    """A row from which no token can be drawn, and why."""

    reason: str


_UNDRAWABLE = {
    DrawState.NOT_NUMBERS: Undrawable(NOT_NUMBERS),
    DrawState.ALL_MASKED: Undrawable(ALL_MASKED),
}


@dataclass(frozen=True, slots=True)
class ChosenToken:
    """A token that was chosen from a row of logits, for a request with `params`."""

    row: int
    params: SamplingParams
    token_id: int


class DrawKernel(Protocol):
    """Draws from many rows in one call that waits for nothing."""

    def __call__(
        self,
        logits: Tensor,
        adjusted: Tensor | None,
        draws: npt.NDArray[np.void],
        stream: Stream,
    ) -> Tensor:
        """Tokens and `DrawState`s [2, n] of `draws` [n] of `DRAWS`, from logits [R, V] float32 and
        what `adjust` made of some of them, [m, V], with the noise of `stream`.
        """
        ...


@dataclass(frozen=True, slots=True)
class Sampler:
    """Draws for a whole step with `kernel`; None: with torch, and on a CPU row by row."""

    kernel: DrawKernel | None = None

    def launch(
        self,
        logits: Tensor,
        rows: Sequence[int],
        specs: Sequence[SampleSpec],
        stream: Stream = SAMPLING,
    ) -> PendingDraws:
        """Begin to draw `specs[i]` from row `rows[i]` of logits [R, V] float32, which stay as they
        are. Several may draw from one row; none sees another.
        """
        draws = _draws(rows, specs)
        changed = [index for index, spec in enumerate(specs) if adjusts(spec)]
        adjusted = None
        if changed:
            adjusted = logits[[rows[index] for index in changed]]
            adjust_rows(adjusted, [specs[index] for index in changed])
            draws["adjusted"][changed] = range(len(changed))
        kernel = self.kernel
        if kernel is None and logits.device.type == "cpu":
            # One row after the other is 1.4 to 5 times as fast there as torch's way with many.
            answers = torch.full((2, len(draws)), DrawState.UNDECIDED, dtype=torch.int32)
        else:
            answers = (kernel or draw_rows)(logits.contiguous(), adjusted, draws, stream)
        pending = PendingDraws(logits, rows, specs, stream, answers)
        pending.decide()
        return pending


TORCH_SAMPLER = Sampler()


@dataclass(frozen=True, slots=True)
class PendingDraws:
    """Draws that were launched."""

    logits: Tensor
    rows: Sequence[int]
    specs: Sequence[SampleSpec]
    stream: Stream
    answers: Tensor

    @property
    def tokens(self) -> Tensor:
        """The token of each spec, on the device; any one where it has none."""
        return self.answers[0]

    def decide(self) -> None:
        """Draw the rows that are undecided again, one by one. Waits for the device."""
        [undecided] = np.nonzero(self.answers[1].numpy(force=True) == DrawState.UNDECIDED)
        for index in undecided.tolist():
            outcome = choose(self.logits[self.rows[index]], self.specs[index], self.stream)
            token, state = outcome, DrawState.DRAWN
            if isinstance(outcome, Undrawable):
                masked = outcome.reason == ALL_MASKED
                token, state = 0, DrawState.ALL_MASKED if masked else DrawState.NOT_NUMBERS
            self.answers[:, index] = torch.tensor([token, state])

    def collect(self) -> list[int | Undrawable]:
        """The token of each spec, or why it has none. Waits for the device."""
        tokens, states = self.answers.tolist()
        return [
            token if state == DrawState.DRAWN else _UNDRAWABLE[state]
            for token, state in zip(tokens, states, strict=True)
        ]


def _draws(rows: Sequence[int], specs: Sequence[SampleSpec]) -> npt.NDArray[np.void]:
    table = np.zeros(len(specs), DRAWS)
    table[:] = [
        (
            spec.params.seed & _SEED_BITS,
            spec.position,
            spec.params.top_p,
            math.log(spec.params.min_p) if spec.params.min_p > 0 else -math.inf,
            _heat(spec.params.temperature),
            spec.params.top_k,
            row,
            *_NOT_ADJUSTED,
        )
        for row, spec in zip(rows, specs, strict=True)
    ]
    return table


def _heat(temperature: float) -> float:
    """nan for what float32 would take for greedy: such rows are undecided."""
    return temperature if temperature == 0 or temperature > _LEAST_HEAT else math.nan


def draw_rows(
    logits: Tensor, adjusted: Tensor | None, draws: npt.NDArray[np.void], stream: Stream
) -> Tensor:
    """`DrawKernel` in torch: a number of calls that does not depend on the number of draws."""
    device = logits.device
    rows = torch.from_numpy(draws["row"].astype(np.int64)).to(device)
    peaks, tokens = largest(logits)
    raw_peaks, tokens = peaks[rows], tokens[rows]
    states = torch.where(raw_peaks.isfinite(), DrawState.DRAWN, DrawState.NOT_NUMBERS)
    [deep] = np.nonzero((draws["temperature"] != 0) | (draws["adjusted"] >= 0))
    if len(deep):
        places = torch.from_numpy(deep).to(device)
        scores = logits[rows[places]]
        if adjusted is not None:
            [own] = np.nonzero(draws["adjusted"][deep] >= 0)
            scores[torch.from_numpy(own).to(device)] = adjusted
        drawn, own_states = _draw_deep(scores, draws[deep], stream)
        tokens[places] = drawn
        broken = states[places] == DrawState.NOT_NUMBERS
        states[places] = torch.where(broken, DrawState.NOT_NUMBERS, own_states)
    return torch.stack((tokens, states))


def _draw_deep(
    logits: Tensor, draws: npt.NDArray[np.void], stream: Stream
) -> tuple[Tensor, Tensor]:
    """Tokens and states [n] from logits [n, V], adjusted where they are to be."""

    def column(name: str, kind: type) -> Tensor:
        return torch.from_numpy(draws[name].astype(kind)).to(logits.device)[:, None]

    heat = column("temperature", np.float32)
    hot = heat != 0
    scores = logits / torch.where(hot, heat, 1.0)
    peaks, tokens = (part[:, None] for part in largest(scores))
    states = torch.where(peaks.isfinite(), DrawState.DRAWN, DrawState.NOT_NUMBERS)
    states = torch.where(peaks == -torch.inf, DrawState.ALL_MASKED, states)
    states = torch.where(heat.isnan(), DrawState.UNDECIDED, states)
    if not (draws["temperature"] != 0).any():
        return tokens[:, 0], states[:, 0]
    seeds, positions = draws["seed"].tolist(), draws["position"].tolist()
    noisy = scores + gumbel_rows(seeds, positions, scores.shape[1], stream, logits.device)
    limits = Truncations(
        column("log_min_p", np.float64), column("top_p", np.float64), column("top_k", np.int64)
    )
    sure = None
    if ((draws["top_p"] < 1) | (draws["top_k"] > 0) | (draws["log_min_p"] > -np.inf)).any():
        least, sure = floors(scores, peaks, limits)
        noisy.masked_fill_(scores < least, -torch.inf)
    first, ids = (part[:, None] for part in largest(noisy))
    second = noisy.scatter_(1, ids, -torch.inf).amax(1, keepdim=True)
    decided = first - second > NOISE_ERROR + SUM_ERROR * first.abs()
    if sure is not None:
        decided &= scores.gather(1, ids) >= sure
    states = torch.where(hot & ~decided & (states == DrawState.DRAWN), DrawState.UNDECIDED, states)
    return torch.where(hot, ids, tokens)[:, 0], states[:, 0]


def largest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Of each row of logits [R, V], the largest value and the lowest id that has it; nan and any id
    for a row with a nan in it.
    """
    num_rows, vocab_size = logits.shape
    size = next((size for size in _PART_SIZES if vocab_size % size == 0), None)
    if size is None or not logits.is_contiguous():
        ids = logits.argmax(dim=-1, keepdim=True)
    else:
        parts = logits.view(num_rows, -1, size)
        best = parts.amax(dim=-1).argmax(dim=-1, keepdim=True)
        inside = parts.gather(1, best.unsqueeze(-1).expand(-1, 1, size)).squeeze(1)
        ids = best * size + inside.argmax(dim=-1, keepdim=True)
    return logits.gather(1, ids).flatten(), ids.flatten()


def scores(logits: Tensor, spec: SampleSpec) -> Tensor:
    """logits [V] → the scores whose softmax `spec` draws from, -inf for what cannot be drawn. Of a
    greedy spec, the adjusted logits: the largest is drawn.
    """
    params = spec.params
    row = adjust(logits, spec) if adjusts(spec) else logits
    if params.temperature == 0:
        return row
    row = row / params.temperature
    return truncate(row, params) if truncates(params) else row


def drawable_scores(logits: Tensor, spec: SampleSpec) -> Tensor | Undrawable:
    """`scores` of logits [V], of which at least one is above -inf."""
    if not math.isfinite(float(logits.amax())):
        return Undrawable(NOT_NUMBERS)
    prepared = scores(logits, spec)
    return _fault(float(prepared.amax())) or prepared


def choose(logits: Tensor, spec: SampleSpec, stream: Stream = SAMPLING) -> int | Undrawable:
    """The place in logits [V] that `spec` draws. This is the definition; `Sampler` gives the same
    for many rows at once.
    """
    params = spec.params
    if not math.isfinite(float(logits.amax())):
        return Undrawable(NOT_NUMBERS)
    row = adjust(logits, spec) if adjusts(spec) else logits
    if params.temperature > 0:
        row = row / params.temperature
    fault = _fault(float(row.amax()))
    if fault is not None or params.temperature == 0:
        return fault or int(largest(row[None])[1])
    kept = surviving(row, params).sort().values if truncates(params) else None
    noisy, ids = (row, stream.token_ids) if kept is None else (row[kept], kept)
    if kept is not None and stream.token_ids is not None:
        ids = stream.token_ids[kept]
    size = stream.vocab_size or len(row)
    noise = gumbel_noise(params.seed, spec.position, size, stream.purpose, ids, stream.offset)
    chosen = int(largest((noisy + noise.to(row.device))[None])[1])
    return chosen if kept is None else int(kept[chosen])


def _fault(peak: float) -> Undrawable | None:
    """What is wrong with a row of which `peak` is the largest score."""
    if peak == -math.inf:
        return Undrawable(ALL_MASKED)
    return None if math.isfinite(peak) else Undrawable(NOT_NUMBERS)


def draws(logits: Tensor, choices: Sequence[ChosenToken]) -> list[Draw]:
    """The tokens chosen from rows of logits [R, V], with log probabilities where asked for."""
    queries: dict[int, LogprobQuery] = {}
    for index, choice in enumerate(choices):
        params = choice.params
        if params.logprobs is not None or params.logprob_token_ids:
            queries[index] = LogprobQuery(
                choice.row, choice.token_id, params.logprobs or 0, params.logprob_token_ids
            )
    answers = dict(zip(queries, token_logprobs(logits, list(queries.values())), strict=True))
    return [Draw(choice.token_id, answers.get(index)) for index, choice in enumerate(choices)]


def adjusts(spec: SampleSpec) -> bool:
    """Whether `adjust` would change anything."""
    params = spec.params
    return bool(
        spec.banned_ids
        or params.logit_bias
        or params.allowed_token_ids is not None
        or params.needs_history
        or spec.masks
    )


def adjust(logits: Tensor, spec: SampleSpec) -> Tensor:
    """logits [V] float32 as `spec` wants them, a new tensor. Twin: `reference_ops.adjust`."""
    row = logits[None].clone()
    adjust_rows(row, [spec])
    return row[0]


def adjust_rows(logits: Tensor, specs: Sequence[SampleSpec]) -> None:
    """Make of each row of logits [n, V] float32, contiguous, what its spec wants, in place."""
    flat, size = logits.view(-1), logits.shape[1]
    outputs = [spec.history[spec.num_prompt :] for spec in specs]
    wishes = [spec.params for spec in specs]
    _mask(logits, [(i, spec.masks[0]) for i, spec in enumerate(specs) if spec.masks])
    allowed = [
        (i, p.allowed_token_ids) for i, p in enumerate(wishes) if p.allowed_token_ids is not None
    ]
    if allowed:
        places = _places(allowed, size, logits)
        kept = flat[places]
        logits[[i for i, _ in allowed]] = -torch.inf
        flat[places] = kept
    banned = [
        (i, [*_completing(spec.params.bad_words, output), *spec.banned_ids])
        for i, (spec, output) in enumerate(zip(specs, outputs, strict=True))
    ]
    if any(ids for _, ids in banned):
        flat[_places(banned, size, logits)] = -torch.inf
    biased = [(i, [token for token, _ in p.logit_bias]) for i, p in enumerate(wishes)]
    if any(ids for _, ids in biased):
        biases = [bias for p in wishes for _, bias in p.logit_bias]
        flat.index_add_(0, _places(biased, size, logits), torch.tensor(biases).to(logits))
    _penalize(logits, specs, outputs)


def _mask(logits: Tensor, masks: Sequence[tuple[int, bytes]]) -> None:
    """-inf where a row's mask has no bit (`SampleSpec.masks`): one copy to the device for all."""
    if not masks:
        return
    width = -(-logits.shape[1] // 8)
    packed = np.zeros((len(masks), width), np.uint8)
    for place, (_, mask) in enumerate(masks):
        bits = np.frombuffer(mask, np.uint8)[:width]
        packed[place, : len(bits)] = bits
    places = torch.from_numpy(packed).to(logits.device).flatten().int()
    scores = _SCORES_OF_BITS.to(logits.device).index_select(0, places).view(len(masks), -1)
    rows = torch.tensor([row for row, _ in masks], device=logits.device)
    logits.index_add_(0, rows, scores[:, : logits.shape[1]])


def _places(ids_of_rows: Iterable[tuple[int, npt.ArrayLike]], size: int, beside: Tensor) -> Tensor:
    """Token ids of rows as places in all rows of `size`, on the device of `beside`."""
    parts = [np.asarray(ids, np.int64) + row * size for row, ids in ids_of_rows]
    return torch.from_numpy(np.concatenate(parts)).to(beside.device)


def _completing(bad_words: Sequence[tuple[int, ...]], output: Sequence[int]) -> list[int]:
    """The tokens that would complete a banned sequence. As in vLLM, the beginning of a sequence is
    looked for among the generated tokens only, never in the prompt.
    """
    return [
        word[-1]
        for word in bad_words
        if len(word) <= len(output) + 1
        and tuple(output[len(output) - len(word) + 1 :]) == tuple(word[:-1])
    ]


def _penalize(
    logits: Tensor, specs: Sequence[SampleSpec], outputs: Sequence[Sequence[int]]
) -> None:
    """Repetition (Keskar et al., arXiv:1909.05858) over prompt and output, then frequency and
    presence (as OpenAI defines them) over the output.
    """
    flat, size = logits.view(-1), logits.shape[1]
    seen, penalties, drawn, times, frequencies, presences = [], [], [], [], [], []
    for i, (spec, output) in enumerate(zip(specs, outputs, strict=True)):
        params = spec.params
        if params.repetition_penalty != 1.0 and spec.history:
            seen.append((i, np.unique(np.asarray(spec.history, np.int64))))
            penalties.append(np.full(len(seen[-1][1]), params.repetition_penalty, np.float32))
        if (params.frequency_penalty or params.presence_penalty) and output:
            ids, counts = np.unique(np.asarray(output, np.int64), return_counts=True)
            drawn.append((i, ids))
            times.append(counts.astype(np.float32))
            frequencies.append(np.full(len(ids), params.frequency_penalty, np.float32))
            presences.append(np.full(len(ids), params.presence_penalty, np.float32))
    if seen:
        places, penalty = _places(seen, size, logits), _column(penalties, logits)
        values = flat[places]
        flat[places] = torch.where(values > 0, values / penalty, values * penalty)
    if drawn:
        places = _places(drawn, size, logits)
        flat[places] -= _column(frequencies, logits) * _column(times, logits)
        flat[places] -= _column(presences, logits)


def _column(parts: Sequence[npt.NDArray[np.float32]], beside: Tensor) -> Tensor:
    return torch.from_numpy(np.concatenate(parts)).to(beside.device)
