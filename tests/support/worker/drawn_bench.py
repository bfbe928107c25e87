"""Hundreds of requests through a runner whose drafter draws: tiny models of five tokens."""

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from tests.support.model.tiny_llama import BLOCK_SIZE, TINY, states_of, tiny_llama
from tests.support.model.toy_speculation import NUM_TOKENS, PROMPT, VOCAB
from tests.support.worker.draft_bench import Walker, share_of
from worker.executor.drafting.cached_drafter import CachedDrafter
from worker.executor.drafting.interface import DraftNetwork
from worker.executor.drafting.loading import ModelNetwork
from worker.executor.interface import execute
from worker.executor.model_runner import ModelRunner
from worker.models.config import ModelConfig
from worker.models.llama import LlamaModel, StepTensors
from worker.types import SamplingParams, ScheduledSequence, SchedulerOutput

FIVE = replace(TINY, vocab_size=VOCAB, tied_head=False)
TARGET = tiny_llama(seed=5, config=FIVE)
DRAFT = tiny_llama(seed=6, config=replace(FIVE, num_layers=1))
PARAMS = SamplingParams(max_tokens=NUM_TOKENS, temperature=7.0)
MAX_DRAFTS = 3
_BLOCKS_EACH = 3
_TOGETHER = 48


@dataclass
class BreaksLate:
    """Implements `DraftNetwork`: the target, which breaks as a draft model from the second round of
    a step on, at the rows of some tokens. It raises, or its logits are nan; `rounds` counts.
    """

    tokens: frozenset[int]
    raises: bool = False
    rounds: int = 0
    network: DraftNetwork = field(default_factory=lambda: ModelNetwork(TARGET))

    @property
    def config(self) -> ModelConfig:
        return self.network.config

    @property
    def reads_states(self) -> bool:
        return self.network.reads_states

    @property
    def max_positions(self) -> int:
        return self.network.max_positions

    @property
    def draft_vocab(self) -> Tensor | None:
        return self.network.draft_vocab

    @property
    def layers(self) -> tuple[int, ...]:
        return self.network.layers

    def reduce(self, states: Tensor, inputs: Sequence[Tensor]) -> Tensor:
        return self.network.reduce(states, inputs)

    def run(self, features: Tensor | None, step: StepTensors, kv_cache: Tensor) -> Tensor:
        states = self.network.run(features, step, kv_cache)
        bad = torch.tensor([token in self.tokens for token in step.token_ids.tolist()])
        if self.rounds > 0 and bool(bad.any()):
            if self.raises:
                raise RuntimeError("the device is out of memory")
            states = torch.where(bad[:, None], torch.nan, states)
            slots = step.slots.view(len(bad), -1)[bad].flatten()
            for layer in kv_cache:
                layer.view(-1, layer.shape[-1]).index_fill_(0, slots, torch.nan)
        return states

    def logits(self, hidden: Tensor) -> Tensor:
        self.rounds += 1
        return self.network.logits(hidden)


@torch.inference_mode()
def exact(target: LlamaModel = TARGET) -> list[float]:
    """Return the probability of each continuation of `PROMPT`, from runs of the target alone."""
    whole = torch.ones(1, dtype=torch.float64)
    for length in range(NUM_TOKENS):
        rows = [
            target.logits(states_of(target, [*PROMPT, *context])[-1:])[0]
            for context in itertools.product(range(VOCAB), repeat=length)
        ]
        shares = (torch.stack(rows).double() / PARAMS.temperature).softmax(-1)
        whole = (whole[:, None] * shares).flatten()
    return whole.tolist()


class DrawnBench:
    def __init__(self, network: DraftNetwork, method: str, target: LlamaModel = TARGET) -> None:
        self._network = network
        blocks = (_TOGETHER * _BLOCKS_EACH + 1, BLOCK_SIZE)
        shape = (FIVE.num_layers, blocks[0], 2, FIVE.num_kv_heads, BLOCK_SIZE, FIVE.head_dim)
        drafter = CachedDrafter(lambda _: network, network, target, blocks, "probabilistic")
        self._runner = ModelRunner(
            target, lambda: target, lambda: torch.zeros(shape), drafter, method
        )
        self._free = list(range(blocks[0] - 1))
        self.num_accepted = 0

    def outputs(self, num_requests: int, rng: random.Random) -> Tensor:
        found: list[list[int]] = []
        for first in range(0, num_requests, _TOGETHER):
            walkers = [Walker(first + i, list(PROMPT)) for i in range(_TOGETHER)]
            while going := [w for w in walkers if len(w.tokens) < len(PROMPT) + NUM_TOKENS]:
                self._step(going, rng)
            for walker in walkers:
                self._free += walker.table
            found += [w.tokens[len(PROMPT) :][:NUM_TOKENS] for w in walkers]
        return torch.tensor(found[:num_requests])

    def _step(self, walkers: list[Walker], rng: random.Random) -> None:
        plans: list[tuple[Walker, ScheduledSequence]] = []
        for walker in walkers:
            if rng.random() < 0.1:  # preempted: its drafts may still be right afterwards
                self._free += walker.table
                walker.table, walker.computed = [], 0
            if rng.random() < 0.15:  # not in this step
                continue
            rng.shuffle(self._free)
            while len(walker.table) < _BLOCKS_EACH:
                walker.table.append(self._free.pop())
            drafts = walker.drafts[: rng.choice([0, 1, 2, MAX_DRAFTS, MAX_DRAFTS])]
            num_to_draft = rng.choice([0, 1, MAX_DRAFTS, MAX_DRAFTS, MAX_DRAFTS])
            count = len(walker.tokens) - walker.computed
            params = replace(PARAMS, seed=walker.seq_id)
            plans.append((walker, share_of(walker, count, drafts, num_to_draft, params)))
        if isinstance(self._network, BreaksLate):
            self._network.rounds = 0
        output = execute(self._runner, SchedulerOutput(0, tuple(share for _, share in plans)))
        for walker, share in plans:
            draws = [draw.token_id for draw in output.sampled[walker.seq_id]]
            self.num_accepted += len(draws) - 1
            walker.computed += len(share.token_ids) - share.num_drafts + len(draws) - 1
            walker.tokens += draws
            walker.last_drafts = output.drafts.get(walker.seq_id)
