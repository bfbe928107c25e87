"""Beam searches find the answers of transformers' `generate` under any load of the engine."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.depth import by_depth
from tests.support.model.whole_engine import Lent, torch_config
from worker.config import CacheConfig, SchedulerConfig, SpeculativeConfig
from worker.engine.core import EngineCore
from worker.engine.drafters.ngram import NgramDrafter
from worker.engine.features.speculation import Speculation
from worker.engine.messages import AddRequest, RequestOutput
from worker.engine.scheduling.scheduler import Scheduler
from worker.executor.start import build_executor
from worker.types import BeamParams, EngineStats, FinishReason, SamplingParams, SchedulerOutput

VOCAB_SIZE = 96
BLOCK_SIZE = 4
MAX_BLOCKS = 256


def check_drafts(step: SchedulerOutput) -> None:
    for sequence in step.sequences:
        if any(spec.params.beam is not None for spec in sequence.samples):
            assert (sequence.num_drafts, sequence.num_to_draft) == (0, 0)


@dataclass(frozen=True)
class Tiny:
    executor: Any
    model: Any
    ends: tuple[int, ...]


@dataclass(frozen=True)
class Search:
    prompt: tuple[int, ...]
    beam: BeamParams
    num_answers: int
    max_tokens: int
    ignore_eos: bool = False
    logprobs: int | None = None

    def request(self, name: str) -> AddRequest:
        params = SamplingParams(
            self.max_tokens,
            temperature=0.0,
            ignore_eos=self.ignore_eos,
            logprobs=self.logprobs,
            beam=self.beam,
        )
        names = [f"{name}/{index}" for index in range(1, self.num_answers)]
        return AddRequest(name, list(self.prompt), params, 0.0, branch_ids=names)


@dataclass(frozen=True)
class House:
    num_blocks: int = MAX_BLOCKS
    budget: int = 512
    batch: int = 64
    caching: bool = True
    overlap: bool = True
    partial_hits: bool = True


@dataclass
class Run:
    outputs: dict[str, list[RequestOutput]] = field(default_factory=dict)
    stats: EngineStats = field(default_factory=EngineStats)

    def tokens(self, name: str) -> list[int]:
        return [token for output in self.outputs[name] for token in output.token_ids]

    def answers(self, name: str, search: Search) -> list[list[int]]:
        names = [name, *(f"{name}/{index}" for index in range(1, search.num_answers))]
        for each in names:
            [output] = self.outputs[each]
            ends = FinishReason.LENGTH if output.stop_token_id is None else FinishReason.STOP
            assert output.finish_reason is ends
            assert output.stop_token_id in (None, output.token_ids[-1])
        return [self.tokens(each) for each in names]


@pytest.fixture(scope="module", params=range(by_depth(1, 2)))
def tiny(request: pytest.FixtureRequest, make_checkpoint: Callable[..., Path]) -> Tiny:
    path = make_checkpoint(seed=40 + request.param)
    config = torch_config(path, block_size=BLOCK_SIZE, num_blocks_override=MAX_BLOCKS)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    found = generated(model, Search(tuple(range(3, 12)), BeamParams(8, 1.0, True), 8, 12), ())
    seen = [token for tokens, _ in found for token in tokens[2:]]
    common = sorted(set(seen), key=lambda token: (-seen.count(token), token))
    return Tiny(build_executor(config)[0], model, tuple(common[:3]))


def generated(model: Any, search: Search, ends: Sequence[int]) -> list[tuple[list[int], float]]:
    ends = () if search.ignore_eos else ends
    with torch.no_grad():
        found = model.generate(
            torch.tensor([search.prompt]),
            attention_mask=torch.ones(1, len(search.prompt), dtype=torch.long),
            num_beams=search.beam.width,
            num_return_sequences=search.num_answers,
            length_penalty=search.beam.length_penalty,
            early_stopping=search.beam.early_stopping,
            max_new_tokens=search.max_tokens,
            do_sample=False,
            eos_token_id=list(ends) or None,
            pad_token_id=0,
            output_scores=True,
            return_dict_in_generate=True,
        )
    answers = []
    for row, score in zip(found.sequences, found.sequences_scores, strict=True):
        tokens = row[len(search.prompt) :].tolist()
        first = next((i for i, token in enumerate(tokens) if token in ends), len(tokens))
        answers.append((tokens[: first + 1], float(score)))
    return answers


def run(
    tiny: Tiny,
    searches: dict[str, Search],
    house: House = House(),
    others: Sequence[AddRequest] = (),
    aborts: dict[int, list[str]] | None = None,
) -> Run:
    """The bookkeeping is checked after every step, and at the end every block is free."""
    limits = SchedulerConfig(
        max_num_batched_tokens=house.budget, max_num_seqs=house.batch, max_model_len=256
    )
    cache = CacheConfig(
        house.num_blocks, BLOCK_SIZE, house.caching, enable_partial_hits=house.partial_hits
    )
    config = SpeculativeConfig("ngram", 3, enable_adaptive_verification=False)
    speculation = Speculation(config, NgramDrafter(1, 3), False, VOCAB_SIZE)
    scheduler = Scheduler(cache, limits, tiny.ends, [speculation])
    core = EngineCore(scheduler, Lent(tiny.executor, check_drafts), lambda: 0.0, house.overlap)
    coming = [*(s.request(name) for name, s in searches.items()), *others]
    made, step = Run(), 0
    while coming or core.has_work:
        if coming:
            core.add(coming.pop(0))
        core.abort((aborts or {}).get(step, []))
        report = core.step()
        scheduler.check_integrity()
        step += 1
        assert step < 20_000
        for output in [] if report is None else report.outputs:
            made.outputs.setdefault(output.request_id, []).append(output)
    assert scheduler.blocks.num_free == house.num_blocks
    made.stats = scheduler.stats()
    core.shutdown()
    return made


def prompts(count: int, seed: int) -> list[tuple[int, ...]]:
    rng = Random(seed)
    shared = [rng.randrange(VOCAB_SIZE) for _ in range(17)]
    made = []
    for index in range(count):
        own = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(3, 14))]
        made.append((*(shared if index % 2 else ()), *own))
    return made


WIDTHS = (2, 3, 4, 5, 6, 7, 8)
PENALTIES = (1.0, 0.0, 0.5, 2.0, -1.0)
STOPS = (False, True, "never")


@pytest.fixture(scope="module")
def searches() -> dict[str, Search]:
    """By default a quarter of the combinations is searched."""
    rng = Random(17)
    table = list(product(WIDTHS, PENALTIES, STOPS))[:: by_depth(4, 1)]
    return {
        f"s{index}": Search(
            prompt,
            BeamParams(width, penalty, stop),
            rng.randrange(1, width + 1),
            rng.choice((1, 2, 5, 9, 16)),
            ignore_eos=rng.random() < 0.15,
        )
        for index, ((width, penalty, stop), prompt) in enumerate(
            zip(table, prompts(len(table), 5), strict=True)
        )
    }


@pytest.fixture(scope="module")
def expected(tiny: Tiny, searches: dict[str, Search]) -> dict[str, list[list[int]]]:
    return {
        name: [tokens for tokens, _ in generated(tiny.model, search, tiny.ends)]
        for name, search in searches.items()
    }


HOUSES = {
    "room for all": House(),
    "few blocks, so that beams are preempted": House(num_blocks=24, batch=16),
    "blocks for hardly one search, small steps": House(num_blocks=13, budget=9, batch=8),
    "no cache, not overlapped": House(num_blocks=24, caching=False, overlap=False),
    "whole blocks shared only": House(partial_hits=False),
}


@pytest.mark.parametrize("name", HOUSES)
def test_every_search_finds_the_answers_of_transformers(
    tiny: Tiny, searches: dict[str, Search], expected: dict[str, list[list[int]]], name: str
) -> None:
    house = HOUSES[name]
    greedy = SamplingParams(max_tokens=12, temperature=0.0)
    others = [
        AddRequest(f"g{n}", list(prompt), greedy, 0.0) for n, prompt in enumerate(prompts(6, 9))
    ]
    alone = {other.request_id: run(tiny, {}, others=[other]) for other in others}
    made = run(tiny, searches, house, others)
    for key, search in searches.items():
        assert made.answers(key, search) == expected[key], (key, search)
    for key, single in alone.items():
        assert made.tokens(key) == single.tokens(key)
    assert made.stats.scheduler.prompt_tokens == sum(
        len(prompt) for prompt in [*(s.prompt for s in searches.values()), *prompts(6, 9)]
    )
    assert made.stats.speculation.num_drafts > 0
    assert (made.stats.scheduler.num_preemptions > 0) == (house.num_blocks < 30)
    assert (made.stats.scheduler.prefix_cache_hits > 0) == house.caching


def test_ends_and_cuts_both_occur(
    tiny: Tiny, searches: dict[str, Search], expected: dict[str, list[list[int]]]
) -> None:
    """The searches above would prove little if all their answers ended in one way."""
    ended = [tokens[-1] in tiny.ends for answers in expected.values() for tokens in answers]
    assert 0.1 < sum(ended) / len(ended) < 0.9


@pytest.mark.parametrize("penalty", PENALTIES)
def test_log_probabilities_are_those_of_the_model(tiny: Tiny, penalty: float) -> None:
    search = Search(prompts(2, 3)[1], BeamParams(4, penalty, False, num_shown=3), 4, 9, logprobs=3)
    made = run(tiny, {"a": search})
    oracle = generated(tiny.model, search, tiny.ends)
    for name, (tokens, score) in zip(("a", "a/1", "a/2", "a/3"), oracle, strict=True):
        [output] = made.outputs[name]
        assert output.token_ids == tokens
        total = sum(entry.logprobs[0] for entry in output.logprobs)
        assert math.isclose(total / len(tokens) ** penalty, score, rel_tol=1e-4)
        with torch.no_grad():
            logits = tiny.model(torch.tensor([[*search.prompt, *tokens]])).logits[0].float()
        rows = logits[len(search.prompt) - 1 : -1].log_softmax(dim=-1)
        for token, entry, row in zip(tokens, output.logprobs, rows, strict=True):
            likeliest = row.topk(3)
            assert entry.token_ids == (token, *likeliest.indices.tolist())
            assert entry.logprobs[1:] == pytest.approx(likeliest.values.tolist(), abs=1e-3)
            assert entry.rank == int((row >= row[token]).sum())


def plain_search(tiny: Tiny, search: Search) -> list[list[int]]:
    """Search as vLLM's loop does, to the last token and without a cache."""
    width, ends = search.beam.width, () if search.ignore_eos else tiny.ends
    live: list[tuple[list[int], float]] = [([], 0.0)]
    ended: list[tuple[list[int], float]] = []
    for _ in range(search.max_tokens):
        extended = []
        for tokens, total in live:
            with torch.no_grad():
                logits = tiny.model(torch.tensor([[*search.prompt, *tokens]])).logits[0, -1]
            likeliest = logits.float().log_softmax(dim=-1).topk(max(2, 1 + len(ends)) * width)
            for own, token in zip(*(part.tolist() for part in likeliest), strict=True):
                candidate = ([*tokens, token], total + own)
                (ended if token in ends else extended).append(candidate)
        live = sorted(extended, key=lambda c: -c[1])[:width]

    def score(candidate: tuple[list[int], float]) -> float:
        tokens, total = candidate
        length = len(search.prompt) + len(tokens) - (tokens[-1] in ends)
        return float(total / length**search.beam.length_penalty)

    best = sorted(ended + live, key=score, reverse=True)
    return [tokens for tokens, _ in best[: search.num_answers]]


@pytest.mark.parametrize("penalty", PENALTIES)
def test_without_early_stopping_the_search_is_that_of_vllm(tiny: Tiny, penalty: float) -> None:
    """vLLM scores the whole length, counts every end, and goes to the last token."""
    searches = {
        f"v{width}": Search(prompt, BeamParams(width, penalty), width, 7)
        for width, prompt in zip((1, 2, 3, 5, 8), prompts(5, 21), strict=True)
    }
    made = run(tiny, searches, House(num_blocks=30))
    for name, search in searches.items():
        assert made.answers(name, search) == plain_search(tiny, search)


def test_an_abort_midway_frees_all_blocks_and_leaves_the_others(
    tiny: Tiny, searches: dict[str, Search], expected: dict[str, list[list[int]]]
) -> None:
    long = [name for name, s in searches.items() if s.num_answers > 1 and s.max_tokens > 8]
    few = {name: searches[name] for name in [*long[:2], *list(searches)[:4]]}
    gone, cut = long[:2]
    names = [gone, *(f"{gone}/{n}" for n in range(1, few[gone].num_answers))]
    made = run(tiny, few, aborts={4: [*names, f"{cut}/1"]})
    for name in (*names, f"{cut}/1"):
        assert made.outputs[name][-1].finish_reason is FinishReason.ABORT
    for name in few.keys() - {gone, cut}:
        assert made.answers(name, few[name]) == expected[name]
    for n in {0, *range(2, few[cut].num_answers)}:
        assert made.tokens(f"{cut}/{n}" if n else cut) == expected[cut][n]
