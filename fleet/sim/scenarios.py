"""Published benchmarks as command lines of `pointsman simulate`.

Shapes are those of the sources: llm-d's posts "KV-Cache Wins You Can See" (S1, S6), "Sticky until
saturated" (S2, S3), its studies of weights (S4) and of predicted latency (S5), the traces of
Mooncake (S7), SGLang's comparison of its router with round robin (S14). Ramps are ladders of a few
steps, each with a fleet that begins empty; lengths with a standard deviation of 30 % are uniform
between ± 52 %; S5 and S7 are traces of our own with the published means. S12, S15 and S16 are loads
that no publication has.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random

from fleet.bench.workload import TracedRequest

_SAAS = "--prefix-groups 150 --prefix-prompts 5 --prefix-tokens 6000 --input-tokens 1200"
_LADDER = "--duration 45 --warmup 15"
_SLO = "--slo ttft<2s,itl<50ms"
_BLIND = ("random", "round-robin", "power-of-two")
_AWARE = ("default", "precise", "four-scorers", "predicted", "cache_aware", "dynamo")


@dataclass(frozen=True, slots=True)
class Scenario:
    """A benchmark. `tenants` maps objectives to a priority and a share of the rate each."""

    title: str
    flags: str
    published: str
    policies: tuple[str, ...] = (*_AWARE, *_BLIND)
    requests: Callable[[Random], list[TracedRequest]] | None = None
    tenants: Mapping[str, tuple[int, float]] = field(default_factory=dict)


def _spiky(rng: Random) -> list[TracedRequest]:
    """Return requests at 1/s and 5/s in turn, a minute each, eight times. Each has the next piece
    of one of 40 conversations, after a system prompt of 1,000 tokens; lengths have heavy tails.
    """
    requests, at = list[TracedRequest](), 0.0
    histories = [[100 * one] for one in range(40)]
    for phase in range(16):
        rate = 5.0 if phase % 2 else 1.0
        while (at := at + rng.expovariate(rate)) < 60.0 * (phase + 1):
            history = rng.choice(histories)
            question = min(131_072, max(30, round(729 * rng.lognormvariate(-1.9, 1.95))))
            output = min(8192, max(16, round(300 * rng.lognormvariate(-1.4, 1.7))))
            length = 512 * (2 + len(history)) + question
            history += [rng.getrandbits(62) for _ in range(math.ceil(question / 512))]
            requests.append(TracedRequest(at, length, output, (1, 2, *history), 512))
            if len(history) > 48:
                del history[1:]
        at = 60.0 * (phase + 1)
    return requests


def _mooncake(rng: Random) -> list[TracedRequest]:
    """Return a thousand requests of up to 16,384 tokens in blocks of 512, of which four in ten are
    known: conversations that grow, after a few system prompts.
    """
    requests, at = list[TracedRequest](), 0.0
    sessions: list[list[int]] = []
    for _ in range(1000):
        at += rng.expovariate(4.0)
        if sessions and rng.random() < 0.5:
            blocks = rng.choice(sessions)
        else:
            blocks = [rng.randrange(8)]
            sessions.append(blocks)
        blocks += [rng.getrandbits(62) for _ in range(1 + int(rng.expovariate(1 / 7)))]
        del blocks[31:]
        length = 512 * len(blocks) + rng.randint(1, 511)
        output = max(1, min(2000, round(rng.expovariate(1 / 340))))
        requests.append(TracedRequest(at, length, output, tuple(blocks), 512))
    return requests


def _weights(title: str, flags: str) -> Scenario:
    published = "llm-d's fixed weights; the default must not be more than 5 % worse than the best"
    policies = (*_AWARE, "llm-d-111", "llm-d-322", "load-only", *_BLIND)
    text = f"--workers 10 --output-tokens 480..1520 {flags} {_LADDER} {_SLO}"
    return Scenario(title, text, published, policies)


SCENARIOS: Mapping[str, Scenario] = {
    "S1": Scenario(
        "b2b-saas",
        f"--workers 8 {_SAAS} --output-tokens 1000 --rate 30 {_LADDER} {_SLO}",
        "precise 8,730 output tokens/s, TTFT p90 0.54 s; approximate 6,944, 31 s; load-only and "
        "random 4,429, 95 s",
        (*_AWARE, "load-only", *_BLIND, "consistent-hashing"),
    ),
    "S2": Scenario(
        "code generation",
        "--workers 10 --prefix-tokens 3000..107000 --turns 2..10 --input-tokens 1500 "
        f"--output-tokens 800 --concurrency 60 --duration 90 --warmup 30 {_SLO}",
        "46k against 16k input tokens/s of round robin (2.9 x)",
        (*_AWARE, "llm-d-322", *_BLIND),
    ),
    "S3": Scenario(
        "reasoning",
        "--workers 10 --prefix-groups 1 --prefix-tokens 250 --input-tokens 1000 --output-tokens "
        f"4000..12000 --concurrency 350 --duration 180 --warmup 60 {_SLO}",
        "7.0k against 6.8k output tokens/s of round robin: parity",
        (*_AWARE, "load-only", *_BLIND),
    ),
    "S4A": _weights(
        "short questions",
        "--prefix-groups 6 --prefix-prompts 1000 --prefix-tokens 1000 --input-tokens 15..45 "
        "--rate 40",
    ),
    "S4B": _weights(
        "long questions",
        "--prefix-groups 6 --prefix-prompts 1000 --prefix-tokens 1000 --input-tokens 1440..4560 "
        "--rate 30",
    ),
    "S4C": _weights(
        "long system prompts",
        "--prefix-groups 150 --prefix-prompts 5 --prefix-tokens 6000 --input-tokens 576..1824 "
        "--rate 30",
    ),
    "S4D": _weights(
        "short system prompts, long questions",
        "--prefix-groups 150 --prefix-prompts 5 --prefix-tokens 1000 --input-tokens 2976..9424 "
        "--rate 15",
    ),
    "S5": Scenario(
        "spiky production",
        f"--workers 2 --duration 960 --warmup 120 {_SLO}",  # 13 would be far from their limit
        "TTFT p50 0.97 s with predicted latency against 3.38 s with 3:2:2 (13 x 8 H200)",
        (*_AWARE, "llm-d-111", "llm-d-322", "load-only", *_BLIND),
        _spiky,
    ),
    "S6": Scenario(
        "prefix without load",
        "--workers 8 --prefix-groups 5 --prefix-tokens 6000 --input-tokens 200 --output-tokens "
        f"1000 --rate 30,40 {_LADDER} {_SLO}",
        "prefix-only 55 % success, ITL 160 ms, TTFT over 140 s; with load 100 %, ITL 30 ms",
        ("default", "predicted", "prefix-only"),
    ),
    "S7": Scenario(
        "a slice of Mooncake",
        f"--workers 8 {_SLO}",
        "gain only near saturation, and one in seven requests got 503 (8 A100, Dynamo)",
        requests=_mooncake,
    ),
    "S12": Scenario(
        "two tenants, ten to one",
        f"--workers 4 {_SAAS} --prefix-groups 75 --output-tokens 1000 --rate 22 {_LADDER} {_SLO}",
        "nothing: the small tenant of priority 0 should not feel the large one of -1",
        tenants={"small": (0, 1 / 11), "large": (-1, 10 / 11)},
    ),
    "S14": Scenario(
        "many prompts of few groups, in small caches",
        "--workers 2 --prefix-groups 8 --prefix-prompts 32 --prefix-tokens 2048 --input-tokens 128 "
        f"--output-tokens 64 --concurrency 16 --duration 20 --kv-tokens 12000 {_SLO}",
        "cache_aware up to 1.9 times the tokens/s of round robin, 3.8 times the hits (SGLang v0.4)",
        (*_AWARE, "llm-d-111", "llm-d-322", "load-only", *_BLIND),
    ),
    "S15": Scenario(
        "caches that hold hardly more than the prefixes",
        f"--workers 8 {_SAAS} --output-tokens 200 --rate 20 --kv-tokens 120000 {_LADDER} {_SLO}",
        "nothing: 150 prefixes of 6,000 tokens nearly fill eight caches of 120,000",
        (*_AWARE, "llm-d-322", *_BLIND),
    ),
    "S16": Scenario(
        "two kinds of workers",
        "--workers 4 --prefix-groups 40 --prefix-prompts 50 --prefix-tokens 2000 --input-tokens "
        "600 --output-tokens 300 --rate 20,40 --event 0:slow:3:2.5 --event 0:slow:4:2.5 "
        f"{_LADDER} {_SLO}",
        "nothing: workers 3 and 4 take 2.5 times as long for each step",
        (*_AWARE, "llm-d-322", "load-only", *_BLIND),
    ),
}

# Scenarios that measure CPU, sockets or a real model, which virtual time does not have.
ELSEWHERE: Mapping[str, str] = {
    "S8": "is the CPU of small requests through Envoy: benchmarks/picker_ext_proc.py",
    "S9": "is the CPU of long prompts through Envoy: benchmarks/picker_ext_proc.py",
    "S10": "is the CPU of long answers through Envoy: benchmarks/picker_ext_proc.py",
    "S11": "is the CPU of large pools: benchmarks/scrape.py, benchmarks/following.py",
    "S13": "is two real workers: pointsman bench --compare, see docs/bench.md",
}
