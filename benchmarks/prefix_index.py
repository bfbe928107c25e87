"""The speed of the picker's prefix index, and the memory that a block takes.

    python benchmarks/prefix_index.py [--rounds 3] [--pairs 1000000] [--endpoints 1,10]

First the whole of a request: hash, match and record for prompts of 1, 8 and 64 KB of tokens, of
which 90 % are one of eight beginnings, over 4 and 100 endpoints. Every step is timed alone, without
the time that reading the clock takes; the slowest tenth is left out, and of several rounds the
median counts. Then the index alone.

Set against its slow twin, dicts and bit masks, in the same run and on the same prompts. A prompt
shares four fifths of its blocks with one of eight system prompts; four of five prompts go to an
endpoint that matches best, the others anywhere. CPU time, not wall-clock time; of several rounds
the best. Memory is what Python's allocators have handed out, right after the last growth and right
before the next one, for prompts of 1, 16 and 160 blocks without anything in common, which is the
worst case. Fixed seed. Prints tables and writes benchmarks/results/prefix_index.json.
"""

import gc
import time
import tracemalloc
from collections.abc import Callable
from random import Random
from statistics import mean, median
from typing import Any

import numpy as np
from measuring import Table, command_line, numbers, write_results

from picker.prefix.block_hash import (
    BYTES_PER_HASH,
    BlockHasher,
    BlockHashes,
    block_hashes,
    root_hash,
    unpacked,
)
from picker.prefix.index import PrefixIndex
from tests.support.picker.reference_prefix_index import ReferenceIndex

SEED = 20261121
ENDPOINTS = (1, 10, 100, 1000, 5000)
BLOCKS = (1, 4, 16, 40, 160, 1600)
CAPACITY = 16_384  # blocks of 64 tokens: a KV cache of a million tokens
WARM_BLOCKS = 60_000
TIMED_PROMPTS = 400


def prompts(blocks: int, count: int, rng: np.random.Generator) -> list[BlockHashes]:
    """Prompts of which four fifths are one of eight beginnings."""
    shared = [random_hashes(rng, blocks * 4 // 5) for _ in range(8)]
    return [
        shared[rng.integers(8)] + random_hashes(rng, blocks - blocks * 4 // 5) for _ in range(count)
    ]


def random_hashes(rng: np.random.Generator, count: int) -> BlockHashes:
    return rng.bytes(count * BYTES_PER_HASH)


def whole(endpoints: int, num_bytes: int, rounds: int) -> dict[str, float]:
    """Microseconds of CPU to hash a prompt, match it and record it, in a row of the table."""
    rng = Random(SEED)
    shared = [rng.randbytes(num_bytes * 9 // 10 // 4 * 4) for _ in range(8)]
    count = max(600, 3_000_000 // num_bytes)
    given = [
        (one := rng.choice(shared)) + rng.randbytes(num_bytes - len(one)) for _ in range(count)
    ]
    measured = [_one_round(given, endpoints) for _ in range(rounds)]
    times = [median(spent) for spent in zip(*measured, strict=True)]
    names = ("hash_us", "match_us", "record_us")
    return {
        "endpoints": endpoints,
        "prompt_bytes": num_bytes,
        **{name: round(spent, 1) for name, spent in zip(names, times, strict=True)},
        "sum_us": round(sum(times), 1),
    }


def _one_round(given: list[bytes], endpoints: int) -> list[float]:
    names = [f"default/w{number}" for number in range(endpoints)]
    hasher, index, rng = BlockHasher(64, SEED), PrefixIndex(), Random(SEED)
    root, clock = root_hash("model", seed=SEED), time.process_time_ns
    spent: list[list[int]] = [[], [], [], []]
    for prompt in given:
        times = [clock()]
        hashes = hasher.hashes(prompt, root)
        times.append(clock())
        matched = index.match(hashes)
        times.append(clock())
        best = max(matched.values(), default=0)
        held = sorted(key for key, run in matched.items() if run == best)
        key = rng.choice(held) if held and rng.random() < 0.8 else rng.choice(names)
        times += [clock(), clock()]
        index.record(key, hashes, CAPACITY)
        times.append(clock())
        for at, step in enumerate((0, 1, 4, 3)):
            spent[at].append(times[step + 1] - times[step])
    *steps, nothing = [sorted(one[len(one) // 2 :]) for one in spent]
    idle = median(nothing)
    return [(mean(step[: len(step) * 9 // 10]) - idle) / 1000 for step in steps]


def drive(index: Any, given: list[Any], endpoints: int) -> tuple[float, float]:
    """Microseconds of CPU for a match and for a record, after warming up."""
    names = [f"default/w{number}" for number in range(endpoints)]
    rng = Random(SEED)
    warm = len(given) - TIMED_PROMPTS
    clock, matching, recording = time.process_time_ns, 0, 0
    for number, prompt in enumerate(given):
        begun = clock()
        matched = index.match(prompt)
        after = clock()
        best = max(matched, key=matched.__getitem__, default=None) if rng.random() < 0.8 else None
        key = best or rng.choice(names)
        before = clock()
        index.record(key, prompt, CAPACITY)
        ended = clock()
        if number >= warm:
            matching += after - begun
            recording += ended - before
    timed = len(given) - warm
    return matching / timed / 1000, recording / timed / 1000


def speed(endpoints: int, blocks: int, rounds: int) -> dict[str, float]:
    """One row: both indexes on the same prompts."""
    rng = np.random.default_rng(SEED)
    warm = min(4000, WARM_BLOCKS // blocks + 40)
    given = prompts(blocks, warm + TIMED_PROMPTS, rng)
    as_lists = [unpacked(prompt) for prompt in given]
    best = [[float("inf")] * 2 for _ in range(2)]
    for _ in range(rounds):
        for which, (make, prompts_) in enumerate(
            ((PrefixIndex, given), (ReferenceIndex, as_lists))
        ):
            gc.collect()
            took = drive(make(), prompts_, endpoints)
            best[which] = [min(pair) for pair in zip(best[which], took, strict=True)]
    (match, record), (twin_match, twin_record) = best
    return {
        "endpoints": endpoints,
        "blocks": blocks,
        "match_us": round(match, 1),
        "record_us": round(record, 1),
        "twin_match_us": round(twin_match, 1),
        "twin_record_us": round(twin_record, 1),
        "ratio": round((match + record) / (twin_match + twin_record), 2),
    }


def memory(blocks: int, pairs: int, make: Callable[[], Any]) -> dict[str, float]:
    """Bytes for a pair between a third of the filling and its end: the least, the most, the last.

    Growth is by half, so a third of the way holds both the fullest and the emptiest.
    """
    rng = np.random.default_rng(SEED)
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    index = make()
    per_pair: list[float] = []
    prompts_ = pairs // blocks
    for number in range(prompts_):
        prompt = random_hashes(rng, blocks)
        given: Any = prompt if make is PrefixIndex else unpacked(prompt)
        index.record(f"default/w{number % 100}", given, 10**9)
        if number >= prompts_ // 3 and number % max(1, prompts_ // 500) == 0:
            used = tracemalloc.get_traced_memory()[0] - before
            per_pair.append(used / ((number + 1) * blocks))
    tracemalloc.stop()
    return {
        "least": round(min(per_pair), 1),
        "most": round(max(per_pair), 1),
        "last": round(per_pair[-1], 1),
    }


def hashing() -> list[dict[str, float]]:
    """Microseconds of CPU to hash a prompt into blocks of 64 tokens, by its bytes."""
    rows = []
    root = root_hash("model", seed=SEED)
    for size in (1_024, 40_960, 409_600):
        prompt = Random(SEED).randbytes(size)
        repeat, best = 2_000_000 // size, float("inf")
        for _ in range(5):
            begun = time.process_time()
            for _ in range(repeat):
                block_hashes(prompt, root, 64, seed=SEED)
            best = min(best, (time.process_time() - begun) / repeat)
        rows.append({"prompt_bytes": size, "hash_us": round(best * 1e6, 1)})
    return rows


def main() -> None:
    """Measure speed, memory and hashing."""
    parser = command_line(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pairs", type=int, default=1_000_000)
    parser.add_argument("--endpoints", type=numbers(int), default=ENDPOINTS)
    options = parser.parse_args()
    chains = Table("prompt_bytes", "endpoints", "hash_us", "match_us", "record_us", "sum_us")
    for size in (1_024, 8_192, 65_536):
        for endpoints in (4, 100):
            chains.add(**whole(endpoints, size, options.rounds))
    print("\nthe index alone")
    times = ("match_us", "record_us", "twin_match_us", "twin_record_us")
    speeds = Table("endpoints", "blocks", *times, "ratio")
    for endpoints in options.endpoints:
        for blocks in BLOCKS:
            speeds.add(**speed(endpoints, blocks, options.rounds))
    print("\nbytes of a pair of block and endpoint")
    held = Table("blocks", "least", "most", "last", "twin_most")
    for blocks in (1, 16, 160):
        ours = memory(blocks, options.pairs, PrefixIndex)
        twin = memory(blocks, options.pairs // 5, ReferenceIndex)
        held.add(blocks=blocks, pairs=options.pairs, **ours, twin_most=twin["most"])
    hashed = hashing()
    print("\nhashing: " + ", ".join(f"{r['prompt_bytes']} B {r['hash_us']} µs" for r in hashed))
    write_results(options, whole=chains.rows, speed=speeds.rows, memory=held.rows, hashing=hashed)


if __name__ == "__main__":
    main()
