"""Adaptive draft lengths against plain decoding and the best fixed length, in virtual seconds."""

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from statistics import median

import pytest

from tests.depth import by_depth
from worker.config import SpeculativeConfig
from worker.engine.lengths.acceptance import Offer
from worker.engine.lengths.costs import StepCosts
from worker.engine.lengths.goodput import DraftLengths
from worker.executor.profiling import StepProfile

_CHANGES = 1 / 14  # a step: how often others begin or end


@dataclass(frozen=True, slots=True)
class Hardware:
    """True costs in seconds: of a step by tokens, of a prompt's token, of drafting (sequences,
    drafts of each), and of scheduling, which a step scheduled ahead does not wait for.
    """

    step: Callable[[int], float]
    prompt_token: float
    drafting: Callable[[int, int], float] = lambda num, rounds: 0.0
    scheduling: float = 0.0
    noise: float = 0.04  # standard deviation, of the logarithm
    disturbed: float = 0.04  # part of the steps that other processes make up to 4 times longer
    contention: float = 0.0  # steps of one token that all wait for others, now and then


def cpu_step(num_tokens: int) -> float:
    """52 ms for one token, 61 for 4, 89 for 16, then 2 ms a token."""
    knots = ((1, 0.052), (4, 0.061), (16, 0.089), (4096, 0.089 + 4080 * 0.002))
    for (left, low), (right, high) in itertools.pairwise(knots):
        if num_tokens <= right:
            return low + (high - low) * (num_tokens - left) / (right - left)
    raise ValueError(num_tokens)


def gpu_step(num_tokens: int) -> float:
    return 0.008 + 0.000004 * num_tokens + 0.00008 * max(0, num_tokens - 64)


def head_on_cpu(num_sequences: int, rounds: int) -> float:
    """2 ms and 3 ms for each draft, less for several sequences at once."""
    return 0.002 + 0.003 * rounds * (0.6 + 0.4 * num_sequences)


def head_on_gpu(num_sequences: int, rounds: int) -> float:
    return 0.0003 + rounds * (0.0004 + 0.000004 * num_sequences)


CPU = Hardware(cpu_step, 1 / 600, head_on_cpu, scheduling=0.0004)
GPU = Hardware(gpu_step, 0.00002, head_on_gpu, scheduling=0.0002)
# Others have half of the machine, now and then more.
BUSY = Hardware(cpu_step, 1 / 600, head_on_cpu, 0.0004, noise=0.15, disturbed=0.1, contention=1.0)
FLAT = Hardware(lambda n: 0.02 + 1e-6 * n, 1e-6, lambda q, k: 0.001 * k)
STEEP = Hardware(lambda n: 0.005 + 0.02 * n, 0.018, lambda q, k: 0.001 * q * k)
# One token is quick, several go another way: a cliff, flat behind it.
CLIFF = Hardware(lambda n: 0.03 if n == 1 else 0.06 + 0.001 * n, 0.001, lambda q, k: 0.002 * k)
# A draft model that costs a fifth of the target for each draft.
DRAFT_MODEL = Hardware(cpu_step, 1 / 600, lambda q, k: k * 0.2 * cpu_step(q))


@dataclass(frozen=True, slots=True)
class Text:
    """The drafts of a sequence: phases of (mean tokens, offered, chance, confidence).

    In a phase a part `offered` of the positions has drafts at all, each of which is accepted by its
    chance (given those before it), give or take `spread`; it falls by `decay` with each draft. The
    drafter reports `confidence`; None stands for the true chance.
    """

    phases: tuple[tuple[int, float, float, float | None], ...]
    spread: float = 0.0
    decay: float = 1.0


COPYING = Text(((1000, 0.98, 0.96, 1.0),))
FREE = Text(((1000, 0.35, 0.08, 1.0),))
BARREN = Text(((1000, 1.0, 0.0, 1.0),))
MIXED = Text(((40, 0.95, 0.95, 1.0), (40, 0.3, 0.08, 1.0)))
RUNS = Text(((12, 0.95, 0.93, 1.0), (25, 0.2, 0.1, 1.0)))
SUFFIX = Text(((30, 0.9, 0.9, None), (30, 0.5, 0.25, None)), spread=0.2)
HEAD = Text(((1000, 1.0, 0.62, None),), spread=0.3, decay=0.93)
WEAK_HEAD = Text(((1000, 1.0, 0.2, None),), spread=0.15, decay=0.8)
GOOD_MODEL = Text(((1000, 1.0, 0.8, None),), spread=0.2, decay=0.97)


class Script:
    def __init__(self, text: Text, length: int, seed: int) -> None:
        self.rng = random.Random(seed)
        self.text = text
        self.offered: list[bool] = []
        self.chances: list[float] = []
        self.reported: list[float] = []
        self.draws: list[float] = []
        index = self.rng.randrange(len(text.phases))
        while len(self.draws) < length:
            mean, offered, chance, confidence = text.phases[index]
            for _ in range(max(1, round(self.rng.gauss(mean, mean / 4)))):
                own = min(0.99, max(0.0, chance + self.rng.uniform(-text.spread, text.spread)))
                self.offered.append(self.rng.random() < offered)
                self.chances.append(own)
                self.reported.append(max(0.01, own if confidence is None else confidence))
                self.draws.append(self.rng.random())
            index = (index + 1) % len(text.phases)
        self.length = length

    def confidences(self, position: int, most: int) -> tuple[float, ...]:
        if not self.offered[position]:
            return ()
        end = min(position + most, self.length - 1)
        decay = self.text.decay
        return tuple(self.reported[p] * decay ** (p - position) for p in range(position, end))

    def accepted(self, position: int, num_verified: int) -> int:
        for depth in range(num_verified):
            chance = self.chances[position + depth] * self.text.decay**depth
            if self.draws[position + depth] >= chance:
                return depth
        return num_verified


@lru_cache(maxsize=2048)
def _script(text: Text, length: int, seed: int) -> Script:
    return Script(text, length, seed)


def profiled(hardware: Hardware, seed: int = 0) -> StepCosts:
    rng = random.Random(seed)

    def measured(seconds: float) -> float:
        return median(seconds * _noise(rng, hardware) for _ in range(5))

    sizes = [2**n for n in range(10)]
    first = [(n, hardware.drafting(n, 1)) for n in (1, 4, 16)]
    further = [(n, (hardware.drafting(n, 5) - s) / 4) for n, s in first]
    return StepCosts(
        StepProfile(
            *(
                tuple((size, measured(seconds)) for size, seconds in points)
                for points in ([(n, hardware.step(n)) for n in sizes], first, further)
            )
        )
    )


def _noise(rng: random.Random, hardware: Hardware) -> float:
    factor = math.exp(rng.gauss(0.0, hardware.noise))
    return factor * rng.uniform(1.5, 4.0) if rng.random() < hardware.disturbed else factor


class Fixed:
    def __init__(self, length: int) -> None:
        self.length = length

    def may_pay(self, seq_ids: list[int]) -> bool:
        return self.length > 0

    def to_verify(self, offers: list[Offer], num_other_tokens: int) -> list[int]:
        return [min(self.length, len(offer.confidences)) for offer in offers]

    def to_draft(self, seq_ids: list[int], num_other_tokens: int) -> list[int]:
        return [self.length] * len(seq_ids)


Policy = Fixed | DraftLengths


@dataclass(slots=True)
class Run:
    seconds: float = 0.0
    num_tokens: int = 0
    num_steps: int = 0
    true_seconds: float = 0.0  # but for noise, disturbance and contention
    verified: list[int] = field(default_factory=list)  # drafts, by step
    drafted: list[int] = field(default_factory=list)

    @property
    def rate(self) -> float:
        return self.num_tokens / self.seconds

    @property
    def true_rate(self) -> float:
        return self.num_tokens / self.true_seconds


@dataclass(slots=True)
class Stream:
    seq_id: int
    script: Script
    position: int = 0
    prompt_left: int = 0
    drafts: tuple[float, ...] = ()


class VirtualEngine:
    """Decodes `batch` sequences at a time, each of `length` tokens after a prompt of `prompt`, of
    `texts` in turn. Equal seeds give the same truth, whatever the policy.
    """

    def __init__(
        self,
        hardware: Hardware,
        texts: tuple[Text, ...],
        batch: int,
        on_device: bool = False,
        most: int = 5,
        shape: tuple[int, int] = (400, 40),
        seed: int = 0,
    ) -> None:
        self.hardware = hardware
        self.texts = texts
        self.batch = batch
        self.on_device = on_device
        self.most = most
        self.length, self.prompt = shape
        self.seed = seed

    def run(self, policy: Policy, num_tokens: int) -> Run:
        self.noise = random.Random(self.seed + 1)
        self.num_started = 0
        self.waiting = 0.0
        streams = [self._start(number) for number in range(self.batch)]
        run = Run()
        while run.num_tokens < num_tokens:
            self._step(policy, streams, run)
        return run

    def _start(self, number: int) -> Stream:
        self.num_started += 1
        text = self.texts[number % len(self.texts)]
        seed = (self.seed * 1009 + number) * 100_003 + self.num_started
        script = _script(text, self.length, seed)
        return Stream(self.num_started, script, prompt_left=self.prompt)

    def _step(self, policy: Policy, streams: list[Stream], run: Run) -> None:
        hardware = self.hardware
        decoding = [stream for stream in streams if not stream.prompt_left]
        other = sum(stream.prompt_left for stream in streams)
        ids = [stream.seq_id for stream in decoding]
        counts, offers = [0] * len(decoding), []
        asked = bool(decoding) and policy.may_pay(ids)
        if asked:
            offers = [self._offer(stream) for stream in decoding]
            counts = policy.to_verify(offers, other)
        drafting: list[int] = []
        if self.on_device and policy.may_pay([stream.seq_id for stream in streams]):
            drafting = policy.to_draft([stream.seq_id for stream in streams], other)
        total = len(decoding) + sum(counts)
        num_drafting = sum(count > 0 for count in drafting)
        factor = self._noise()
        drafts = hardware.drafting(num_drafting, max(drafting)) if num_drafting else 0.0
        rest = other * hardware.prompt_token + hardware.scheduling * asked
        run.true_seconds += hardware.step(max(1, total)) + drafts + rest
        # Prompts are few and long: noise on them would drown what is compared.
        drafts *= factor * (1.0 + self.waiting)
        seconds = hardware.step(max(1, total)) + self.waiting * hardware.step(1)
        seconds = seconds * factor + rest + drafts
        run.seconds += seconds
        run.num_steps += 1
        run.verified.append(sum(counts))
        run.drafted.append(sum(drafting))
        self._advance(policy, streams, decoding, offers, counts, run)
        for stream, count in zip(streams, drafting, strict=False):
            stream.drafts = stream.script.confidences(stream.position, count) if count else ()
        if isinstance(policy, DraftLengths):
            policy.observe_step(total + other, seconds - drafts, other)
        self._replace(policy, streams)

    def _offer(self, stream: Stream) -> Offer:
        if self.on_device:
            return Offer(stream.seq_id, stream.drafts)
        confidences = stream.script.confidences(stream.position, self.most)
        return Offer(stream.seq_id, confidences)

    def _advance(
        self,
        policy: Policy,
        streams: list[Stream],
        decoding: list[Stream],
        offers: list[Offer],
        counts: list[int],
        run: Run,
    ) -> None:
        for index, stream in enumerate(decoding):
            stood = stream.script.accepted(stream.position, counts[index])
            stream.position += stood + 1
            run.num_tokens += stood + 1
            stream.drafts = ()
            if counts[index] and isinstance(policy, DraftLengths):
                policy.observe(offers[index], counts[index], stood)
        for stream in streams:
            stream.prompt_left = 0

    def _replace(self, policy: Policy, streams: list[Stream]) -> None:
        for number, stream in enumerate(streams):
            if stream.position >= stream.script.length - 1:
                if isinstance(policy, DraftLengths):
                    policy.forget(stream.seq_id)
                streams[number] = self._start(number)

    def _noise(self) -> float:
        factor = _noise(self.noise, self.hardware)
        if self.hardware.contention and self.noise.random() < _CHANGES:
            self.waiting = max(0.0, self.noise.gauss(0.0, self.hardware.contention))
        return factor


MOST = 5
HARDWARE = {
    "cpu": CPU,
    "gpu": GPU,
    "flat": FLAT,
    "steep": STEEP,
    "cliff": CLIFF,
    "model": DRAFT_MODEL,
}
TEXTS: dict[str, tuple[tuple[Text, ...], bool]] = {
    "copying": ((COPYING,), False),
    "free": ((FREE,), False),
    "barren": ((BARREN,), False),
    "mixed": ((MIXED,), False),
    "runs": ((RUNS,), False),
    "half": ((COPYING, FREE), False),
    "suffix": ((SUFFIX,), False),
    "head": ((HEAD,), True),
    "weak-head": ((WEAK_HEAD,), True),
    "good-model": ((GOOD_MODEL,), True),
    "barren-head": ((BARREN,), True),
}
# Two minutes of decoding or so; on the GPU, with 64 sequences, ten seconds.
NUM_TOKENS = {1: 1000, 4: 2500, 16: 8000, 64: 80_000, 128: 60_000}

NEVER_SLOWER = [
    *[
        (hardware, text, batch)
        for hardware in ("cpu", "gpu", "steep")
        for text in ("free", "barren", "runs", "weak-head")
        for batch in (1, 4, 16)
    ],
    ("cliff", "barren", 1),
    ("cliff", "head", 1),
    ("model", "weak-head", 1),
    ("model", "barren-head", 4),
    ("cpu", "barren", 64),
    ("cpu", "good-model", 64),
    ("gpu", "barren", 64),
    ("gpu", "runs", 64),
    ("cpu", "free", 128),
]
NEAR_THE_BEST = [
    *[
        (hardware, text, batch)
        for hardware in ("cpu", "gpu", "flat")
        for text in ("copying", "mixed", "suffix", "head")
        for batch in (1, 4, 16)
    ],
    ("cpu", "half", 4),
    ("gpu", "half", 16),
    ("model", "good-model", 1),
    ("steep", "copying", 1),
    ("cliff", "copying", 1),
    ("gpu", "copying", 64),
    ("cpu", "half", 64),
    ("flat", "good-model", 64),
]


# Both tables in steps that are coprime to the sizes of their products.
SOME = slice(None, None, by_depth(11, 1))


def engine(hardware: Hardware, text: str, batch: int) -> VirtualEngine:
    texts, on_device = TEXTS[text]
    return VirtualEngine(hardware, texts, batch, on_device, MOST)


def run_adaptive(chosen: VirtualEngine, num_tokens: int) -> tuple[Run, DraftLengths]:
    costs = profiled(chosen.hardware, chosen.seed)
    lengths = DraftLengths(SpeculativeConfig("ngram", MOST), costs, chosen.on_device)
    return chosen.run(lengths, num_tokens), lengths


@pytest.mark.parametrize(("hardware", "text", "batch"), NEVER_SLOWER[SOME])
def test_adaptive_lengths_are_no_slower_than_none(hardware: str, text: str, batch: int) -> None:
    chosen = engine(HARDWARE[hardware], text, batch)
    plain = chosen.run(Fixed(0), NUM_TOKENS[batch])
    adaptive, _ = run_adaptive(chosen, NUM_TOKENS[batch])
    assert adaptive.true_rate >= 0.97 * plain.true_rate


@pytest.mark.parametrize(("hardware", "text", "batch"), NEAR_THE_BEST[SOME])
def test_adaptive_lengths_are_near_the_best_length(hardware: str, text: str, batch: int) -> None:
    chosen = engine(HARDWARE[hardware], text, batch)
    fixed = max(chosen.run(Fixed(k), NUM_TOKENS[batch]).rate for k in (0, 1, 2, 3, 5))
    adaptive, _ = run_adaptive(chosen, NUM_TOKENS[batch])
    assert adaptive.rate >= 0.9 * fixed


def test_a_mixed_batch_beats_every_fixed_length() -> None:
    """Half of the sequences copy, half do not: no one length is right for both."""
    chosen = engine(CPU, "half", 4)
    fixed = max(chosen.run(Fixed(k), NUM_TOKENS[4]).rate for k in (0, 1, 2, 3, 5))
    adaptive, _ = run_adaptive(chosen, NUM_TOKENS[4])
    assert adaptive.rate > fixed


def test_a_large_mixed_batch_comes_near_the_best_fixed_length_in_the_end() -> None:
    """If a draft wins little, it takes long to find the sequences that copy, in similar text."""
    chosen = engine(CPU, "half", 16)
    fixed = max(chosen.run(Fixed(k), 4 * NUM_TOKENS[16]).rate for k in (0, 1, 2, 3, 5))
    adaptive, _ = run_adaptive(chosen, 4 * NUM_TOKENS[16])
    assert adaptive.rate > 0.9 * fixed


@pytest.mark.parametrize("text", ["barren", "barren-head"])
@pytest.mark.parametrize("batch", [1, 16])
def test_speculation_turns_itself_off_where_nothing_is_accepted(text: str, batch: int) -> None:
    adaptive, _ = run_adaptive(engine(CPU, text, batch), NUM_TOKENS[batch])
    late = slice(adaptive.num_steps // 2, None)
    assert sum(adaptive.verified[late]) <= 0.1 * len(adaptive.verified[late]) * batch
    assert sum(adaptive.drafted[late]) <= 0.1 * len(adaptive.drafted[late]) * batch


def test_a_busy_machine_does_not_end_what_pays() -> None:
    """A single sequence, late steps, and load of others that comes and goes: drafts that pay
    continue, near the best fixed length, whatever happens to be measured first.
    """
    texts, on_device = TEXTS["head"]
    parts = []
    for seed in range(12):
        chosen = VirtualEngine(BUSY, texts, 1, on_device, MOST, seed=seed)
        fixed = max(chosen.run(Fixed(k), 1000).true_rate for k in (1, 2, 3, 5))
        parts.append(run_adaptive(chosen, 1000)[0].true_rate / fixed)
    assert sum(parts) / len(parts) >= 0.93
    assert min(parts) >= 0.8


def test_short_requests_need_not_learn_anew() -> None:
    chosen = VirtualEngine(CPU, (COPYING,), 2, most=MOST, shape=(24, 20))
    fixed = max(chosen.run(Fixed(k), 2500).rate for k in (1, 3, 5))
    adaptive, _ = run_adaptive(chosen, 2500)
    assert adaptive.rate >= 0.9 * fixed
