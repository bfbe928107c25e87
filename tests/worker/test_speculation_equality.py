"""Answers are identical with and without speculation, for hundreds of requests at full depth.

The model is real, in float32. Each request has one kind of drafter: mostly right, always wrong,
right for a while, or raising. All requests run in one batch with small steps and few blocks, so
that drafts meet chunked prompts, prefix hits, preemption, and each other.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.depth import by_depth
from worker.config import CacheConfig, EngineConfig, SchedulerConfig, SpeculativeConfig
from worker.engine.core import EngineCore
from worker.engine.drafters.interface import DraftContext, Drafter
from worker.engine.drafters.registry import build_drafter
from worker.engine.features.speculation import Speculation
from worker.engine.messages import AddRequest, SpeculationFigures
from worker.engine.process.build import build_core
from worker.engine.scheduling.scheduler import Scheduler
from worker.executor.interface import HostExecutor, execute
from worker.tokenizer.checkpoint import read_checkpoint
from worker.tokenizer.tokenizer import Tokenizer, build_tokenizer
from worker.types import (
    Drafts,
    EngineStats,
    ModelOutput,
    SamplingParams,
    SchedulerOutput,
    TokenLogprobs,
)

VOCABULARY = range(17, 49152)  # of the default model, without its control tokens
NAMES = ("Anna", "Ben", "Clara", "David", "Emma", "Frank", "Grace", "Henry", "Irene", "Jacob")
THINGS = ("apple", "bridge", "candle", "drum", "engine", "flower", "garden", "hammer", "island")
PLACES = ("in Paris", "at home", "by the river", "on the hill", "at school", "in the old town")
STEMS = (
    "Below is a list of sentences. Each of them was written down on the same day. ",
    "def check(values):\n    for value in values:\n        if value is None:\n            raise ",
    "",
    "",
)


def text_prompt(rng: Random) -> str:
    name, thing, place = rng.choice(NAMES), rng.choice(THINGS), rng.choice(PLACES)
    verb = rng.choice(("lost", "found", "painted", "sold", "borrowed"))
    line = f"{name} {verb} the {thing} {place}. "
    other = line.replace(name, rng.choice(NAMES))
    words = (rng.choice(STEMS) + line + other + line).split(" ")
    return " ".join(words[: len(words) - rng.randrange(1, 8)])


def pattern_prompt(rng: Random) -> list[int]:
    pattern = [rng.choice(VOCABULARY) for _ in range(rng.randrange(3, 8))]
    return (pattern * 3)[: len(pattern) * 2 + rng.randrange(len(pattern))]


def prompts(tokenizer: Tokenizer, rng: Random, count: int) -> list[tuple[int, ...]]:
    found: dict[tuple[int, ...], None] = {}
    shared = [rng.choice(VOCABULARY) for _ in range(21)]
    while len(found) < count:
        kind = len(found) % 3
        if kind == 0:
            tokens = tokenizer.encode(text_prompt(rng), add_special_tokens=False)
        else:
            tokens = (shared if kind == 1 else []) + pattern_prompt(rng)
        found[tuple(tokens)] = None
    return list(found)


MAX_TOKEN_ID = 49151


class _Forgetful:
    def end(self, context: DraftContext, learns: bool) -> None:
        return

    def learn(self, num_tokens: int) -> None:
        return


class Garbage(_Forgetful):
    def propose(self, context: DraftContext, num_tokens: int) -> Drafts | None:
        rng = Random(hash(tuple(context.token_ids)))
        tokens = tuple(rng.randrange(MAX_TOKEN_ID) for _ in range(num_tokens))
        return _drafts(context, tokens)


class Raising(_Forgetful):
    def propose(self, context: DraftContext, num_tokens: int) -> Drafts | None:
        raise RuntimeError("this drafter does not work")

    def end(self, context: DraftContext, learns: bool) -> None:
        raise RuntimeError("this drafter cannot even end")


class Knowing(_Forgetful):
    """Drafts from the known answers, with every `lie_every`-th token wrong. With `varies` the
    number of drafts is random.
    """

    def __init__(
        self, truth: Mapping[tuple[int, ...], Sequence[int]], lie_every: int, varies: bool
    ) -> None:
        self._truth = truth
        self._lie_every = lie_every
        self._varies = varies

    def propose(self, context: DraftContext, num_tokens: int) -> Drafts | None:
        num_outputs = len(context.token_ids) - context.num_prompt
        answer = self._truth[tuple(context.token_ids[: context.num_prompt])]
        rng = Random(hash((tuple(answer), num_outputs)))
        length = rng.randrange(num_tokens + 1) if self._varies else num_tokens
        tokens = [
            token if (index + 1) % self._lie_every else token ^ 1
            for index, token in enumerate(answer[num_outputs : num_outputs + length], num_outputs)
        ]
        return _drafts(context, tuple(tokens)) if tokens else None


class ByPrompt:
    def __init__(
        self, kinds: Mapping[tuple[int, ...], str], drafters: Mapping[str, Drafter]
    ) -> None:
        self._kinds = kinds
        self._drafters = drafters

    def propose(self, context: DraftContext, num_tokens: int) -> Drafts | None:
        return self._of(context).propose(context, num_tokens)

    def end(self, context: DraftContext, learns: bool) -> None:
        self._of(context).end(context, learns)

    def learn(self, num_tokens: int) -> None:
        for drafter in self._drafters.values():
            drafter.learn(num_tokens)

    def _of(self, context: DraftContext) -> Drafter:
        return self._drafters[self._kinds[tuple(context.token_ids[: context.num_prompt])]]


def _drafts(context: DraftContext, tokens: tuple[int, ...]) -> Drafts:
    return Drafts(len(context.token_ids), tokens, (0.9,) * len(tokens))


pytestmark = [pytest.mark.model, pytest.mark.timeout(900)]

BLOCK_SIZE = 16
MAX_MODEL_LEN = 512
EOS = 2
NUM_GREEDY, NUM_MIXED, NUM_ADAPTIVE, NUM_FEW = by_depth((21, 18, 16, 8), (80, 70, 70, 40))
# With fewer events the equality would prove little.
MIN_DRAFTS, MIN_EVENTS, MIN_FAILURES = by_depth((2, 1, 2), (12, 8, 10))
GREEDY = SamplingParams(max_tokens=10, temperature=0.0)
SPECULATIVE = SpeculativeConfig(
    "ngram",
    num_speculative_tokens=6,
    prompt_lookup_min=2,
    prompt_lookup_max=4,
    enable_adaptive_verification=False,
)
LOOKUPS = ("ngram", "suffix")
KINDS = (*LOOKUPS, "garbage", "raises", "true", "true then wrong", "any")


@dataclass(frozen=True)
class Request:
    prompt: tuple[int, ...]
    params: SamplingParams
    kind: str = "ngram"
    num_answers: int = 1


Requests = dict[str, Request]


@dataclass
class Run:
    answers: dict[str, tuple[int, ...]]
    logprobs: dict[str, list[TokenLogprobs]]
    stats: EngineStats
    figures: dict[str, SpeculationFigures]
    steps: Steps


# ---- requests -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer(model_path: Path) -> Tokenizer:
    return build_tokenizer(read_checkpoint(model_path))


@pytest.fixture(scope="module")
def greedy(tokenizer: Tokenizer) -> Requests:
    found = prompts(tokenizer, Random(20261123), NUM_GREEDY)
    return {
        f"q{index}": Request(prompt, GREEDY, KINDS[index // 3 % len(KINDS)])
        for index, prompt in enumerate(found)
    }


VARIANTS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.8},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 0.7, "top_k": 20, "frequency_penalty": 0.4},
    {"temperature": 1.0, "min_p": 0.1, "repetition_penalty": 1.1},
    {"presence_penalty": 0.6, "repetition_penalty": 1.2},
    {"temperature": 0.5, "logit_bias": ((253, 4.0), (338, 3.0), (30, 2.0))},
    {"min_tokens": 6, "stop_token_ids": (30, 28, 198)},
    {"temperature": 0.6, "ignore_eos": True, "logprobs": 2},
    {"bad_words": ((253,), (260, 253))},
)


@pytest.fixture(scope="module")
def mixed(tokenizer: Tokenizer) -> Requests:
    rng = Random(20261124)
    return {
        f"m{index}": Request(
            prompt,
            replace(GREEDY, seed=index, **VARIANTS[index % len(VARIANTS)]),
            ("ngram", "suffix", "garbage", "any")[index % 4],
            num_answers=3 if index % 5 == 0 else 1,
        )
        for index, prompt in enumerate(prompts(tokenizer, rng, NUM_MIXED))
    }


def drafters_for(requests: Requests, plain: Mapping[str, Sequence[int]]) -> ByPrompt:
    truth = {request.prompt: plain[name] for name, request in requests.items()}
    built = {name: build_drafter(replace(SPECULATIVE, method=name)) for name in LOOKUPS}
    drafters: dict[str, Drafter] = {
        **{name: drafter for name, drafter in built.items() if drafter is not None},
        "garbage": Garbage(),
        "raises": Raising(),
        "true": Knowing(truth, lie_every=1 << 30, varies=False),
        "true then wrong": Knowing(truth, lie_every=4, varies=False),
        "any": Knowing(truth, lie_every=5, varies=True),
    }
    return ByPrompt({request.prompt: request.kind for request in requests.values()}, drafters)


# ---- runs ---------------------------------------------------------------------------------------


@dataclass
class Steps(HostExecutor):
    inner: Any
    counts: Counter[str] = field(default_factory=Counter)

    def execute(self, step: SchedulerOutput) -> ModelOutput:
        chunks = [s for s in step.sequences if not s.samples]
        drafting = [s for s in step.sequences if s.num_drafts]
        self.counts["chunks"] += len(chunks)
        self.counts["chunks beside drafts"] += len(chunks) if drafting else 0
        self.counts["drafts beside others"] += bool(drafting) and len(drafting) < len(
            step.sequences
        )
        result: ModelOutput = execute(self.inner, step)
        return result


@dataclass(frozen=True)
class Room:
    num_blocks: int = 2000
    budget: int = 2048
    batch: int = 64
    chunk: int = 0  # the maximum tokens of a prompt in one step; 0: no limit
    overlap: bool = False


ROOMY = Room(batch=128)
TIGHT = Room(num_blocks=56, budget=160, batch=40, chunk=13)


@pytest.fixture(scope="module")
def executor(model_path: Path) -> Iterator[Any]:
    from worker.executor.start import build_executor

    built, _ = build_executor(engine_config(model_path, ROOMY))
    yield built
    built.shutdown()


def engine_config(
    model_path: Path, room: Room, speculative: SpeculativeConfig | None = None
) -> EngineConfig:
    return EngineConfig(
        engine="torch",
        model_path=str(model_path),
        dtype="float32",
        block_size=BLOCK_SIZE,
        num_blocks_override=room.num_blocks,
        scheduler=limits_of(room),
        eos_token_ids=(EOS,),
        speculative=speculative,
    )


def limits_of(room: Room) -> SchedulerConfig:
    return SchedulerConfig(room.budget, room.batch, MAX_MODEL_LEN, room.chunk)


def run(
    executor: Any, requests: Requests, room: Room = ROOMY, speculation: Speculation | None = None
) -> Run:
    cache = CacheConfig(room.num_blocks, BLOCK_SIZE)
    scheduler = Scheduler(cache, limits_of(room), (EOS,), [speculation])
    steps = Steps(executor)
    core = EngineCore(scheduler, steps, time.monotonic, room.overlap)
    result = drive(core, requests, scheduler.check_integrity)
    assert scheduler.blocks.num_free == room.num_blocks
    core.shutdown()
    return replace(result, steps=steps)


def drive(core: EngineCore, requests: Requests, check: Callable[[], None] | None = None) -> Run:
    for name, request in requests.items():
        branches = [f"{name}/{index}" for index in range(1, request.num_answers)]
        core.add(AddRequest(name, list(request.prompt), request.params, 0.0, branch_ids=branches))
    result = Run({}, {}, EngineStats(), {}, Steps(None))
    count = 0
    while core.has_work:
        step = core.step()
        count += 1
        if check is not None and count % 8 == 0:
            check()
        if step is None:
            continue
        result.stats = step.stats
        for output in step.outputs:
            name = output.request_id
            assert output.error is None, output
            result.answers[name] = (*result.answers.get(name, ()), *output.token_ids)
            result.logprobs.setdefault(name, []).extend(output.logprobs)
            if output.speculation is not None:
                result.figures[name] = output.speculation
    return result


# ---- claims -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def all_requests(greedy: Requests, mixed: Requests) -> Requests:
    names = [*greedy, *mixed]
    Random(20261125).shuffle(names)
    return {name: (greedy | mixed)[name] for name in names}


@pytest.fixture(scope="module")
def plain(executor: Any, all_requests: Requests) -> Run:
    result = run(executor, all_requests)
    assert result.stats.speculation.num_draft_tokens == result.stats.scheduler.num_preemptions == 0
    return result


@pytest.fixture(scope="module")
def speculative(executor: Any, all_requests: Requests, plain: Run) -> Run:
    speculation = Speculation(SPECULATIVE, drafters_for(all_requests, plain.answers), False)
    return run(executor, all_requests, TIGHT, speculation)


def differing(left: Run, right: Run, names: Iterable[str]) -> list[str]:
    wanted = set(names)
    assert left.answers.keys() == right.answers.keys()
    return [
        name
        for name in left.answers
        if name.partition("/")[0] in wanted and left.answers[name] != right.answers[name]
    ]


def test_drafts_change_no_greedy_answer(greedy: Requests, plain: Run, speculative: Run) -> None:
    assert len(greedy) == NUM_GREEDY
    assert differing(plain, speculative, greedy) == []


def test_drafts_change_no_sampled_answer(mixed: Requests, plain: Run, speculative: Run) -> None:
    """Log probabilities are equal to the last bit."""
    assert differing(plain, speculative, mixed) == []
    names = [name for name in plain.logprobs if plain.logprobs[name]]
    assert len(names) >= NUM_MIXED // 9
    assert all(speculative.logprobs[name] == plain.logprobs[name] for name in names)
    drawn = {name for name, request in mixed.items() if request.params.temperature > 0}
    figures = [f for name, f in speculative.figures.items() if name.partition("/")[0] in drawn]
    assert sum(f.num_accepted_tokens for f in figures) > MIN_DRAFTS
    assert sum(f.num_draft_tokens - f.num_accepted_tokens for f in figures) > MIN_DRAFTS


def test_every_kind_of_drafts_was_accepted_and_rejected(
    all_requests: Requests, greedy: Requests, speculative: Run
) -> None:
    """Otherwise the equality would prove nothing."""
    accepted: Counter[str] = Counter()
    rejected: Counter[str] = Counter()
    longest: Counter[str] = Counter()
    for name, figures in speculative.figures.items():
        kind = all_requests[name.partition("/")[0]].kind
        accepted[kind] += figures.num_accepted_tokens
        rejected[kind] += figures.num_draft_tokens - figures.num_accepted_tokens
        longest[kind] = max(longest[kind], len(figures.accepted_histogram) - 1)
    assert accepted["garbage"] == accepted["raises"] == rejected["raises"] == 0
    assert rejected["true"] == 0
    for kind in ("ngram", "suffix", "true", "true then wrong", "any"):
        assert accepted[kind] > MIN_DRAFTS, (kind, accepted)
    for kind in ("ngram", "suffix", "garbage", "true then wrong", "any"):
        assert rejected[kind] > MIN_DRAFTS, (kind, rejected)
    assert longest["true"] == longest["ngram"] == SPECULATIVE.num_speculative_tokens
    num_raising = sum(request.kind == "raises" for request in greedy.values())
    assert speculative.stats.speculation.num_drafter_failures >= num_raising > MIN_FAILURES
    assert sum(accepted.values()) == speculative.stats.speculation.num_accepted_tokens
    assert sum(speculative.stats.speculation.num_accepted_by_position) == sum(accepted.values())


def test_drafts_met_every_other_event(plain: Run, speculative: Run) -> None:
    stats, counts = speculative.stats, speculative.steps.counts
    assert stats.scheduler.num_preemptions > MIN_EVENTS
    assert stats.scheduler.prefix_cache_hits > by_depth(100, 300)
    assert counts["chunks beside drafts"] > MIN_EVENTS
    assert counts["drafts beside others"] > MIN_EVENTS
    assert stats.scheduler.generation_tokens == plain.stats.scheduler.generation_tokens


def test_answers_are_the_same_with_adaptive_draft_lengths(
    executor: Any, all_requests: Requests, plain: Run
) -> None:
    some = dict(list(all_requests.items())[:NUM_ADAPTIVE])
    adaptive = replace(SPECULATIVE, enable_adaptive_verification=True)
    speculation = Speculation(adaptive, drafters_for(some, plain.answers), False)
    result = run(executor, some, replace(TIGHT, num_blocks=40, batch=20, overlap=True), speculation)
    assert len(result.answers) >= len(some)
    assert all(plain.answers[name] == tokens for name, tokens in result.answers.items())
    assert result.stats.speculation.num_draft_tokens > 0


@pytest.fixture(scope="module")
def few(all_requests: Requests) -> Requests:
    return dict(list(all_requests.items())[:NUM_FEW])


@pytest.mark.parametrize("method", ["ngram", "suffix", "draft_model", "eagle"])
def test_answers_are_the_same_with_each_configured_method(
    model_path: Path, few: Requests, plain: Run, method: str
) -> None:
    """The engine is built as in a worker; the target serves as the draft model."""
    config = replace(SPECULATIVE, method=method, num_speculative_tokens=4)
    if method == "draft_model":
        config = replace(config, model=str(model_path))
    room = Room(num_blocks=60, budget=160, batch=12, overlap=True)
    core, _ = build_core(engine_config(model_path, room, config))
    result = drive(core, few)
    core.shutdown()
    stats = result.stats
    assert all(plain.answers[name] == tokens for name, tokens in result.answers.items())
    assert stats.speculation.num_accepted_tokens > MIN_EVENTS
    if method != "draft_model":
        assert stats.speculation.num_draft_tokens > stats.speculation.num_accepted_tokens
