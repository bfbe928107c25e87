"""Prompts of which the device's cache holds a quarter: what host memory and a disk below it are
worth, in hit rate, time to the first token and CPU.

Engines take each request in turns, so a busy machine slows all of them; one of them computes every
prompt. In float32 the draws must not differ; other formats round differently in longer steps.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import median

from result_files import RESULTS, write_results

from worker import catalog
from worker.config import EngineConfig, KvOffloadingConfig, SchedulerConfig
from worker.engine.core import EngineCore
from worker.engine.messages import AddRequest
from worker.engine.process import build_core
from worker.types import EngineStats, SamplingParams

BLOCK_SIZE = 16
NUM_OWN = 16  # tokens of a prompt that no other has
EXCESS = 4  # how many times the blocks of the device the documents need
GIB = 1 << 30


@dataclass
class Arm:
    """One engine, and what it has measured: seconds until the first token and of CPU, prompt tokens
    and those that were not computed.
    """

    name: str
    core: EngineCore
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    num_prompt: int = 0
    num_had: int = 0
    stats: EngineStats = field(default_factory=EngineStats)

    def ask(self, name: str, prompt: list[int]) -> int:
        """The first token after a prompt."""
        begun, cpu_begun = time.perf_counter(), time.process_time()
        self.core.add(AddRequest(name, prompt, SamplingParams(max_tokens=1, temperature=0.0), 0.0))
        while True:
            told = self.core.step()
            if told is not None and told.outputs:
                break
            if self.core.is_compiling:  # it waits for the disk
                time.sleep(0.0005)
        self.seconds.append(time.perf_counter() - begun)
        self.cpu_seconds.append(time.process_time() - cpu_begun)
        (output,) = told.outputs
        self.num_prompt += len(prompt)
        self.num_had += output.num_cached_tokens
        self.stats = told.stats
        return output.token_ids[0]

    def forget(self) -> None:
        """What was measured until now was to warm up."""
        self.seconds, self.cpu_seconds = [], []
        self.num_prompt = self.num_had = 0


def arms(model: Path, args: argparse.Namespace, folder: Path) -> list[Arm]:
    """An engine that keeps nothing, one with a prefix cache, and two with tiers below it: host
    memory for everything, or for a quarter of it and a disk for the rest.
    """
    blocks = -(-args.documents * (args.tokens + NUM_OWN) // BLOCK_SIZE)
    num_blocks = max(blocks // EXCESS, -(-(args.tokens + 2 * NUM_OWN) // BLOCK_SIZE))
    limits = SchedulerConfig(max_model_len=args.tokens + 2 * NUM_OWN, max_num_seqs=1)
    block_bytes = args.block_bytes
    host = KvOffloadingConfig(2 * blocks * block_bytes / GIB)
    disk = KvOffloadingConfig(blocks / 4 * block_bytes / GIB, str(folder))
    kinds = (("recompute", None), ("none", None), ("host", host), ("disk", disk))
    found = []
    for name, offloading in kinds:
        config = EngineConfig(
            "torch",
            str(model),
            args.dtype,
            block_size=BLOCK_SIZE,
            num_blocks_override=num_blocks,
            enable_prefix_caching=name != "recompute",
            num_threads=args.threads,
            async_scheduling=False,
            scheduler=limits,
            kv_offloading=offloading,
        )
        found.append(Arm(name, build_core(config)[0]))
    return found


def measure(args: argparse.Namespace) -> list[Arm]:
    """Every document once, then documents drawn by lot."""
    rng = Random(args.seed)
    documents = [rng.choices(range(1000, 40_000), k=args.tokens) for _ in range(args.documents)]
    asked = [*range(args.documents), *rng.choices(range(args.documents), k=args.requests)]
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        found = arms(args.model, args, Path(folder))
        try:
            for number, document in enumerate(asked):
                if number == args.documents:
                    for arm in found:
                        arm.forget()
                prompt = documents[document] + rng.choices(range(1000, 40_000), k=NUM_OWN)
                first = number % len(found)
                turns = found[first:] + found[:first]
                draws = {arm.ask(f"{number}", prompt) for arm in turns}
                assert len(draws) == 1 or args.dtype != "float32", "answers differ"
        finally:
            for arm in found:
                arm.core.shutdown()
    return found


def main() -> None:
    """Print the table, and write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    cached = Path.home() / ".cache/pointsman/models" / catalog.DEFAULT.file
    parser.add_argument("--model", type=Path, default=cached)
    parser.add_argument("--documents", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128, help="of a document")
    parser.add_argument("--requests", type=int, default=24, help="after one for each document")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--folder", help="where the disk is (default: for temporary files)")
    parser.add_argument(
        "--block-bytes", type=int, default=737_280, help="of a block, by which tiers are sized"
    )
    parser.add_argument("--seed", type=int, default=7)
    args = parser.parse_args()
    found = measure(args)
    recomputed, rows = found[0], []
    print("| tier | hit rate | TTFT, median, of recompute | mean | CPU | from host | from disk |")
    print("|---|---|---|---|---|---|---|")
    for arm in found:
        mean = sum(arm.seconds) / sum(recomputed.seconds)
        typical = median(arm.seconds) / median(recomputed.seconds)
        cpu = sum(arm.cpu_seconds) / sum(recomputed.cpu_seconds)
        hits = arm.num_had / arm.num_prompt
        moved = [n / (1 << 20) for n in (arm.stats.host_bytes_loaded, arm.stats.disk_bytes_read)]
        print(
            f"| {arm.name} | {hits:.0%} | {typical:.2f} ({median(arm.seconds):.3f} s) |"
            f" {mean:.2f} | {cpu:.2f} | {moved[0]:.0f} MiB | {moved[1]:.0f} MiB |"
        )
        rows.append({"tier": arm.name, "hit_rate": hits, "ttft_seconds": arm.seconds})
    write_results(RESULTS / "kv_tiers.json", rows)


if __name__ == "__main__":
    main()
