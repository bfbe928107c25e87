"""The speed of the picker's prefix index, and the memory that a block takes.

    python benchmarks/prefix_index.py [--rounds 3] [--pairs 1000000] [--endpoints 1,10]

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
from typing import Any

import numpy as np
from measuring import Table, command_line, numbers, write_results

from picker.prefix.block_hash import BlockHashes, block_hashes, root_hash
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
        np.concatenate((shared[rng.integers(8)], random_hashes(rng, blocks - blocks * 4 // 5)))
        for _ in range(count)
    ]


def random_hashes(rng: np.random.Generator, count: int) -> BlockHashes:
    return rng.integers(1, 2**64 - 1, count, np.uint64)


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
    as_lists = [prompt.tolist() for prompt in given]
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
        given = prompt if make is PrefixIndex else prompt.tolist()
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
    write_results(options, speed=speeds.rows, memory=held.rows, hashing=hashed)


if __name__ == "__main__":
    main()
