"""Indexes which endpoint holds which prompt blocks, from the events of the engines.

An endpoint has a shelf for each tier and cache group, which maps the engine's own block hashes to
the keys that this picker computed from the same tokens (`block_keys`); `_holders` maps a key to the
shelves that have it. So an event about an engine hash applies to keys.

If a chain of engine blocks ends within a key, its remaining tokens wait at its last hash (`loose`)
for the block that continues it. A key that covers several engine blocks is removed with the first
of them; a block stored twice must be removed twice. An engine loads only whole blocks, so if a
block covers several keys, a match counts whole blocks only. Blocks with an unknown parent are
dropped: that makes matches too short, never wrong. Memory: some 250 bytes per block that an engine
holds.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby, pairwise

from picker.prefix.block_keys import BlockKeys, Extras
from picker.prefix.kv_event_codec import BlocksRemoved, BlocksStored, CacheCleared, KvEvent
from picker.types import BYTES_PER_TOKEN

SPECULATIVE = "speculative"
_MAX_LOOSE = 4096  # chains of an endpoint that end within a key
_MAX_SHELVES = 64  # tiers and cache groups of an endpoint


@dataclass(slots=True, eq=False)
class _Shelf:
    endpoint: str
    tier: str
    keys: dict[int, tuple[int, ...]] = field(default_factory=dict)
    again: dict[int, int] = field(default_factory=dict)  # number of stores beyond the first


@dataclass(frozen=True, slots=True)
class _Loose:
    """The end of a chain of engine blocks: its last key, and the blocks and tokens after it."""

    key: int
    tokens: bytes = b""
    extras: Extras = ()
    hashes: tuple[int, ...] = ()


@dataclass(slots=True)
class _Engine:
    shelves: dict[tuple[str, int | None], _Shelf] = field(default_factory=dict)  # by tier and group
    loose: dict[int, _Loose] = field(default_factory=dict)  # chains that end within a key
    spans: dict[str, int] = field(default_factory=dict)  # keys per block by tier, if several

    def known(self, block: int) -> tuple[int, ...]:
        """Return the keys of an engine hash in any tier; () if unknown."""
        for shelf in self.shelves.values():
            keys = shelf.keys.get(block)
            if keys:
                return keys
        return ()


@dataclass(frozen=True, slots=True)
class _Expected:
    """The blocks of a request that was sent to an endpoint; they count until `until_seconds`."""

    until_seconds: float
    endpoint: str
    keys: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PreciseMatch:
    """The prefix that an endpoint holds; `score` sums the weights of its `blocks`, by tier."""

    score: float
    blocks: int
    tiers: Mapping[str, int]


class PreciseIndex:
    """Owns the blocks that engines report. Not thread safe; does no I/O."""

    def __init__(
        self, maker: BlockKeys, tier_weights: Mapping[str, float], max_keys: int = 10**8
    ) -> None:
        """`tier_weights` maps tiers, in lower case, to weights; other tiers weigh 1."""
        self._maker = maker
        self._weights = dict(tier_weights)
        self._max_keys = max_keys
        self._holders: dict[int, tuple[_Shelf, ...]] = {}
        self._engines: dict[str, _Engine] = {}
        self._expected: deque[_Expected] = deque()
        self._expected_at: dict[int, dict[str, int]] = {}
        self.dropped_blocks = 0  # parent unknown, or more than `_MAX_SHELVES` shelves

    def __len__(self) -> int:
        """The number of keys that engines hold."""
        return len(self._holders)

    # Events

    def apply(self, endpoint: str, model: str, event: KvEvent) -> None:
        if isinstance(event, BlocksStored):
            self._store(endpoint, model, event)
        elif isinstance(event, BlocksRemoved):
            self._remove(endpoint, event)
        elif isinstance(event, CacheCleared):
            self.clear(endpoint)

    def clear(self, endpoint: str) -> None:
        """Remove all blocks of an endpoint, expected ones included."""
        engine = self._engines.pop(endpoint, _Engine())
        for shelf in engine.shelves.values():
            for keys in shelf.keys.values():
                self._take_off(keys, shelf)
        if any(one.endpoint == endpoint for one in self._expected):
            self._expected = deque(one for one in self._expected if one.endpoint != endpoint)
            self._expected_at = {}
            for one in self._expected:
                self._count_expected(one, 1)

    def expect(
        self, endpoint: str, keys: Sequence[int], now_seconds: float, for_seconds: float
    ) -> None:
        """Assume for `for_seconds`, the same in every call, that an endpoint holds these blocks."""
        self._expire(now_seconds)
        one = _Expected(now_seconds + for_seconds, endpoint, tuple(keys))
        self._expected.append(one)
        self._count_expected(one, 1)

    def match(self, keys: Sequence[int], now_seconds: float) -> dict[str, PreciseMatch]:
        """Return the match of each endpoint that holds block 0, up to its first missing block."""
        self._expire(now_seconds)
        matches: dict[str, PreciseMatch] = {}
        alive: dict[str, _Tally] | None = None
        for tiers, count in self._runs(keys):
            if alive is None:
                alive = {endpoint: _Tally(self._spans(endpoint)) for endpoint in tiers}
            for endpoint in [one for one in alive if one not in tiers]:
                matches[endpoint] = alive.pop(endpoint).match()
            for endpoint, tally in alive.items():
                tally.add(tiers[endpoint], count, self._weights)
        for endpoint, tally in (alive or {}).items():
            matches[endpoint] = tally.match()
        return matches

    def check_integrity(self) -> None:
        for key, shelves in self._holders.items():
            if not shelves or len(set(map(id, shelves))) != len(shelves):
                raise AssertionError("a key has no shelf, or one twice")
            for shelf in shelves:
                if self._engines.get(shelf.endpoint) is None:
                    raise AssertionError("a shelf has no endpoint")
                if not any(key in keys for keys in shelf.keys.values()):
                    raise AssertionError("a key is not on its shelf")
        for engine in self._engines.values():
            for shelf in engine.shelves.values():
                if not shelf.again.keys() <= shelf.keys.keys():
                    raise AssertionError("an absent block has repeated stores")
        if sum(len(one.keys) for one in self._expected) != sum(
            sum(counts.values()) for counts in self._expected_at.values()
        ):
            raise AssertionError("expectations are miscounted")
        if not all(self._expected_at.values()):
            raise AssertionError("a key without expectations is listed")

    def _store(self, endpoint: str, model: str, event: BlocksStored) -> None:
        engine = self._engines.setdefault(endpoint, _Engine())
        shelf = engine.shelves.get((event.tier, event.group))
        if shelf is None:
            if len(engine.shelves) == _MAX_SHELVES:
                self.dropped_blocks += len(event.hashes)
                return
            shelf = _Shelf(endpoint, event.tier)
            engine.shelves[event.tier, event.group] = shelf
            span, rest = divmod(event.block_size, self._maker.block_size_tokens)
            if span > 1 and not rest:
                engine.spans[event.tier] = max(span, engine.spans.get(event.tier, 1))
        if not event.tokens:
            for block in event.hashes:
                self._put(shelf, block, engine.known(block))
            return
        start = self._start(engine, shelf, model, event)
        if start is None:
            self.dropped_blocks += len(event.hashes)
        elif event.block_size == self._maker.block_size_tokens and not start.tokens:
            keys = self._maker.chain(start.key, event.tokens, event.extras)
            for block, key in zip(event.hashes, keys, strict=True):
                self._put(shelf, block, (key,))
        else:
            self._store_unequal(engine, shelf, event, start)

    def _start(
        self, engine: _Engine, shelf: _Shelf, model: str, event: BlocksStored
    ) -> _Loose | None:
        """Return the end of the chain that the event continues; None if its parent is unknown."""
        if event.parent is None:
            return _Loose(self._maker.root(event.adapter or model))
        loose = engine.loose.get(event.parent)
        if loose is not None:
            return loose if all(block in shelf.keys for block in loose.hashes) else None
        known = engine.known(event.parent)
        return _Loose(known[-1]) if known else None

    def _store_unequal(
        self, engine: _Engine, shelf: _Shelf, event: BlocksStored, start: _Loose
    ) -> None:
        """Store blocks whose size differs from that of keys."""
        size, own = event.block_size, self._maker.block_size_tokens
        blocks = (*start.hashes, *event.hashes)
        tokens = start.tokens + event.tokens
        total = len(tokens) // BYTES_PER_TOKEN
        # The offset of each block; the first of the loose ones may begin before the first key.
        begins = [total - (len(blocks) - i) * size for i in range(len(blocks))]
        extras = _extras_of_keys(start, event, begins[len(start.hashes) :], total, own)
        keys = self._maker.chain(start.key, tokens, extras)
        for i, (block, begin) in enumerate(zip(blocks, begins, strict=True)):
            part = tuple(keys[max(0, begin) // own : -(-(begin + size) // own)])
            self._put(shelf, block, part, is_again=i >= len(start.hashes))
        left = total - len(keys) * own
        if left:
            while len(engine.loose) >= _MAX_LOOSE:
                del engine.loose[next(iter(engine.loose))]
            waiting = -(-left // size)
            engine.loose[blocks[-1]] = _Loose(
                keys[-1] if keys else start.key,
                tokens[-left * BYTES_PER_TOKEN :],
                extras[len(keys)] if len(extras) > len(keys) else (),
                blocks[-waiting:],
            )

    def _put(self, shelf: _Shelf, block: int, keys: tuple[int, ...], is_again: bool = True) -> None:
        """Put a block on a shelf; a known one gets more keys, or other keys if `is_again`."""
        before = shelf.keys.get(block)
        if before is None:
            shelf.keys[block] = keys
        else:
            if is_again:
                shelf.again[block] = shelf.again.get(block, 0) + 1
            new = tuple(key for key in keys if key not in before)
            if is_again and new:
                shelf.keys[block] = keys
                self._take_off((key for key in before if key not in keys), shelf)
            else:
                shelf.keys[block] = before + new
        for key in keys:
            held = self._holders.get(key)
            if held is None:
                if len(self._holders) < self._max_keys:
                    self._holders[key] = (shelf,)
            elif shelf not in held:
                self._holders[key] = (*held, shelf)

    def _remove(self, endpoint: str, event: BlocksRemoved) -> None:
        engine = self._engines.get(endpoint)
        shelf = engine.shelves.get((event.tier, event.group)) if engine else None
        if engine is None or shelf is None:
            return
        for block in event.hashes:
            again = shelf.again.pop(block, 0)
            if again > 1:
                shelf.again[block] = again - 1
            if not again:
                engine.loose.pop(block, None)
                self._take_off(shelf.keys.pop(block, ()), shelf)

    def _take_off(self, keys: Iterable[int], shelf: _Shelf) -> None:
        for key in keys:
            left = tuple(one for one in self._holders.get(key, ()) if one is not shelf)
            if left:
                self._holders[key] = left
            else:
                self._holders.pop(key, None)

    # Lookup

    def _spans(self, endpoint: str) -> Mapping[str, int]:
        engine = self._engines.get(endpoint)
        return _NOTHING if engine is None else engine.spans

    def _runs(self, keys: Sequence[int]) -> Iterator[tuple[dict[str, set[str]], int]]:
        """Yield, for each run of keys with the same tiers, the tiers by endpoint and its length."""
        shelves: tuple[_Shelf, ...] = ()
        expected: dict[str, int] = {}
        count = 0
        for key in keys:
            here = self._holders.get(key, ())
            hoped = self._expected_at.get(key, _NOTHING)
            if count and here == shelves and hoped.keys() == expected.keys():
                count += 1
                continue
            if count:
                yield _tiers(shelves, expected), count
            shelves, expected, count = here, hoped, 1
            if not here and not hoped:
                return
        if count:
            yield _tiers(shelves, expected), count

    # Expectations

    def _expire(self, now_seconds: float) -> None:
        while self._expected and self._expected[0].until_seconds <= now_seconds:
            self._count_expected(self._expected.popleft(), -1)

    def _count_expected(self, one: _Expected, by: int) -> None:
        for key in one.keys:
            counts = self._expected_at.setdefault(key, {})
            counts[one.endpoint] = counts.get(one.endpoint, 0) + by
            if not counts[one.endpoint]:
                del counts[one.endpoint]
            if not counts:
                del self._expected_at[key]


class _Tally:
    """Adds up one endpoint's match; blocks of several keys (`spans`) need all runs first."""

    __slots__ = ("_blocks", "_runs", "_score", "_spans", "_tiers", "_weights")

    def __init__(self, spans: Mapping[str, int]) -> None:
        self._score, self._blocks = 0.0, 0
        self._tiers: dict[str, int] = {}
        self._spans = spans
        self._runs: list[tuple[set[str], int]] = []
        self._weights: Mapping[str, float] = {}

    def add(self, tiers: set[str], count: int, weights: Mapping[str, float]) -> None:
        if self._spans:
            self._runs.append((tiers, count))
            self._weights = weights
        else:
            self._count(tiers, count, weights)

    def _count(self, tiers: set[str], count: int, weights: Mapping[str, float]) -> None:
        self._score += count * max(weights.get(tier, 1.0) for tier in tiers)
        self._blocks += count
        for tier in tiers:
            self._tiers[tier] = self._tiers.get(tier, 0) + count

    def match(self) -> PreciseMatch:
        for tiers, count in _whole(self._runs, self._spans):
            self._count(tiers, count, self._weights)
        return PreciseMatch(self._score, self._blocks, self._tiers)


def _whole(
    runs: Sequence[tuple[set[str], int]], spans: Mapping[str, int]
) -> Iterator[tuple[set[str], int]]:
    """Yield `runs` restricted to tiers with whole blocks, up to the first key without one."""
    edges = list(accumulate((count for _, count in runs), initial=0))
    whole = {tier: _blocks_within(runs, tier, span) for tier, span in spans.items()}
    cuts = {edge for ranges in whole.values() for pair in ranges for edge in pair}
    run = 0
    for begin, end in pairwise(sorted(cuts.union(edges))):
        while edges[run + 1] <= begin:
            run += 1
        tiers = {
            tier
            for tier in runs[run][0]
            if tier not in whole or any(low <= begin < high for low, high in whole[tier])
        }
        if not tiers:
            return
        yield tiers, end - begin


def _blocks_within(
    runs: Sequence[tuple[set[str], int]], tier: str, span: int
) -> list[tuple[int, int]]:
    """Return the ranges of keys in which a tier has whole blocks of `span` keys."""
    ranges: list[tuple[int, int]] = []
    position = 0
    for has_tier, same in groupby(runs, key=lambda one: tier in one[0]):
        begin, position = position, position + sum(count for _, count in same)
        low, high = -(-begin // span) * span, position // span * span
        if has_tier and low < high:
            ranges.append((low, high))
    return ranges


_NOTHING: dict[str, int] = {}


def _tiers(shelves: Sequence[_Shelf], expected: Mapping[str, int]) -> dict[str, set[str]]:
    tiers: dict[str, set[str]] = {}
    for shelf in shelves:
        tiers.setdefault(shelf.endpoint, set()).add(shelf.tier)
    for endpoint in expected:
        tiers.setdefault(endpoint, set()).add(SPECULATIVE)
    return tiers


def _extras_of_keys(
    start: _Loose, event: BlocksStored, begins: Sequence[int], total: int, own: int
) -> list[Extras]:
    """Return, for each key (also a partial last one), the extra keys of the blocks it overlaps."""
    if not start.extras and not any(event.extras):
        return []
    # Dicts as ordered sets: a key that covers many small blocks may have many extra keys.
    extras: list[dict[str, None]] = [{} for _ in range(-(-total // own))]
    extras[0].update(dict.fromkeys(start.extras))
    for begin, texts in zip(begins, event.extras, strict=False):
        for index in range(begin // own, -(-(begin + event.block_size) // own)):
            extras[index].update(dict.fromkeys(texts))
    return [tuple(texts) for texts in extras]
