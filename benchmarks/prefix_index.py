"""How fast the picker's prefix index is, and how much memory a block takes.

    python benchmarks/prefix_index.py [--rounds 3] [--pairs 1000000]

Set against its slow twin, dicts and bit masks, in the same run and on the same prompts. A prompt
shares four fifths of its blocks with one of eight system prompts; four of five prompts go to an
endpoint that matches best, the others anywhere. CPU time, not wall-clock time; of several rounds
the best. Memory is what Python's allocators have handed out, right after the last growth and right
before the next one, for prompts of 1, 16 and 160 blocks without anything in common, which is the
worst case. Fixed seed. Prints tables and writes benchmarks/results/prefix_index.json.
"""

from __future__ import annotations

import argparse
import gc
import platform
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from result_files import RESULTS, write_results

from picker.prefix.block_hash import BlockHashes, block_hashes, root_hash
from picker.prefix.index import PrefixIndex

sys.path.append(str(Path(__file__).parents[1]))
from tests.support.picker.reference_prefix_index import ReferenceIndex

SEED = 20261121
ENDPOINTS = (1, 10, 100, 1000, 5000)
BLOCKS = (1, 4, 16, 40, 160, 1600)
CAPACITY = 16_384  # blocks of 64 tokens: a KV cache of a million tokens
WARM_BLOCKS = 60_000
TIMED_PROMPTS = 400
RESULTS_FILE = RESULTS / "prefix_index.json"


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
    """Microseconds of CPU to hash a prompt of so many bytes into blocks of 64 tokens."""
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
    """Measure and write it all down."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pairs", type=int, default=1_000_000)
    arguments = parser.parse_args()
    print(
        f"{'endpoints':>9} {'blocks':>6} {'match µs':>9} {'record µs':>9}   "
        "twin: match, record, ratio"
    )
    rows = []
    for endpoints in ENDPOINTS:
        for blocks in BLOCKS:
            row = speed(endpoints, blocks, arguments.rounds)
            rows.append(row)
            print(
                f"{endpoints:>9} {blocks:>6} {row['match_us']:>9} {row['record_us']:>9}   "
                f"{row['twin_match_us']:>11} {row['twin_record_us']:>7} {row['ratio']:>6}",
                flush=True,
            )
    held = []
    print(f"\n{'blocks':>6} {'bytes a pair: least':>20} {'most':>6} {'last':>6}   twin: most")
    for blocks in (1, 16, 160):
        ours = memory(blocks, arguments.pairs, PrefixIndex)
        twin = memory(blocks, arguments.pairs // 5, ReferenceIndex)
        held.append({"blocks": blocks, "pairs": arguments.pairs, **ours, "twin_most": twin["most"]})
        print(
            f"{blocks:>6} {ours['least']:>20} {ours['most']:>6} {ours['last']:>6}   {twin['most']}",
            flush=True,
        )
    hashed = hashing()
    print("\nhashing: " + ", ".join(f"{r['prompt_bytes']} B {r['hash_us']} µs" for r in hashed))
    machine = {"python": platform.python_version(), "machine": platform.machine()}
    results = {"seed": SEED, **machine, "speed": rows, "memory": held, "hashing": hashed}
    write_results(RESULTS_FILE, results)


if __name__ == "__main__":
    main()
