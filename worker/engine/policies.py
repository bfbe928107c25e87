"""The scheduler's choices as pure functions: the order of service, the victim, a sequence's end.

When blocks run out, `choose_victim` names a running sequence of the lowest class, but not the
first-ranked one and none that is *guaranteed*. A sequence is guaranteed when it is admitted after
`MAX_PREEMPTIONS` preemptions, which happens only when the greatest needs of all guaranteed
sequences fit in the pool together, as in the banker's algorithm. If that leaves none, the one that
asks gives way itself, unless it is of a better class, or guaranteed.

*Why nothing locks up.* Within a class a sequence is preempted `MAX_PREEMPTIONS` times at most, and
between two preemptions every step gives at least one token. The head of the line is passed
`max_bypasses` times at most; then those that run end one by one, and a sequence alone always fits.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from worker.engine.cache.block_hash import BlockHash
from worker.types import FinishReason, RepetitionDetection, SamplingParams

MAX_PREEMPTIONS = 3
# Tokens by which every sequence should be able to grow before a preempted sequence comes back.
READMISSION_TOKENS = 32
# Above this many waiting sequences, looking up every prefix at every step costs too much.
MAX_ORDERED_BY_PREFIX = 128
# A waiting sequence that later ones went before this often goes by arrival again.
MAX_OVERTAKES = 32

WAITING_ORDERS = ("fcfs", "lpm")
POLICIES = ("fcfs", "priority")

Rank = tuple[int, int]


# ---- who gives way --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class VictimCandidate:
    """A running sequence, as far as the choice of a victim is concerned.

    Lower `priority` goes first; `seq_id` ascends by arrival. `num_shared` of the `num_computed`
    tokens are in blocks that others hold too, so they would survive.
    """

    seq_id: int
    priority: int
    num_prompt: int
    num_outputs: int
    num_computed: int
    num_shared: int
    num_blocks: int
    num_preemptions: int = 0
    guaranteed: bool = False


VictimPolicy = Callable[[VictimCandidate], tuple[int, ...]]


def _recompute_cost(candidate: VictimCandidate) -> tuple[int, ...]:
    cost = max(0, candidate.num_computed - candidate.num_shared)
    return (candidate.num_preemptions, cost, candidate.num_outputs, -candidate.seq_id)


# By name, the key whose smallest value gives way: ours; vLLM's (and nano-vllm's youngest);
# forge-infer's; SGLang's; forge-infer's `evict_largest`.
VICTIM_POLICIES: Mapping[str, VictimPolicy] = {
    "recompute-cost": _recompute_cost,
    "last": lambda c: (-c.priority, -c.seq_id),
    "fewest-outputs": lambda c: (c.num_outputs, -c.seq_id),
    "fewest-outputs-longest-input": lambda c: (c.num_outputs, -c.num_prompt, -c.seq_id),
    "largest": lambda c: (-c.num_blocks, -c.seq_id),
}


def choose_victim(
    policy: VictimPolicy, requester: VictimCandidate, running: Sequence[VictimCandidate]
) -> VictimCandidate:
    """Choose the sequence that loses its blocks so that `requester` can continue, maybe itself.
    `running` is every sequence that holds blocks, in order of rank.
    """
    lowest = max(candidate.priority for candidate in running)
    members = [candidate for candidate in running if candidate.priority == lowest]
    eligible = [c for c in members if not c.guaranteed and c is not running[0]]
    if not eligible and requester.priority < lowest:
        eligible = members
    if not eligible and requester.guaranteed:
        eligible = [c for c in members if not c.guaranteed]
    return min(eligible, key=policy) if eligible else requester


def may_guarantee(need: int, guaranteed_needs: Iterable[int], num_blocks: int) -> bool:
    """True if a sequence that may come to need `need` blocks can be guaranteed too. The first
    always can: no sequence is larger than the pool.
    """
    needs = list(guaranteed_needs)
    return not needs or sum(needs) + need <= num_blocks


def readmission_reserve(
    num_preemptions: int, remaining_tokens: Iterable[int], block_size: int
) -> int:
    """Return the blocks that should stay free when a sequence returns after `num_preemptions`.
    `remaining_tokens` says by how much each sequence that would then run can still grow.
    """
    horizon = READMISSION_TOKENS << (num_preemptions - 1)
    return sum(-(-min(remaining, horizon) // block_size) for remaining in remaining_tokens)


# ---- who goes first -------------------------------------------------------------------------


def lpm_key(rank: Rank, num_cached: int, num_overtaken: int) -> tuple[int, bool, int, int]:
    """Return the sort key: priority, overtaken too often or not, longest cached prefix first."""
    priority, seq_id = rank
    if num_overtaken >= MAX_OVERTAKES:
        return (priority, False, 0, seq_id)
    return (priority, True, -num_cached, seq_id)


def may_pass(blocked: Iterable[tuple[int, int]], priority: int, max_bypasses: int) -> bool:
    """True if a sequence of `priority` may be admitted before sequences that do not fit now.
    `blocked` has each one's (priority, times passed already). Only equals are passed: room that a
    better class waits for is not given to a lower one.
    """
    return all(held == priority and times < max_bypasses for held, times in blocked)


# ---- how much -------------------------------------------------------------------------------


def chunk_limit(budget: int, long_prefill_tokens: int, num_eligible: int) -> int:
    """Return the most tokens of a sequence in a step; one alone has no threshold (0: off)."""
    if long_prefill_tokens and num_eligible > 1:
        return min(budget, long_prefill_tokens)
    return budget


def common_blocks(one: Sequence[BlockHash], other: Sequence[BlockHash]) -> int:
    """Count the leading blocks that two chains share, by bisection: after the first difference no
    hashes agree.
    """
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[middle - 1] == other[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low


def should_defer(num_cached: int, num_shared: int, threshold: int | None) -> bool:
    """True if a sequence should wait until another has computed their `num_shared` common leading
    tokens, of which `num_cached` are cached already.
    """
    return threshold is not None and num_shared - num_cached >= max(threshold, 1)


# ---- when it ends ---------------------------------------------------------------------------


def check_stop(
    params: SamplingParams,
    eos_token_ids: frozenset[int],
    token_ids: Sequence[int],
    num_prompt: int,
    max_tokens_total: int,
) -> tuple[FinishReason | None, int | None]:
    """Return why the last of `token_ids` ends the sequence, if it does, and which stop token did.

    In vLLM's order: end token, stop token, length, then repetition. Before `min_tokens` outputs the
    sampler draws no stop token; one that is there all the same is a token like any other, but for
    the end token of an output that its grammar does not let continue.
    """
    token = token_ids[-1]
    num_outputs = len(token_ids) - num_prompt
    is_long = num_outputs >= params.min_tokens
    is_end = token in eos_token_ids and not params.ignore_eos
    if is_end and (is_long or params.grammar is not None):
        return FinishReason.STOP, token
    if is_long and token in params.stop_token_ids:
        return FinishReason.STOP, token
    if len(token_ids) >= max_tokens_total:
        return FinishReason.LENGTH, None
    detection = params.repetition_detection
    if detection is None or num_outputs < params.min_tokens:
        return None, None
    repeats = is_repeating(token_ids, num_outputs, detection)
    return (FinishReason.REPETITION if repeats else None), None


def is_repeating(
    token_ids: Sequence[int], num_outputs: int, detection: RepetitionDetection
) -> bool:
    """True if the last outputs are one pattern, repeated at least `min_count` times."""
    end = len(token_ids)
    for size in range(max(1, detection.min_pattern_size), detection.max_pattern_size + 1):
        span = size * detection.min_count
        if span > num_outputs:
            return False
        if all(
            token_ids[i] == token_ids[i - size] for i in range(end - 1, end - span + size - 1, -1)
        ):
            return True
    return False
