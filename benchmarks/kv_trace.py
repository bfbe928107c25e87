"""The trace of kv-cache-scheduler's benchmark on our block manager, by its accounting and by ours.

    python benchmarks/kv_trace.py

Two separate traces of 300 requests from one random sequence: in the first all prompts begin with
the same 64 tokens, in the second nothing is shared. 512 blocks of 16 tokens, at most 16 requests at
a time, every request steps once per step. Utilisation and internal fragmentation are means over the
steps, sampled after the finished ones have left.

kv-cache-scheduler's accounting: hits are whole blocks of prompts, generated blocks are not cached,
every token gets a slot, also the last one, whose KV is never read. The block manager is the same
in both; only the calls differ.

ours: hits are counted to the token, generated blocks and idle tails are cached, contents stay until
their block is needed, and the last token gets no slot.

An eviction takes blocks from a running request, as there; `reused` counts idle contents that made
room for others.

Results go to benchmarks/results/kv_trace.json.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass

from measuring import Table, command_line, write_results

from worker.config import CacheConfig
from worker.engine.cache.block_hash import BlockHash, BlockHasher, PartialBlock
from worker.engine.cache.block_manager import BlockManager

NUM_REQUESTS = 300
NUM_BLOCKS = 512
BLOCK_SIZE = 16
MAX_CONCURRENT = 16
SHARED_PREFIX = tuple(range(5000, 5064))
GENERATED_TOKEN = 0


@dataclass(frozen=True, slots=True)
class Ask:
    """One request of a trace."""

    prompt: tuple[int, ...]
    num_completion: int


@dataclass(frozen=True, slots=True)
class Policy:
    """The differences of the two accountings."""

    name: str
    partial_hits: bool
    cache_generated: bool
    slot_for_last_token: bool


THEIRS = Policy("kv-cache-scheduler", False, False, True)
OURS = Policy("ours", True, True, False)


@dataclass(frozen=True, slots=True)
class Result:
    """The figures of a trace. Rates, utilisation and fragmentation are fractions."""

    policy: str
    trace: str
    allocations: int
    hit_tokens: int
    hit_rate: float
    utilisation: float
    fragmentation: float
    steps: int
    evictions: int
    reused: int


def random_numbers(state: int = 42) -> Iterator[int]:
    """Knuth's linear congruential sequence: the whole 64-bit state is the output."""
    while True:
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        yield state


def traces() -> tuple[list[Ask], list[Ask]]:
    """The trace with the shared beginning, then the one without, from one sequence of numbers."""
    numbers = random_numbers()

    def draw(low: int, high: int) -> int:
        return low + next(numbers) % (high - low + 1)

    shared: list[Ask] = []
    for _ in range(NUM_REQUESTS):
        num_user, num_completion = draw(8, 48), draw(16, 96)
        user = tuple(draw(0, 4999) for _ in range(num_user))
        shared.append(Ask(SHARED_PREFIX + user, num_completion))
    unshared: list[Ask] = []
    for index in range(NUM_REQUESTS):
        num_prompt, num_completion = draw(32, 64), draw(16, 96)
        prompt = tuple(index * 10_000 + j for j in range(num_prompt))
        unshared.append(Ask(prompt, num_completion))
    return shared, unshared


class Cell:
    """One run of a trace through a block manager."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.blocks = BlockManager(
            CacheConfig(NUM_BLOCKS, BLOCK_SIZE, enable_partial_hits=policy.partial_hits)
        )
        self.hasher = BlockHasher(BLOCK_SIZE)
        self.running: dict[int, tuple[Ask, list[int], list[BlockHash]]] = {}
        self.allocations = 0
        self.hit_tokens = 0

    def admit(self, seq_id: int, ask: Ask) -> None:
        """Let a request in and run its prompt."""
        chain: list[BlockHash] = []
        num_prompt = len(ask.prompt)
        self.hasher.extend(chain, ask.prompt, num_prompt // BLOCK_SIZE)
        hit = self.blocks.match(chain, ask.prompt)
        if not self.blocks.admit(seq_id, num_prompt, hit):
            raise RuntimeError("the trace does not fit without evictions")
        self.blocks.take_copies()
        self.blocks.seal(seq_id, chain, len(chain))
        self.allocations += len(self.blocks.table(seq_id)) - len(hit.blocks)
        self.hit_tokens += hit.num_tokens
        self.running[seq_id] = (ask, list(ask.prompt), chain)

    def step(self) -> None:
        """Every running request gets one token; those that have all of theirs leave."""
        for seq_id, (ask, tokens, chain) in list(self.running.items()):
            end = len(tokens) + 1
            is_last = end >= len(ask.prompt) + ask.num_completion
            if self.policy.slot_for_last_token or not is_last:
                before = len(self.blocks.table(seq_id))
                if not self.blocks.allocate(seq_id, end - 1, end):
                    raise RuntimeError("the trace does not fit without evictions")
                self.allocations += len(self.blocks.table(seq_id)) - before
            tokens.append(GENERATED_TOKEN)
            if self.policy.cache_generated and not is_last:
                self.hasher.extend(chain, tokens, end // BLOCK_SIZE)
                self.blocks.seal(seq_id, chain, end // BLOCK_SIZE)
            if is_last:
                self.end(seq_id, tokens[:-1], chain)

    def end(self, seq_id: int, written: list[int], chain: list[BlockHash]) -> None:
        """A request leaves; by our policy its partly filled block stays a hit."""
        del self.running[seq_id]
        rest = tuple(written[len(chain) * BLOCK_SIZE :])
        keep = self.policy.partial_hits and rest
        self.blocks.free(seq_id, PartialBlock(len(chain), chain[-1].digest, rest) if keep else None)

    def fragmentation(self) -> float:
        """The fraction of the running requests' slots that hold nothing."""
        capacity = sum(len(self.blocks.table(seq_id)) for seq_id in self.running) * BLOCK_SIZE
        if not capacity:
            return 0.0
        slack = sum(-len(tokens) % BLOCK_SIZE for _, tokens, _ in self.running.values())
        return slack / capacity


def run(policy: Policy, name: str, asks: list[Ask]) -> Result:
    """One trace by one accounting."""
    cell = Cell(policy)
    waiting = list(enumerate(asks))[::-1]
    samples: list[tuple[float, float]] = []
    while True:
        while waiting and len(cell.running) < MAX_CONCURRENT:
            cell.admit(*waiting.pop())
        if not cell.running:
            break
        cell.step()
        samples.append((cell.blocks.usage, cell.fragmentation()))
    cell.blocks.check_integrity()
    return Result(
        policy.name,
        name,
        cell.allocations,
        cell.hit_tokens,
        cell.hit_tokens / sum(len(ask.prompt) for ask in asks),
        sum(usage for usage, _ in samples) / len(samples),
        sum(fragmentation for _, fragmentation in samples) / len(samples),
        len(samples),
        0,  # else the run would not have come to its end
        cell.blocks.num_evictions,
    )


def main() -> None:
    """Run both traces by both accountings."""
    options = command_line(__doc__).parse_args()
    rates = ("hit_rate .3%", "utilisation .3%", "fragmentation .2%")
    columns = ("allocations", *rates, "steps", "evictions", "reused")
    table = Table("policy <20", "trace <12", *columns)
    shared, unshared = traces()
    savings = {}
    for policy in (THEIRS, OURS):
        one, other = run(policy, "shared", shared), run(policy, "no sharing", unshared)
        table.add(**asdict(one))
        table.add(**asdict(other))
        savings[policy.name] = 1 - one.allocations / other.allocations
    for name, saving in savings.items():
        print(f"{name}: sharing saves {saving:.1%} of the allocations")
    write_results(options, results=table.rows, savings=savings)


if __name__ == "__main__":
    main()
