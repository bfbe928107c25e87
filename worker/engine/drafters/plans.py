"""Choosing how many drafts are the most tokens a second, out of all that there are. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

FEW_SEQUENCES = 4  # up to which drafts are likely to pay
MARGIN_OF_FEW, MARGIN = 0.03, 0.07  # what drafts must win to be worth it; with more sequences
_MAX_CANDIDATES = 16  # numbers of drafts that are tried out, beyond the first few
_ALL_TRIED = 8
_ALL_COMMON = 16


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of the next step: `plain` without drafts, as if nobody had been asked for any; `base`
    when somebody was; what 0, 1, … drafts may add to that (`extra`, which they are to repay), and
    are `expected` to. `affordable` is what may be risked.
    """

    num_sequences: int
    plain: float
    base: float
    extra: Sequence[float]
    expected: Sequence[float]
    affordable: float

    def seconds_of(self, num_drafts: int) -> float:
        """What so many drafts are expected to add; beyond those that are told, in proportion."""
        most = len(self.expected) - 1
        if num_drafts <= most:
            return self.expected[num_drafts]
        return self.expected[most] * num_drafts / most

    @property
    def least_rate(self) -> float:
        """Tokens a second that drafts must bring to be worth it."""
        margin = MARGIN_OF_FEW if self.num_sequences <= FEW_SEQUENCES else MARGIN
        return (1.0 + margin) * self.num_sequences / self.plain

    def gain(self, rate: float) -> float:
        """What part of plain decoding's rate this rate is more."""
        return rate * self.plain / self.num_sequences - 1.0


@dataclass(frozen=True, slots=True)
class Prices:
    """By which the account is kept, in plain steps of `plain_seconds` each."""

    plain_seconds: float
    token: float  # won by a draft that is accepted
    draft: float  # of verifying one
    asking: float  # of asking for drafts at all


@dataclass(frozen=True, slots=True)
class Choice:
    """The likeliest `total` drafts, how long making them takes, and what that wins. `is_saving`:
    more would be better, but is more than may be risked.
    """

    total: int
    gain: float
    is_saving: bool
    drafting_seconds: float = 0.0


def is_common_size(num_tokens: int) -> bool:
    """Whether a step of so many tokens is one of those that drafts are to fill up to.

    A size that was never run has its products compiled, which costs as much as a draft can win; so
    only some sizes are used, the closer together the smaller: all up to 16, then every fourth, from
    64 every eighth, and so on.
    """
    if num_tokens <= _ALL_COMMON:
        return True
    step = max(4, 1 << (num_tokens.bit_length() - 4))
    return num_tokens % step == 0


def choose_verified(ranked: Sequence[float], costs: Costs, any_size: bool = False) -> Choice:
    """How many of the drafts to verify whose survivals are these, in falling order.

    Stops at what cannot be afforded, once it would be better than all before it. Without `any_size`
    the step gets one of the common sizes.
    """
    best, best_rate = 0, costs.least_rate
    tokens = float(costs.num_sequences)
    is_saving = False
    base, affordable = costs.base, costs.affordable
    for index, (survival, more) in enumerate(zip(ranked, costs.extra[1:], strict=False), start=1):
        tokens += survival
        rate = tokens / (base + more)
        if rate > best_rate and (any_size or is_common_size(costs.num_sequences + index)):
            if more > affordable:
                is_saving = True
                break
            best, best_rate = index, rate
    return Choice(best, costs.gain(best_rate) if best else 0.0, is_saving)


def choose_drafted(
    survivals: Sequence[Sequence[float]],
    ranked: Sequence[float],
    costs: Costs,
    drafting: Callable[[int, float], float],
) -> Choice:
    """How many drafts to make and verify, if they will survive like this, by sequence (none for
    those that are not asked) and (`ranked`) all together in falling order. `drafting` tells the
    seconds of so many sequences and rounds.
    """
    firsts = sorted((one[0] for one in survivals if one), reverse=True)
    tokens = list(accumulate(ranked, initial=float(costs.num_sequences)))
    most = min(len(costs.extra) - 1, len(ranked))
    stride = max(1, most // _MAX_CANDIDATES)
    best, best_rate, best_seconds = 0, costs.least_rate, 0.0
    is_saving = False
    num_drafting = 0
    few = range(1, min(most, _ALL_TRIED) + 1)
    for total in chain(few, range(_ALL_TRIED + stride, most + 1, stride)):
        while num_drafting < len(firsts) and firsts[num_drafting] >= ranked[total - 1]:
            num_drafting += 1
        width = min(num_drafting, total)
        seconds = drafting(width, total / width)
        rate = tokens[total] / (costs.base + costs.extra[total] + seconds)
        if rate > best_rate:
            if seconds + costs.extra[total] > costs.affordable:
                is_saving = True
                break
            best, best_rate, best_seconds = total, rate, seconds
    return Choice(best, costs.gain(best_rate) if best else 0.0, is_saving, best_seconds)


def heads(survivals: Sequence[Sequence[float]], ranked: Sequence[float], total: int) -> list[int]:
    """How many of each sequence's drafts are among the `total` likeliest (`ranked`) of all."""
    if not total:
        return [0] * len(survivals)
    lowest = ranked[total - 1]
    counts = []
    for values in survivals:
        count = 0
        for value in values:
            if value <= lowest:
                break
            count += 1
        counts.append(count)
    left = total - sum(counts)
    for index, values in enumerate(survivals):
        while left and counts[index] < len(values) and values[counts[index]] == lowest:
            counts[index] += 1
            left -= 1
    return counts


def spread(limit: int, num: int, room: int | None) -> list[int]:
    """As many drafts for each of `num` sequences: at most `limit`, and `room` of all together."""
    if room is None or room >= limit * num:
        return [limit] * num
    share, more = divmod(max(0, room), num)
    return [share + (index < more) for index in range(num)]
