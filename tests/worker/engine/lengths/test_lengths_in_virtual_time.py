"""Adaptive draft lengths against plain decoding and the best fixed length, in virtual seconds."""

from __future__ import annotations

import pytest
from virtual_decoding import (
    BARREN,
    BUSY,
    CLIFF,
    COPYING,
    CPU,
    DRAFT_MODEL,
    FLAT,
    FREE,
    GOOD_MODEL,
    GPU,
    HEAD,
    MIXED,
    RUNS,
    STEEP,
    SUFFIX,
    WEAK_HEAD,
    Fixed,
    Hardware,
    Run,
    Text,
    VirtualEngine,
    profiled,
)

from worker.config import SpeculativeConfig
from worker.engine.lengths.goodput import DraftLengths

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


def engine(hardware: Hardware, text: str, batch: int) -> VirtualEngine:
    """An engine that decodes so many such sequences at a time."""
    texts, on_device = TEXTS[text]
    return VirtualEngine(hardware, texts, batch, on_device, MOST)


def run_adaptive(chosen: VirtualEngine, num_tokens: int) -> tuple[Run, DraftLengths]:
    """A run with adaptive lengths."""
    costs = profiled(chosen.hardware, chosen.seed)
    lengths = DraftLengths(SpeculativeConfig("ngram", MOST), costs, chosen.on_device)
    return chosen.run(lengths, num_tokens), lengths


@pytest.mark.parametrize(("hardware", "text", "batch"), NEVER_SLOWER)
def test_adaptive_lengths_are_never_slower_than_plain_decoding(
    hardware: str, text: str, batch: int
) -> None:
    """At least 0.97 of plain decoding's rate with all learning and probing, where drafts are bad,
    tokens dear, or steps scheduled ahead worth more.
    """
    chosen = engine(HARDWARE[hardware], text, batch)
    plain = chosen.run(Fixed(0), NUM_TOKENS[batch])
    adaptive, _ = run_adaptive(chosen, NUM_TOKENS[batch])
    assert adaptive.true_rate >= 0.97 * plain.true_rate


@pytest.mark.parametrize(("hardware", "text", "batch"), NEAR_THE_BEST)
def test_adaptive_lengths_are_near_the_best_fixed_length(
    hardware: str, text: str, batch: int
) -> None:
    """At least 0.9 of what the best fixed length gives, which nobody knows beforehand."""
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
    """Where a draft wins little, it takes long to find out who copies, in text that looks alike."""
    chosen = engine(CPU, "half", 16)
    fixed = max(chosen.run(Fixed(k), 4 * NUM_TOKENS[16]).rate for k in (0, 1, 2, 3, 5))
    adaptive, _ = run_adaptive(chosen, 4 * NUM_TOKENS[16])
    assert adaptive.rate > 0.9 * fixed


@pytest.mark.parametrize("text", ["barren", "barren-head"])
@pytest.mark.parametrize("batch", [1, 16])
def test_speculation_turns_itself_off_where_nothing_is_accepted(text: str, batch: int) -> None:
    """After the first steps few drafts are made or verified."""
    adaptive, _ = run_adaptive(engine(CPU, text, batch), NUM_TOKENS[batch])
    late = slice(adaptive.num_steps // 2, None)
    assert sum(adaptive.verified[late]) <= 0.1 * len(adaptive.verified[late]) * batch
    assert sum(adaptive.drafted[late]) <= 0.1 * len(adaptive.drafted[late]) * batch


def test_a_busy_machine_does_not_end_what_pays() -> None:
    """A single sequence, steps that are late and others' work that comes and goes: drafts that pay
    go on, near what the best fixed length gives, whatever happens to be measured first.
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
    """Requests of a few tokens each, one after the other, are served near the best fixed length."""
    chosen = VirtualEngine(CPU, (COPYING,), 2, most=MOST, shape=(24, 20))
    fixed = max(chosen.run(Fixed(k), 2500).rate for k in (1, 3, 5))
    adaptive, _ = run_adaptive(chosen, 2500)
    assert adaptive.rate >= 0.9 * fixed
