"""The next tokens of a step: greedy, or drawn after temperature, min-p, top-k and top-p.

The order is vLLM's: `adjust` (masks, bias, penalties), temperature, min-p, top-k, top-p, draw. A
draw is Gumbel-max: argmax(score + noise) has exactly the softmax distribution, and the noise is a
pure function of the request's seed and the position (see `noise`).

`choose` defines the draw of one row. `Sampler` draws the same for many rows at once, with
arithmetic that may round otherwise. A token that wins by more than all rounding is drawn. Otherwise
(less than one draw in 640) score and noise are added again in float64: by `choose` on a CPU, and by
the kernel itself on other devices. So no draw depends on its batch, device or kernel.

Logits processors come before `adjust`, so that they cannot allow a token that it forbids.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from worker.logits_processors import instance
from worker.ops.logprobs import LogprobQuery, token_logprobs
from worker.ops.noise import Stream, gumbel_at, gumbel_noise, gumbel_rows
from worker.ops.step import sent
from worker.ops.truncate import WIDE_HEAD, Truncations, floors, surviving, truncate, truncates
from worker.types import Draw, SampleSpec, SamplingParams

logger = logging.getLogger(__name__)

NOT_NUMBERS = "the model's logits are not finite numbers"
ALL_MASKED = "no token may be drawn: every one is excluded by the request's parameters"

# Finding the largest of a row's largest parts is many times as fast as finding its place at once.
_PART_SIZES = (128, 64, 32)

# The addends to eight logits for each byte of a mask: a look-up is many times as fast as shifts.
_BYTES, _BITS = torch.arange(256)[:, None], torch.arange(8)
_SCORES_OF_BITS = torch.where((_BYTES >> _BITS & 1) == 1, 0.0, -torch.inf)

_SEED_BITS = (1 << 64) - 1
_MIN_HEAT = 1e-37
# The distance from which two sums of score and noise are in order under any rounding: logarithms
# are correct to two units in the last place, and noise is below 23.
NOISE_ERROR, SUM_ERROR = 1.2e-5, 3e-7

# Candidates of a close draw that a device adds again: a fifth is less likely than a bit error.
_CANDIDATES = 4

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
DRAW_WORDS = DRAWS.itemsize // 4


class Cut(IntEnum):
    """The work that a batch of draws requires: the largest logits; all sums of score and noise;
    first the `WIDE_HEAD` likeliest tokens; or a sort of all tokens.
    """

    GREEDY = 0
    NOTHING = 1
    HEAD = 2
    ALL = 3


class DrawState(IntEnum):
    """The result of a draw."""

    DRAWN = 0
    UNDECIDED = 1
    NOT_NUMBERS = 2
    ALL_MASKED = 3


@dataclass(frozen=True, slots=True)
class Undrawable:
    reason: str


UNDRAWABLE = {
    DrawState.NOT_NUMBERS: Undrawable(NOT_NUMBERS),
    DrawState.ALL_MASKED: Undrawable(ALL_MASKED),
}


@dataclass(frozen=True, slots=True)
class ChosenToken:
    row: int
    params: SamplingParams
    token_id: int


class DrawKernel(Protocol):
    def __call__(
        self, logits: Tensor, adjusted: Tensor | None, draws: npt.NDArray[np.void], stream: Stream
    ) -> Tensor:
        """Return tokens and `DrawState`s [2, n] of `draws` [n] of `DRAWS`, from logits [R, V]
        float32 and the rows that `adjust` changed, [m, V], with the noise of `stream`.
        """


@dataclass(frozen=True, slots=True)
class DrawColumns:
    """The parameters of n draws, on the device: `seeds` and `positions` [n] int64, `temperatures`
    [n] float32 (0: greedy; nan: so small that scores overflow) and the truncations.
    """

    seeds: Tensor
    positions: Tensor
    temperatures: Tensor
    limits: Truncations

    @staticmethod
    def of(table: Tensor) -> DrawColumns:
        """Read the columns of a table of `DRAWS` as int32 [n, `DRAW_WORDS`] on the device."""

        def column(name: str, kind: torch.dtype) -> Tensor:
            first = DRAWS.fields[name][1] // 4  # type: ignore[index]
            words = table[:, first : first + kind.itemsize // 4].contiguous()
            return words.view(kind)

        limits = Truncations(
            column("log_min_p", torch.float64),
            column("top_p", torch.float64),
            column("top_k", torch.int32).long(),
        )
        seeds, positions = (column(name, torch.int64)[:, 0] for name in ("seed", "position"))
        return DrawColumns(seeds, positions, column("temperature", torch.float32)[:, 0], limits)


class DeviceDraw(Protocol):
    """Draws from rows of logits on a device, leaving none undecided and waiting for nothing."""

    def __call__(
        self, logits: Tensor, columns: DrawColumns, cut: Cut = Cut.ALL, stream: Stream = SAMPLING
    ) -> Tensor:
        """Return tokens and `DrawState`s [2, n] int32 of one draw from each row of logits [n, V]
        float32, none of which requires more than `cut`. A smaller `cut` spares work that no row
        requires, and changes no draw.
        """


class DeviceMask(Protocol):
    def __call__(self, logits: Tensor, rows: Tensor, bits: Tensor) -> None:
        """Write -inf at token t of row `rows[i]` of logits [R, V] float32, contiguous, if bit t %
        32 of `bits[i, t // 32]` is not set. `rows` [n] and `bits` [n, V / 32] are int32.
        """


def mask_rows(logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    places = bits.contiguous().view(torch.uint8).flatten().int()
    scores = _SCORES_OF_BITS.to(logits.device).index_select(0, places).view(len(bits), -1)
    logits.index_add_(0, rows, scores[:, : logits.shape[1]])


@dataclass(frozen=True, slots=True)
class Sampler:
    """Draws for a whole step with `kernel`; None: with torch, and on a CPU row by row."""

    kernel: DrawKernel | None = None
    mask: DeviceMask = mask_rows

    def launch(
        self,
        logits: Tensor,
        rows: Sequence[int],
        specs: Sequence[SampleSpec],
        stream: Stream = SAMPLING,
    ) -> PendingDraws:
        """Begin to draw `specs[i]` from row `rows[i]` of logits [R, V] float32, which stay
        unchanged. Several specs may draw from one row, independently.
        """
        draws = draw_table(rows, specs)
        changed = [index for index, spec in enumerate(specs) if adjusts(spec)]
        adjusted = None
        if changed:
            # A copy: other specs may draw from the row, and log probabilities are of raw logits.
            adjusted = logits[[rows[index] for index in changed]]
            adjust_rows(adjusted, [specs[index] for index in changed], self.mask)
            draws["adjusted"][changed] = range(len(changed))
        kernel = self.kernel
        if kernel is None and logits.device.type == "cpu":
            # One row after the other is 1.4 to 5 times as fast there as torch with many rows.
            answers = torch.full((2, len(draws)), DrawState.UNDECIDED, dtype=torch.int32)
        else:
            answers = (kernel or draw_rows)(logits.contiguous(), adjusted, draws, stream)
        pending = PendingDraws(logits, rows, specs, stream, answers)
        if logits.device.type == "cpu":
            pending.decide()
        return pending


TORCH_SAMPLER = Sampler()


@dataclass(frozen=True, slots=True)
class PendingDraws:
    logits: Tensor
    rows: Sequence[int]
    specs: Sequence[SampleSpec]
    stream: Stream
    answers: Tensor

    @property
    def tokens(self) -> Tensor:
        """The token of each spec, on the device; undefined for a failed draw."""
        return self.answers[0]

    def decide(self) -> None:
        """Draw undecided rows again, one by one; devices other than a CPU leave none."""
        [undecided] = np.nonzero(self.answers[1].numpy(force=True) == DrawState.UNDECIDED)
        for index in undecided.tolist():
            outcome = choose(self.logits[self.rows[index]], self.specs[index], self.stream)
            token, state = outcome, DrawState.DRAWN
            if isinstance(outcome, Undrawable):
                masked = outcome.reason == ALL_MASKED
                token, state = 0, DrawState.ALL_MASKED if masked else DrawState.NOT_NUMBERS
            self.answers[:, index] = torch.tensor([token, state])

    def collect(self) -> list[int | Undrawable]:
        """Return the token of each spec, or the reason for its failure. Waits for the device."""
        tokens, states = self.answers.tolist()
        return [
            token if state == DrawState.DRAWN else UNDRAWABLE[state]
            for token, state in zip(tokens, states, strict=True)
        ]


def draw_table(rows: Sequence[int], specs: Sequence[SampleSpec]) -> npt.NDArray[np.void]:
    """Build `DRAWS` [n], none of them adjusted."""
    table = np.zeros(len(specs), DRAWS)
    heats = [spec.params.temperature for spec in specs]
    # A temperature that float32 rounds to greedy becomes nan: such rows stay undecided.
    heats = [heat if heat == 0 or heat > _MIN_HEAT else math.nan for heat in heats]
    table[:] = [
        (
            spec.params.seed & _SEED_BITS,
            spec.position,
            spec.params.top_p,
            math.log(spec.params.min_p) if spec.params.min_p > 0 else -math.inf,
            heat,
            spec.params.top_k,
            row,
            *_NOT_ADJUSTED,
        )
        for row, spec, heat in zip(rows, specs, heats, strict=True)
    ]
    return table


def cut_of(draws: npt.NDArray[np.void]) -> Cut:
    hot = draws["temperature"] != 0
    if not hot.any():
        return Cut.GREEDY
    # A top-p without a top-k may retain any number of tokens, so only a sort of all decides.
    nucleus, top_k = hot & (draws["top_p"] < 1), draws["top_k"]
    if ((nucleus & (top_k == 0)) | (hot & (top_k > WIDE_HEAD))).any():
        return Cut.ALL
    cuts = nucleus | (hot & ((top_k > 0) | (draws["log_min_p"] > -np.inf)))
    return Cut.HEAD if cuts.any() else Cut.NOTHING


def draw_columns(
    logits: Tensor, columns: DrawColumns, cut: Cut = Cut.ALL, stream: Stream = SAMPLING
) -> Tensor:
    """Implement `DeviceDraw` in torch, by a number of calls that does not depend on n."""
    raw_peaks, tokens = largest(logits)
    states = torch.where(raw_peaks.isfinite(), DrawState.DRAWN, DrawState.NOT_NUMBERS)
    if cut is Cut.GREEDY:
        return torch.stack((tokens, states)).int()
    heat = columns.temperatures[:, None]
    hot = heat != 0
    scores = logits / torch.where(hot, heat.nan_to_num(0.0), 1.0)
    peaks = scores.amax(1, keepdim=True)
    own_states = torch.where(peaks.isfinite(), DrawState.DRAWN, DrawState.NOT_NUMBERS)
    own_states = torch.where(peaks == -torch.inf, DrawState.ALL_MASKED, own_states)[:, 0]
    states = torch.where(states == DrawState.DRAWN, own_states, states)
    key = columns.seeds, columns.positions
    noisy = scores + gumbel_rows(*key, scores.shape[1], stream)
    if cut is not Cut.NOTHING:
        width = WIDE_HEAD if cut is Cut.HEAD else scores.shape[1]
        noisy.masked_fill_(scores < floors(scores, peaks, columns.limits, width), -torch.inf)
    first, ids = noisy.topk(min(_CANDIDATES, noisy.shape[1]))
    sums = scores.gather(1, ids).double() + gumbel_at(*key, ids, stream)
    sums.masked_fill_(first < first[:, :1] - _closeness(first[:, :1]), -torch.inf)
    is_best = sums == sums.amax(1, keepdim=True)
    # topk orders equal sums arbitrarily; `choose` draws the lowest id of them.
    drawn = torch.where(is_best, ids, scores.shape[1]).amin(1)
    return torch.stack((torch.where(hot[:, 0], drawn, tokens), states)).int()


def _closeness(first: Tensor) -> Tensor:
    """Return how far below its row's largest sum another sum must be to be surely smaller."""
    return NOISE_ERROR + SUM_ERROR * first.abs()


def draw_rows(
    logits: Tensor,
    adjusted: Tensor | None,
    draws: npt.NDArray[np.void],
    stream: Stream,
    draw: DeviceDraw = draw_columns,
) -> Tensor:
    """Implement `DrawKernel` with `draw`; one copy brings everything to the device."""
    device, count = logits.device, len(draws)
    [changed] = np.nonzero(draws["adjusted"] >= 0)
    numbers = (draws.view(np.int32), changed.astype(np.int32))
    packed = sent(np.concatenate(numbers), device)
    table, places = torch.split(packed, [count * DRAW_WORDS, len(changed)])
    columns = DrawColumns.of(table.view(count, DRAW_WORDS))
    rows = table.view(count, DRAW_WORDS)[:, DRAWS.fields["row"][1] // 4]  # type: ignore[index]
    cut = cut_of(draws)
    if adjusted is None:
        return draw(logits.index_select(0, rows), columns, cut, stream)
    chosen = logits.index_select(0, rows)
    # As in `choose`, a raw row that is not finite fails even where a mask hides the number.
    raw_peaks = chosen.amax(1)
    chosen.index_copy_(0, places.long(), adjusted)
    tokens, states = draw(chosen, columns, cut, stream).unbind(0)
    # Triton and a greedy draw report a row of -inf alone as NOT_NUMBERS.
    masked = chosen.amax(1) == -torch.inf
    states = torch.where(masked, DrawState.ALL_MASKED, states)
    states = torch.where(raw_peaks.isfinite(), states, DrawState.NOT_NUMBERS)
    return torch.stack((tokens, states.int()))


def largest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row's largest value and the lowest id that has it; for a nan, nan and any id."""
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
    """Turn logits [V] into the scores whose softmax `spec` draws from, -inf for tokens that cannot
    be drawn. For a greedy spec, return the adjusted logits: the largest is drawn.
    """
    params = spec.params
    row = adjust(logits, spec) if adjusts(spec) else logits
    if params.temperature == 0:
        return row
    row = row / params.temperature
    return truncate(row, params) if truncates(params) else row


def drawable_scores(logits: Tensor, spec: SampleSpec) -> Tensor | Undrawable:
    """Return `scores` of logits [V] if at least one is above -inf; otherwise the reason."""
    if not math.isfinite(float(logits.amax())):
        return Undrawable(NOT_NUMBERS)
    prepared = scores(logits, spec)
    return _fault(float(prepared.amax())) or prepared


def choose(logits: Tensor, spec: SampleSpec, stream: Stream = SAMPLING) -> int | Undrawable:
    """Return the index in logits [V] that `spec` draws. This function defines a draw."""
    params = spec.params
    if not math.isfinite(float(logits.amax())):
        return Undrawable(NOT_NUMBERS)
    row = adjust(logits, spec) if adjusts(spec) else logits
    if params.temperature > 0:
        row = row / params.temperature
    fault = _fault(float(row.amax()))
    if fault is not None or params.temperature == 0:
        return fault or int(largest(row[None])[1])
    # In the order of ids, so that the lowest of equal sums is drawn.
    survivors = surviving(row, params).sort().values if truncates(params) else None
    noisy, ids = (row, stream.token_ids) if survivors is None else (row[survivors], survivors)
    if survivors is not None and stream.token_ids is not None:
        ids = stream.token_ids[survivors]
    size = stream.vocab_size or len(row)
    where = (params.seed, spec.position, size, stream.purpose)
    noise = gumbel_noise(*where, ids, stream.offset)
    sums = noisy + noise.to(row.device)
    peak, chosen = largest(sums[None])
    [close] = torch.nonzero(sums >= peak - _closeness(peak), as_tuple=True)
    if len(close) > 1:
        exact = gumbel_noise(
            *where, close if ids is None else ids[close], stream.offset, exact=True
        )
        chosen = close[(noisy[close].double() + exact.to(row.device)).argmax()]
    return int(chosen) if survivors is None else int(survivors[int(chosen)])


def _fault(peak: float) -> Undrawable | None:
    if peak == -math.inf:
        return Undrawable(ALL_MASKED)
    return None if math.isfinite(peak) else Undrawable(NOT_NUMBERS)


def draws(logits: Tensor, choices: Sequence[ChosenToken]) -> list[Draw]:
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
    params = spec.params
    return bool(
        spec.banned_ids
        or params.logit_bias
        or params.allowed_token_ids is not None
        or params.needs_history
        or spec.masks
    )


def adjust(logits: Tensor, spec: SampleSpec) -> Tensor:
    """Apply the adjustments of `spec` to logits [V] float32; return a new tensor."""
    row = logits[None].clone()
    adjust_rows(row, [spec])
    return row[0]


def adjust_rows(logits: Tensor, specs: Sequence[SampleSpec], mask: DeviceMask = mask_rows) -> None:
    """Apply the adjustments of each row's spec to logits [n, V] float32, contiguous, in place."""
    flat, size = logits.view(-1), logits.shape[1]
    outputs = [spec.history[spec.num_prompt :] for spec in specs]
    wishes = [spec.params for spec in specs]
    for i, params in enumerate(wishes):
        if params.logits_processors:
            _process(logits[i], params, outputs[i])
    # From here on in vLLM's order. A forbidden token gets -inf, which no later change reverts.
    masks = [(i, spec.masks[0]) for i, spec in enumerate(specs) if spec.masks]
    if masks:
        mask(logits, *_packed(masks, logits))
    allowed = [
        (i, p.allowed_token_ids) for i, p in enumerate(wishes) if p.allowed_token_ids is not None
    ]
    if allowed:
        places = _places(allowed, size, logits)
        allowed_logits = flat[places]
        logits[[i for i, _ in allowed]] = -torch.inf
        flat[places] = allowed_logits
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


def _process(row: Tensor, params: SamplingParams, output: Sequence[int]) -> None:
    """Apply logits processors to a row [V], in place. A failing processor excludes every token, so
    that only its request fails.
    """
    for name, arguments in params.logits_processors:
        try:
            changed = instance(name, arguments).process(output, row)
            if changed.shape != row.shape:
                raise ValueError(f"returned logits {list(changed.shape)}, not {list(row.shape)}")
            row.copy_(changed)
        except Exception:  # code of another package
            logger.exception("logits processor %s", name)
            row.fill_(-torch.inf)
            return


def _packed(masks: Sequence[tuple[int, bytes]], beside: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows and their masks as a `DeviceMask` takes them, in one copy."""
    width = -(-beside.shape[1] // 32)
    packed = np.zeros((len(masks), width * 4), np.uint8)
    for place, (_, mask) in enumerate(masks):
        bits = np.frombuffer(mask, np.uint8)[: width * 4]
        packed[place, : len(bits)] = bits
    rows = np.array([row for row, _ in masks], np.int32)
    words = sent(np.concatenate((rows, packed.view(np.int32).ravel())), beside.device)
    return words[: len(masks)], words[len(masks) :].view(len(masks), width)


def _places(ids_of_rows: Iterable[tuple[int, npt.ArrayLike]], size: int, beside: Tensor) -> Tensor:
    parts = [np.asarray(ids, np.int64) + row * size for row, ids in ids_of_rows]
    return torch.from_numpy(np.concatenate(parts)).to(beside.device)


def _completing(bad_words: Sequence[tuple[int, ...]], output: Sequence[int]) -> list[int]:
    """Return the tokens that would complete a banned sequence. As in vLLM, the beginning of a
    sequence is matched against the generated tokens only, never the prompt.
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
    """Apply the repetition penalty (Keskar et al., arXiv:1909.05858), then the two of OpenAI."""
    flat, size = logits.view(-1), logits.shape[1]
    seen, penalties, drawn, times, frequencies, presences = [], [], [], [], [], []
    for i, (spec, output) in enumerate(zip(specs, outputs, strict=True)):
        params = spec.params
        # As in vLLM, repetition counts the prompt too; the other two count outputs alone.
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
        # Division would raise a negative logit.
        flat[places] = torch.where(values > 0, values / penalty, values * penalty)
    if drawn:
        places = _places(drawn, size, logits)
        flat[places] -= _column(frequencies, logits) * _column(times, logits)
        flat[places] -= _column(presences, logits)


def _column(parts: Sequence[npt.NDArray[np.float32]], beside: Tensor) -> Tensor:
    return torch.from_numpy(np.concatenate(parts)).to(beside.device)
