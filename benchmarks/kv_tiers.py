"""The worth of host memory and a disk below the device's cache: hit rate, time to the first token
and CPU of prompts of which the device holds a quarter.

    python benchmarks/kv_tiers.py [--documents 16] [--tokens 128] [--requests 24]

Engines take each request in turns, so a busy machine slows all of them; one of them computes every
prompt. In float32 the draws must not differ; other formats round differently in longer steps.
Prints a table and writes benchmarks/results/kv_tiers.json.
"""

import argparse
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import median

from measuring import DEFAULT_MODEL, Table, command_line, write_results

from worker.config import EngineConfig, KvOffloadingConfig, SchedulerConfig
from worker.engine.core import EngineCore
from worker.engine.messages import AddRequest
from worker.engine.process.build import build_core
from worker.types import EngineStats, SamplingParams

BLOCK_SIZE = 16
NUM_OWN = 16  # tokens of a prompt that no other has
EXCESS = 4  # how many times the blocks of the device the documents need
GIB = 1 << 30


@dataclass
class Arm:
    """One engine and its measurements: seconds until the first token and of CPU, prompt tokens and
    those that were not computed.
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
            step = self.core.step()
            if step is not None and step.outputs:
                break
            if self.core.is_compiling:  # it waits for the disk
                time.sleep(0.0005)
        self.seconds.append(time.perf_counter() - begun)
        self.cpu_seconds.append(time.process_time() - cpu_begun)
        (output,) = step.outputs
        self.num_prompt += len(prompt)
        self.num_had += output.num_cached_tokens
        self.stats = step.stats
        return output.token_ids[0]

    def forget(self) -> None:
        """Drop the measurements until now, which warmed up."""
        self.seconds, self.cpu_seconds = [], []
        self.num_prompt = self.num_had = 0


def arms(model: Path, args: argparse.Namespace, folder: Path) -> list[Arm]:
    """An engine without a prefix cache, one with it, and two with tiers below it: host
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
    """Measure, print the table, write the JSON."""
    parser = command_line(__doc__)
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL)
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
    recomputed = found[0]
    ratios = ("ttft_median_ratio .2f", "ttft_mean_ratio .2f", "cpu_ratio .2f")
    table = Table("tier <10", "hit_rate .0%", "ttft_seconds .3f", *ratios, "host_mib", "disk_mib")
    for arm in found:
        table.add(
            tier=arm.name,
            hit_rate=arm.num_had / arm.num_prompt,
            ttft_seconds=median(arm.seconds),
            ttft_median_ratio=median(arm.seconds) / median(recomputed.seconds),
            ttft_mean_ratio=sum(arm.seconds) / sum(recomputed.seconds),
            cpu_ratio=sum(arm.cpu_seconds) / sum(recomputed.cpu_seconds),
            host_mib=arm.stats.tiers.host_bytes_loaded >> 20,
            disk_mib=arm.stats.tiers.disk_bytes_read >> 20,
        )
    write_results(args, rows=table.rows)


if __name__ == "__main__":
    main()
