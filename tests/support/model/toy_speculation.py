"""Speculative decoding of a toy language, 200,000 requests at a time, with production's own parts.
Production decides once for each context; this module only gathers rows for each request.
`Toy.replay` takes single requests through `answer`, to show that this makes no difference.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tests.support.model.single_draws import AnsweredRows
from worker.executor.answers import PendingAnswers, Verification
from worker.ops.draft import choose_drafts
from worker.ops.drafted import AcceptedPrefixes, DraftBatch
from worker.ops.noise import Purpose
from worker.ops.rejection import accept, certain
from worker.ops.rejection_torch import last_tokens
from worker.ops.sample import scores
from worker.types import SampleSpec, SamplingParams, ScheduledSequence

VOCAB = 5
PROMPT = (2, 4, 2)
NUM_TOKENS = 3
STOP = 4
_BASE_SEED = 20_240_716
_MASK32 = np.uint64(0xFFFFFFFF)
_MULTIPLIERS = (np.uint64(0xD2E7470EE14C6C93), np.uint64(0xCA5A826395121157))
_WEYL = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBB67AE8584CAA73B))

Words = npt.NDArray[np.uint64]


def _multiply(a: np.uint64, b: Words) -> tuple[Words, Words]:
    half = np.uint64(32)
    a_low, a_high, b_low, b_high = a & _MASK32, a >> half, b & _MASK32, b >> half
    low, middle = a_low * b_low, a_high * b_low
    other = a_low * b_high + (low >> half) + (middle & _MASK32)
    return a_high * b_high + (middle >> half) + (other >> half), a * b


def philox(seeds: Words, position: int, purpose: int, offset: int) -> Words:
    """Return the first words [N, 4] of each request's stream, as NumPy's generator gives them."""
    keys = [seeds.copy(), np.zeros_like(seeds)]
    counter = [np.full_like(seeds, word) for word in (1, offset, position, purpose)]
    with np.errstate(over="ignore"):
        for turn in range(10):
            if turn:
                keys = [key + weyl for key, weyl in zip(keys, _WEYL, strict=True)]
            high0, low0 = _multiply(_MULTIPLIERS[0], counter[0])
            high1, low1 = _multiply(_MULTIPLIERS[1], counter[2])
            counter = [high1 ^ counter[1] ^ keys[0], low1, high0 ^ counter[3] ^ keys[1], low0]
    return np.stack(counter, 1)


class Chance:
    def __init__(self, size: int) -> None:
        self.seeds = np.arange(_BASE_SEED, _BASE_SEED + size, dtype=np.uint64)
        self.gumbel = cache(self._gumbel)
        self.uniforms = cache(self._uniforms)

    def _gumbel(self, position: int, purpose: Purpose, offset: int = 0) -> Tensor:
        words = philox(self.seeds, position, int(purpose), offset).view(np.uint32)[:, :VOCAB]
        uniform = torch.from_numpy(words.astype(np.float32))
        uniform.add_(0.5).mul_(2.0**-32).clamp_(max=1.0 - 2.0**-24)
        return -(-(-uniform).log1p()).log()

    def _uniforms(self, position: int, purpose: Purpose) -> Tensor:
        words = philox(self.seeds, position, int(purpose), 0)
        return torch.from_numpy((words >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def raw_logits(context: Sequence[int], salt: int) -> Tensor:
    generator = np.random.default_rng([salt, *context])
    return torch.from_numpy(generator.standard_normal(VOCAB).astype(np.float32)) * 1.3


def draft_logits(context: Sequence[int]) -> Tensor:
    return raw_logits(context, 0) * 0.6 + raw_logits(context, 1) * 0.9


def child(node: Any, token: Any) -> Any:
    """Contexts are numbered: 0 is the prompt, and each has five children."""
    return node * VOCAB + token + 1


def contexts(depth: int) -> list[tuple[int, ...]]:
    lengths = range(depth + 1)
    return [c for n in lengths for c in itertools.product(range(VOCAB), repeat=n)]


@dataclass(frozen=True)
class Drafting:
    """`method` is "coupled", "standard" or "block"; `drafter` is "none", "lookup" (some token,
    always the same after the same context), "greedy", "gumbel" or "probabilistic".
    """

    drafter: str
    method: str = "coupled"
    num_drafts: int = 3


Accept = Callable[[DraftBatch, Tensor, str], AcceptedPrefixes]
Last = Callable[[DraftBatch, AcceptedPrefixes, Tensor, Tensor], Tensor]


def _last(batch: DraftBatch, acceptance: AcceptedPrefixes, noise: Tensor, _draws: Tensor) -> Tensor:
    return last_tokens(batch, acceptance, noise)


@dataclass(frozen=True)
class Rules:
    """Production's decisions about drafts; a test replaces one to see wrong decisions caught."""

    accept: Accept = accept
    last: Last = _last
    # Whether noise of drafts and of acceptance is that of the position alone, whichever the run.
    reuses_noise: bool = False
    # Whether drafts are judged only as far as the drafter is rather sure of them.
    judges_likely: bool = False


@dataclass
class Toy:
    params: SamplingParams
    chance: Chance
    _tables: dict[str, Tensor] = field(default_factory=dict)

    def spec(self, output: Sequence[int], seed: int = 0) -> SampleSpec:
        start = SampleSpec(
            replace(self.params, seed=seed),
            len(PROMPT),
            (STOP,) if self.params.min_tokens else (),
            PROMPT if self.params.needs_history else (),
            len(PROMPT),
        )
        return start.after(output)

    def raw(self, output: Sequence[int]) -> Tensor:
        return raw_logits(output, 0)

    def table(self, name: str, make: Callable[[tuple[int, ...]], Tensor], depth: int) -> Tensor:
        if name not in self._tables:
            self._tables[name] = torch.stack([make(c) for c in contexts(depth)])
        return self._tables[name]

    @property
    def scores(self) -> Tensor:
        return self.table("target", lambda c: scores(self.raw(c), self.spec(c)), NUM_TOKENS + 2)

    def exact(self) -> list[float]:
        rows = self.scores.double().softmax(-1)
        whole = torch.ones(1, dtype=torch.float64)
        first = 0
        for length in range(NUM_TOKENS):
            level = rows[first : first + VOCAB**length]
            whole = (whole[:, None] * level).flatten()
            first += VOCAB**length
        return whole.tolist()

    def _drafts(self, method: str) -> tuple[Tensor, Tensor]:
        depth = NUM_TOKENS + 1
        plain = self.table("draft", draft_logits, depth)
        if method == "greedy":
            return plain, certain(plain.argmax(-1), VOCAB)

        def proposals(c: tuple[int, ...]) -> Tensor:
            q = choose_drafts(draft_logits(c)[None], [self.params], [0], "probabilistic", 0)[2]
            return q[0]

        q = self.table("proposals", proposals, depth)
        return torch.where(q > 0, plain / self.params.temperature, -torch.inf), q

    def _draft(
        self, how: Drafting, nodes: Tensor, position: int, offset: int, rows: Tensor
    ) -> tuple[Tensor, Tensor]:
        if how.drafter == "lookup":
            drafts = (nodes * 7 + nodes // 3) % VOCAB
            return drafts, certain(drafts, VOCAB)
        table, proposals = self._drafts(how.drafter)
        own = table[nodes]
        if how.drafter == "gumbel":
            own = own + self.chance.gumbel(position, Purpose.SAMPLE)[rows]
        elif how.drafter == "probabilistic":
            own = own + self.chance.gumbel(position, Purpose.DRAFT, offset)[rows]
        return own.argmax(-1), proposals[nodes]

    def simulate(self, how: Drafting, rules: Rules | None = None) -> Tensor:
        rules = rules or Rules()
        size = len(self.chance.seeds)
        nodes = torch.zeros(size, dtype=torch.int64)
        lengths = torch.zeros(size, dtype=torch.int64)
        output = torch.zeros(size, NUM_TOKENS + how.num_drafts, dtype=torch.int64)
        for start in range(NUM_TOKENS):
            [rows] = (lengths == start).nonzero(as_tuple=True)
            drafts, scores_, proposals = self._run(how, rules, nodes[rows], start, rows)
            position = len(PROMPT) + start
            if how.method == "coupled":
                noise = [
                    self.chance.gumbel(position + i, Purpose.SAMPLE)[rows]
                    for i in range(scores_.shape[1])
                ]
                drawn = (scores_ + torch.stack(noise, 1)).argmax(-1)
                counts = (drawn[:, :-1] == drafts).cumprod(1).sum(1)
                lasts = drawn.gather(1, counts[:, None])[:, 0]
            else:
                judged = self._judged(rules, drafts, proposals)
                batch = DraftBatch(drafts, scores_, proposals, judged)
                counts, lasts = self._judge(batch, how.method, rules, position, rows)
            for place in range(how.num_drafts + 1):
                tokens = lasts if place == how.num_drafts else drafts[:, place]
                tokens = torch.where(counts == place, lasts, tokens)
                reached = counts >= place
                output[rows[reached], start + place] = tokens[reached]
                nodes[rows[reached]] = child(nodes[rows[reached]], tokens[reached])
            lengths[rows] += counts + 1
        return output[:, :NUM_TOKENS]

    def _run(
        self, how: Drafting, rules: Rules, nodes: Tensor, start: int, rows: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Drafts are [A, K], scores [A, K + 1, V] and q [A, K, V]."""
        drafts: list[Tensor] = []
        proposals: list[Tensor] = []
        seen = [self.scores[nodes]]
        for offset in range(how.num_drafts if how.drafter != "none" else 0):
            position = len(PROMPT) + start + offset
            named = 0 if rules.reuses_noise else offset
            draft, q = self._draft(how, nodes, position, named, rows)
            nodes = child(nodes, draft)
            drafts.append(draft)
            proposals.append(q)
            seen.append(self.scores[nodes])
        if not drafts:
            return nodes.new_zeros(len(nodes), 0), torch.stack(seen, 1), seen[0][:, None][:, :0]
        return torch.stack(drafts, 1), torch.stack(seen, 1), torch.stack(proposals, 1)

    @staticmethod
    def _judged(rules: Rules, drafts: Tensor, proposals: Tensor) -> Tensor:
        if not rules.judges_likely:
            return torch.full((len(drafts),), drafts.shape[1])
        sure = proposals.gather(-1, drafts[..., None])[..., 0] > 0.3
        return sure.cumprod(1).sum(1)

    def _judge(
        self, batch: DraftBatch, method: str, rules: Rules, position: int, rows: Tensor
    ) -> tuple[Tensor, Tensor]:
        size = batch.drafts.shape[1]
        draws = self.chance.uniforms(position, Purpose.ACCEPT)[rows, :size]
        if rules.reuses_noise:
            own = [self.chance.uniforms(position + i, Purpose.ACCEPT)[rows, 0] for i in range(size)]
            draws = torch.stack(own, 1)
        acceptance = rules.accept(batch, draws, method)
        counts = acceptance.num_accepted
        noise = torch.empty(len(rows), VOCAB)
        for count in range(size + 1):
            for purpose in (Purpose.RESIDUAL, Purpose.SAMPLE):
                full = batch.num_drafts == count
                chosen = (counts == count) & (full if purpose is Purpose.SAMPLE else ~full)
                noise[chosen] = self.chance.gumbel(position + count, purpose)[rows[chosen]]
        return counts, rules.last(batch, acceptance, noise, draws)

    def replay(self, index: int, how: Drafting) -> list[int]:
        seed = int(self.chance.seeds[index])
        params = replace(self.params, seed=seed)
        output: list[int] = []
        while len(output) < NUM_TOKENS:
            drafts, q = self._real_drafts(params, output, how)
            known = output[-1] if output else PROMPT[-1]
            sequence = ScheduledSequence(
                7,
                [known, *drafts],
                len(PROMPT) + len(output) - 1,
                [0],
                (self.spec(output, seed),),
                num_drafts=len(drafts),
            )
            hidden = [self.raw([*output, *drafts[:i]]) for i in range(len(drafts) + 1)]
            proposals = {} if q is None or how.method == "coupled" else {7: q}
            batch: Any = AnsweredRows([sequence])
            verification = Verification(proposals, how.method)
            answers = PendingAnswers(batch, torch.stack(hidden), torch.clone, verification)
            result = answers.collect()
            output += [draw.token_id for draw in result.sampled[7]]
        return output[:NUM_TOKENS]

    def _real_drafts(
        self, params: SamplingParams, output: Sequence[int], how: Drafting
    ) -> tuple[list[int], Tensor | None]:
        drafts: list[int] = []
        proposals: list[Tensor] = []
        node = 0
        for token in output:
            node = child(node, token)
        for offset in range(how.num_drafts if how.drafter != "none" else 0):
            if how.drafter == "lookup":
                draft = (node * 7 + node // 3) % VOCAB
                proposals.append(certain(torch.tensor(draft), VOCAB))
            else:
                context = [*output, *drafts]
                choice = choose_drafts(
                    draft_logits(context)[None],
                    [params],
                    [len(PROMPT) + len(context)],
                    how.drafter,
                    offset,
                )
                [draft] = choice.token_ids
                if choice.proposals is not None:
                    proposals.append(choice.proposals[0])
            drafts.append(draft)
            node = child(node, draft)
        return drafts, torch.stack(proposals) if proposals else None


@dataclass(frozen=True)
class Fit:
    """The chance of a chi-square statistic at least as large, and the total variation with the
    bound that honest draws exceed once in a hundred times.
    """

    p_value: float
    variation: float
    bound: float


def fit(output: Tensor, exact: Sequence[float]) -> Fit:
    """Cells of less than 5 expected draws are taken together.

    The mean of the total variation is at most ½ Σ √(p (1 - p)/N) (Jensen). One draw changes it by
    at most 1/N, so it is more than √(ln 100/2N) above its mean once in a hundred times (McDiarmid).
    """
    total = len(output)
    numbers = output[:, 0]
    for place in range(1, NUM_TOKENS):
        numbers = numbers * VOCAB + output[:, place]
    counts = numbers.bincount(minlength=len(exact)).double()
    shares = torch.tensor(exact, dtype=torch.float64)
    expected = shares * total
    variation = float((counts - expected).abs().sum()) / 2 / total
    mean = float((shares * (1 - shares) / total).sqrt().sum()) / 2
    bound = mean + math.sqrt(math.log(100) / (2 * total))
    if bool((counts[shares == 0] > 0).any()):
        return Fit(0.0, variation, bound)
    large = expected >= 5
    cells = [*zip(counts[large].tolist(), expected[large].tolist(), strict=True)]
    if float(expected[~large].sum()) >= 5:
        cells.append((float(counts[~large].sum()), float(expected[~large].sum())))
    statistic = math.fsum((count - mean) ** 2 / mean for count, mean in cells)
    freedom = torch.tensor((len(cells) - 1) / 2, dtype=torch.float64)
    tail = torch.special.gammaincc(freedom, torch.tensor(statistic / 2, dtype=torch.float64))
    return Fit(float(tail), variation, bound)
