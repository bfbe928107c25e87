"""A target with a drafter on the device, stepped by hand: blocks shared, copied and used again."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from tests.support.model.tiny_llama import (
    BLOCK_SIZE,
    NUM_BLOCKS,
    TINY,
    empty_cache,
    states_of,
    step_of,
)
from worker.executor.drafting.cached_drafter import CachedDrafter
from worker.executor.drafting.interface import DraftNetwork
from worker.executor.drafting.rounds import most_rows
from worker.executor.graphs import DecodeGraphs, GraphDevice
from worker.executor.interface import execute
from worker.executor.model_runner import ModelRunner
from worker.models.draft_head import DraftHead, HeadShape, assemble
from worker.models.llama import LlamaModel
from worker.types import (
    Drafts,
    ModelOutput,
    SampleSpec,
    SamplingParams,
    ScheduledSequence,
    SchedulerOutput,
)

GREEDY = SamplingParams(max_tokens=1, temperature=0.0)
MAX_LENGTH = 64
VOCABULARY = TINY.vocab_size


def tiny_head(target: LlamaModel) -> DraftHead:
    """Return a head of random weights that can say two thirds of the vocabulary."""
    shape = HeadShape(intermediate_size=40, draft_vocab_size=40)
    generator = torch.Generator().manual_seed(3)
    tensors = {
        name: torch.ones(size) if len(size) == 1 else torch.randn(size, generator=generator) * 0.3
        for name, size in shape.tensor_shapes(target.config).items()
    }
    vocab = torch.randperm(VOCABULARY, generator=generator)[:40].sort().values
    with torch.inference_mode():
        return assemble(shape, tensors, vocab, target)


@torch.inference_mode()
def likeliest(model: LlamaModel, token_ids: Sequence[int]) -> list[int]:
    return model.logits(states_of(model, token_ids)).argmax(dim=-1).tolist()


def drafts_of_model(
    model: LlamaModel, token_ids: Sequence[int], drafts: Sequence[int]
) -> list[int]:
    """Return greedy drafts of a run of everything, each as if those of `drafts` before it were
    right.
    """
    return likeliest(model, [*token_ids, *drafts[:-1]])[len(token_ids) - 1 :]


@torch.inference_mode()
def drafts_of_head(
    head: DraftHead, target: LlamaModel, token_ids: Sequence[int], drafts: Sequence[int]
) -> list[int]:
    cache, table = empty_cache(head.config), range(NUM_BLOCKS)
    features = states_of(target, token_ids[:-1])
    rows = list(token_ids[1:])
    found: list[int] = []
    for _ in drafts:
        start = len(token_ids) - 1 + len(found) - len(rows)
        hidden = head.forward(features, step_of(rows, start, table), cache)
        best = int(head.logits(hidden[-1:]).argmax())
        found.append(int(head.draft_vocab[best]))
        features, rows = hidden[-1:], found[-1:]
    return found


@dataclass
class Walker:
    seq_id: int
    tokens: list[int]
    computed: int = 0
    table: list[int] = field(default_factory=list)
    last_drafts: Drafts | None = None

    @property
    def drafts(self) -> list[int]:
        return list(self.last_drafts.token_ids) if self.last_drafts is not None else []


@dataclass
class Bench:
    target: LlamaModel
    runner: ModelRunner
    drafter: CachedDrafter
    free: list[int] = field(default_factory=lambda: list(range(NUM_BLOCKS)))
    owners: dict[int, int] = field(default_factory=dict)
    full: dict[tuple[int, ...], int] = field(default_factory=dict)
    copies: list[tuple[int, int]] = field(default_factory=list)
    num_steps: int = 0

    def take(self, walker: Walker, length: int) -> bool:
        wanted = -(-length // BLOCK_SIZE) - len(walker.table)
        if wanted > len(self.free):
            return False
        for _ in range(wanted):
            block = self.free.pop()
            self.full = {chain: owner for chain, owner in self.full.items() if owner != block}
            self.owners[block] = 1
            walker.table.append(block)
        return True

    def admit(self, walker: Walker) -> bool:
        """Find full blocks of others with the same tokens, and the head of one more to copy."""
        tokens, limit = walker.tokens, len(walker.tokens) - 1
        walker.computed, walker.table, walker.last_drafts = 0, [], None
        while (end := walker.computed + BLOCK_SIZE) <= limit and tuple(tokens[:end]) in self.full:
            block = self.full[tuple(tokens[:end])]
            if block in self.free:
                self.free.remove(block)
            self.owners[block] = self.owners.get(block, 0) + 1
            walker.table.append(block)
            walker.computed = end
        for chain, block in self.full.items():
            prefix = tuple(tokens[: walker.computed])
            if len(chain) == len(prefix) + BLOCK_SIZE and chain[: len(prefix)] == prefix:
                shared = 0
                for mine, theirs in zip(
                    tokens[len(prefix) : limit], chain[len(prefix) :], strict=False
                ):
                    if mine != theirs:
                        break
                    shared += 1
                destination = self.free[-1] if self.free else None
                if shared and destination is not None and destination != block:
                    self.take(walker, len(prefix) + 1)
                    self.copies.append((block, destination))
                    walker.computed += shared
                    break
        return self.take(walker, len(tokens)) or self.drop(walker)

    def drop(self, walker: Walker) -> bool:
        for block in walker.table:
            self.owners[block] -= 1
            if not self.owners[block]:
                self.free.append(block)
        self.copies = [pair for pair in self.copies if pair[1] not in self.free]
        walker.table, walker.computed, walker.last_drafts = [], 0, None
        return False

    def step(self, shares: Sequence[ScheduledSequence]) -> ModelOutput:
        self.num_steps += 1
        step = SchedulerOutput(self.num_steps, tuple(shares), tuple(self.copies))
        self.copies = []
        return execute(self.runner, step)

    def update(self, walker: Walker, share: ScheduledSequence, output: ModelOutput) -> int:
        draws = [draw.token_id for draw in output.sampled.get(walker.seq_id, ())]
        accepted = len(draws) - 1 if draws else 0
        walker.computed += len(share.token_ids) - share.num_drafts + accepted
        walker.tokens += draws
        for end in range(BLOCK_SIZE, walker.computed + 1, BLOCK_SIZE):
            self.full.setdefault(tuple(walker.tokens[:end]), walker.table[end // BLOCK_SIZE - 1])
        walker.last_drafts = output.drafts.get(walker.seq_id)
        return accepted


def share_of(
    walker: Walker,
    num_tokens: int,
    drafts: Sequence[int] = (),
    num_to_draft: int = 0,
    params: SamplingParams = GREEDY,
) -> ScheduledSequence:
    end = walker.computed + num_tokens
    tokens = [*walker.tokens[walker.computed : end], *drafts]
    draws = end == len(walker.tokens)
    samples = (SampleSpec(params, end),) if draws else ()
    return ScheduledSequence(
        walker.seq_id,
        tokens,
        walker.computed,
        list(walker.table),
        samples,
        num_drafts=len(drafts),
        num_to_draft=num_to_draft if draws else 0,
    )


def make_bench(
    target: LlamaModel,
    network: DraftNetwork,
    method: str = "greedy",
    device: GraphDevice | None = None,
) -> Bench:
    """With `device`, decode steps are replayed from its graphs, drafts included, and other steps
    from pieces.
    """
    num_blocks, graphs = NUM_BLOCKS + (device is not None), None
    if device is not None:
        graphs = DecodeGraphs(device, (1, 2, 4), (16, NUM_BLOCKS), 4, piece_sizes=(8, 24))
    blocks = (num_blocks, BLOCK_SIZE)
    drafter = CachedDrafter(lambda _: network, network, target, blocks, method)

    def cache() -> torch.Tensor:
        return empty_cache(target.config, num_blocks)

    return Bench(
        target, ModelRunner(target, lambda: target, cache, drafter, graphs=graphs), drafter
    )


Oracle = Callable[[Sequence[int], Sequence[int]], list[int]]


@dataclass
class Walk:
    """Up to five sequences at random: chunks, hits, copies, preemption, and the drafter's drafts or
    none. Every draw is the target's most likely token and every draft the oracle's.

    `verified` counts the drafter's own verified drafts, `accepted` the accepted ones.
    """

    bench: Bench
    oracle: Oracle
    rng: random.Random
    walkers: list[Walker] = field(default_factory=list)
    verified: int = 0
    accepted: int = 0
    copied: int = 0

    def run(self, num_steps: int) -> None:
        rng = self.rng
        stems = [[rng.randrange(VOCABULARY) for _ in range(24)] for _ in range(2)]
        for number in range(self.bench.num_steps, self.bench.num_steps + num_steps):
            if len(self.walkers) < 5 and rng.random() < 0.5:
                prompt = rng.choice(stems)[: rng.randint(1, 24)]
                prompt += [rng.randrange(VOCABULARY) for _ in range(rng.randint(0, 6))]
                self.walkers.append(Walker(number, prompt))
            if self.walkers and rng.random() < 0.15:
                self.bench.drop(rng.choice(self.walkers))  # preempted: its tokens stay
            self.step()

    def go_on(self, num_steps: int) -> None:
        """Make steps in which some sequences decode, the same ones in each, with drafts."""
        chosen = self.rng.sample(self.walkers, min(len(self.walkers), self.rng.randint(1, 3)))
        for _ in range(num_steps):
            chosen = [walker for walker in chosen if walker in self.walkers]
            self.step(chosen, (1, 2, 4))

    def step(
        self, chosen: Sequence[Walker] | None = None, wanted: Sequence[int] = (0, 0, 1, 2, 4)
    ) -> None:
        if chosen is None:
            chosen = self.rng.sample(self.walkers, self.rng.randint(0, len(self.walkers)))
        plans = [plan for walker in chosen if (plan := self.plan(walker, wanted))]
        self.copied += len(self.bench.copies)
        output = self.bench.step([share for _, share, _ in plans])
        for walker, share, is_own in plans:
            before = len(walker.tokens)
            stood = self.bench.update(walker, share, output)
            if share.samples:
                expected = likeliest(self.bench.target, walker.tokens[:-1])[before - 1 :]
                assert walker.tokens[before:] == expected
            if walker.last_drafts is not None or not _may_wait([share for _, share, _ in plans]):
                _check_drafts(walker, share, self.oracle)
            if is_own:
                self.verified += share.num_drafts
                self.accepted += stood
        for walker in [w for w in self.walkers if len(w.tokens) > MAX_LENGTH - 12]:
            self.bench.drop(walker)
            self.walkers.remove(walker)

    def plan(
        self, walker: Walker, choices: Sequence[int]
    ) -> tuple[Walker, ScheduledSequence, bool] | None:
        rng, bench = self.rng, self.bench
        if not walker.table and not bench.admit(walker):
            return None
        left = len(walker.tokens) - walker.computed
        count = left if rng.random() < 0.6 else rng.randint(1, left)
        drafts, is_own = _some_drafts(walker, bench.target, rng) if left == 1 else ([], False)
        wanted = rng.choice(choices)
        if not bench.take(walker, len(walker.tokens) + len(drafts) + 1 + wanted):
            drafts, wanted = [], 0
            if not bench.take(walker, len(walker.tokens)):
                return None
        return walker, share_of(walker, count, drafts, wanted), is_own


def _some_drafts(walker: Walker, target: LlamaModel, rng: random.Random) -> tuple[list[int], bool]:
    kind = rng.random()
    if (
        kind < 0.5
        and walker.last_drafts is not None
        and walker.last_drafts.position == len(walker.tokens)
    ):
        return walker.drafts[: rng.randint(0, 4)], True
    if kind < 0.65:
        right: list[int] = []
        for _ in range(rng.randint(1, 3)):
            right.append(likeliest(target, [*walker.tokens, *right])[-1])
        return right, False
    if kind < 0.8:
        return [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 4))], False
    return [], False


def _may_wait(shares: Sequence[ScheduledSequence]) -> bool:
    num_rows = sum(share.start + share.num_tokens for share in shares if share.num_to_draft)
    return num_rows > most_rows(sum(share.num_tokens for share in shares))


def _check_drafts(walker: Walker, share: ScheduledSequence, oracle: Oracle) -> None:
    room = len(walker.table) * BLOCK_SIZE - len(walker.tokens) + 1
    count = min(share.num_to_draft, room)
    if count == 0:
        assert walker.last_drafts is None
        return
    assert walker.last_drafts.position == len(walker.tokens)
    assert len(walker.drafts) == count
    assert walker.drafts == oracle(walker.tokens, walker.drafts)
    assert all(0 < confidence <= 1 for confidence in walker.last_drafts.confidences)
