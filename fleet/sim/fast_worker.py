"""A worker that costs a few events per request, where the exact one costs a few per token.

The linear latency model gives all steps that run the same sequences the same length. So steps are
taken in jumps: to the next end of an answer, to the step that finds no free block, or, if a request
arrives meanwhile, to the end of the current step. A log has the length of every step; the gaps of
an answer are a slice of it.

Admission is that of the scheduler. Inexact are: sequences use half a block more than their tokens
need, on average; a prompt becomes a hit as a whole, after its last chunk; when blocks run out, the
last admitted sequence is preempted; a request that waits for KV enters the queue once it is there.
"""

from __future__ import annotations

import asyncio
import math
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from heapq import heapify, heappop, heappush
from random import Random

import numpy as np
from numpy.typing import NDArray

from fleet.sim.living_worker import Answered, WorkerGoneError, WorkerSettings
from fleet.sim.virtual_kv import TOKEN_BYTES, Connect, VirtualPull
from worker.engine.cache.block_hash import BlockHash
from worker.engine.cache.cache_events import BlockRemoved, BlocksStored, CacheEvent
from worker.sim.latency import transfer_seconds
from worker.types import EngineStats, KvSource

_RING_TOKENS = 1 << 16
_LOG_STEPS = 1 << 15
_LAST_BLOCK = 0.5  # the unused part of a sequence's last block, on average
_BASE = 0x9E3779B97F4A7C15
_INVERSE = pow(_BASE, -1, 1 << 64)
_MIXER = np.uint64(0xBF58476D1CE4E5B9)  # of splitmix64
# The log whose slices are the gaps of answers.
_RING = array("i", Random(0).choices(range(256, 1280), k=2 * _RING_TOKENS))


@dataclass(slots=True, eq=False)
class _Sequence:
    number: int
    prompt: list[int]
    num_output: int
    first: Callable[[], None]
    done: asyncio.Future[Answered]
    hashes: list[int]  # of the full blocks of the prompt
    num_cached: int | None = None
    prefill_left: int = 0
    held: int = 0  # referenced blocks of `hashes`
    num_generated: int = 0  # tokens of the answer
    since: int | None = None  # the step of the last counted token, while it decodes
    last_at: float = 0.0
    gaps: array[float] = field(default_factory=lambda: array("d"))
    keeps_kv: bool = False
    pull: VirtualPull | None = None  # with KV of the prompt, until admission


class BlockCache:
    """Owns the names of full blocks: referenced ones, and others in order of eviction."""

    def __init__(self, publish: Callable[[Sequence[CacheEvent]], None] | None) -> None:
        self._publish = publish
        self._references: dict[int, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict()
        self._events: list[CacheEvent] = []

    @property
    def num_referenced(self) -> int:
        return len(self._references)

    @property
    def references(self) -> int:
        return sum(self._references.values())

    def match(self, hashes: Sequence[int], limit: int) -> int:
        count = 0
        for name in hashes[:limit]:
            if name not in self._references and name not in self._free:
                break
            count += 1
        return count

    def refer(self, hashes: Iterable[int]) -> None:
        for name in hashes:
            count = self._references.get(name)
            if count is None:
                self._free.pop(name, None)
                self._references[name] = 1
            else:
                self._references[name] = count + 1

    def release(self, hashes: Sequence[int]) -> None:
        """Release later blocks first, so that beginnings are evicted last."""
        for name in reversed(hashes):
            count = self._references[name] - 1
            if count:
                self._references[name] = count
            else:
                del self._references[name]
                self._free[name] = None

    def add_free(self, hashes: Sequence[int]) -> None:
        for name in reversed(hashes):
            if name not in self._references:
                self._free[name] = None
                self._free.move_to_end(name)

    def evict(self, keep: float) -> None:
        while len(self._free) > max(0.0, keep):
            name, _ = self._free.popitem(last=False)
            if self._publish is not None:
                self._events.append(BlockRemoved(_digest(name)))

    def stored(self, tokens: Sequence[int], hashes: Sequence[int], since: int, size: int) -> None:
        if self._publish is None or since >= len(hashes):
            return
        names = [0, *hashes]
        run = tuple(
            BlockHash(
                _digest(names[at + 1]),
                _digest(names[at]),
                tuple(tokens[at * size : (at + 1) * size]),
            )
            for at in range(since, len(hashes))
        )
        self._events.append(BlocksStored(run, run[0].parent if since else None))

    def flush(self) -> None:
        if self._publish is not None and self._events:
            events, self._events = self._events, []
            self._publish(events)


def _digest(name: int) -> bytes:
    return name.to_bytes(8, "big")


def chain(tokens: Sequence[int], size: int, names: list[int], until: int) -> list[int]:
    """Extend `names` by the names of the next blocks, up to block `until`. A name is a polynomial
    hash of the tokens of its block and of all blocks before it, modulo 2^64:

    name_i = name_{i-1} · P + block_i = P^{i+1} · (name_{-1} + Σ_{j≤i} block_j · P^{-(j+1)})
    """
    count = until - len(names)
    if count <= 0:
        return names
    text = np.array(tokens[len(names) * size : until * size], np.uint64).reshape(count, size)
    blocks = (text * _odd(size)).sum(axis=1, dtype=np.uint64)
    blocks = (blocks ^ blocks >> np.uint64(31)) * _MIXER
    powers, inverses = (np.cumprod(np.full(count, one, np.uint64)) for one in (_BASE, _INVERSE))
    before = np.uint64(names[-1] if names else 0)
    names += (powers * (before + np.cumsum(blocks * inverses))).tolist()
    return names


@cache
def _odd(size: int) -> NDArray[np.uint64]:
    rng = Random(size)
    # Odd numbers are invertible modulo 2^64, so no bit of a token is lost.
    return np.array([rng.getrandbits(64) | 1 for _ in range(size)], np.uint64)


class FastWorker:
    """Has the interface of `LivingWorker`, for the model `linear` without terms of context."""

    def __init__(
        self,
        settings: WorkerSettings,
        publish: Callable[[Sequence[CacheEvent]], None],
        clock: Callable[[], float],
        connect: Connect | None = None,
    ) -> None:
        self._sim, self._limits = settings.sim, settings.limits
        self._overlaps = settings.overlaps
        self._size, self._capacity = settings.cache.block_size, settings.cache.num_blocks
        self.cache = BlockCache(publish if settings.cache.record_events else None)
        self._now = clock
        self._kv = None if connect is None else connect(self._pace, self._arrived)
        self._fetching: list[_Sequence] = []
        self._waiting: deque[_Sequence] = deque()
        self._prefilling: list[_Sequence] = []
        self._computing: set[int] = set()
        self._decoding: list[tuple[int, int, _Sequence]] = []  # a heap by the last step
        self._number = self._step = self._logged = 0  # `_logged`: the step that begins the log
        self._seen = 0  # the last request that had arrived when the last step began
        self._log = array("d")
        self._private = 0.0  # blocks that belong to one sequence
        self._timer: asyncio.TimerHandle | None = None
        self._begun, self._length, self._steps = 0.0, 0.0, 0
        self._chunks: list[tuple[_Sequence, int]] = []
        self._slowness = 1.0
        self.is_dead = False

    @property
    def slowness(self) -> float:
        """A factor on the time of steps, from the step after the current one."""
        return self._slowness

    @slowness.setter
    def slowness(self, factor: float) -> None:
        self._slowness = factor
        if self._steps > 1:
            self._shorten()

    @property
    def stats(self) -> EngineStats:
        used = self.cache.num_referenced + self._private
        if self._timer is not None and self._length:
            used += (self._now() - self._begun) / self._length * len(self._decoding) / self._size
        running = len(self._decoding) + len(self._prefilling)
        waiting = len(self._waiting) + len(self._fetching)
        return EngineStats(running, waiting, min(1.0, used / self._capacity))

    @property
    def num_requests(self) -> int:
        waiting = len(self._waiting) + len(self._fetching)
        return waiting + len(self._prefilling) + len(self._decoding)

    async def run(self) -> None: ...

    async def serve(
        self,
        request_id: str,
        prompt: list[int],
        num_output: int,
        first: Callable[[], None],
        kv_source: KvSource | None = None,
        keeps_kv: bool = False,
    ) -> Answered:
        """Compute the whole answer; call `first` at its first token. Raises `WorkerGoneError`."""
        del request_id
        if self.is_dead:
            raise WorkerGoneError
        done: asyncio.Future[Answered] = asyncio.get_running_loop().create_future()
        names = chain(prompt, self._size, [], len(prompt) // self._size)
        one = _Sequence(0, prompt, num_output, first, done, names, keeps_kv=keeps_kv)
        if kv_source is None or not self._fetches(one, kv_source):
            self._wait(one)
        return await done

    def _wait(self, one: _Sequence) -> None:
        self._number += 1
        one.number = self._number
        self._waiting.append(one)
        if self._timer is None:
            self._begin()
        elif self._steps > 1 and len(self._decoding) < self._limits.max_num_seqs:
            self._shorten()

    # KV of other workers

    def _fetches(self, one: _Sequence, source: KvSource) -> bool:
        """Begin to fetch KV if that saves computing a block; return whether it does."""
        if self._kv is None:
            return False
        end = min(source.num_tokens, len(one.prompt) - 1)
        start = self.cache.match(one.hashes, (len(one.prompt) - 1) // self._size) * self._size
        if end - start < self._size:
            # Nothing to fetch: release it at its holder.
            self._kv.pull(source, b"", source.num_tokens)
            return False
        one.pull = self._kv.pull(source, b"", start)
        self._fetching.append(one)
        return True

    def _arrived(self) -> None:
        for one in [one for one in self._fetching if one.pull is not None and one.pull.done]:
            self._fetching.remove(one)
            self._wait(one)

    def _pace(self, num_tokens: int) -> float:
        return transfer_seconds(self._sim, num_tokens)

    def _offer(self, one: _Sequence) -> KvSource | None:
        if self._kv is None or not one.keeps_kv:
            return None
        data = memoryview(bytes(TOKEN_BYTES * len(one.prompt)))
        offer = self._kv.keep(f"{one.number}", b"", data, ())
        return None if offer is None else offer.source

    def die(self) -> None:
        self.is_dead = True
        if self._timer is not None:
            self._timer.cancel()
        waiting, self._fetching = [*self._fetching, *self._waiting], []
        if self._kv is not None:
            self._kv.close()
        for one in (*waiting, *self._prefilling, *(one for *_, one in self._decoding)):
            if one.pull is not None:
                one.pull.close()
            if not one.done.done():
                one.done.set_exception(WorkerGoneError())
        self._waiting.clear()
        self._prefilling, self._decoding = [], []

    def check_integrity(self) -> None:
        """Raise `AssertionError` if counters are wrong; to be called between steps."""
        begun = [*self._prefilling, *(one for *_, one in self._decoding)]
        if self.cache.references != sum(one.held for one in begun):
            raise AssertionError("references to blocks do not add up")
        own = sum(self._own_blocks(one) for one in begun)
        if abs(own - self._private) > 1e-6 * (1 + own):
            raise AssertionError(f"{self._private} blocks of their own are counted, {own} are used")

    # Steps

    def _begin(self) -> None:
        self._make_room()
        # With overlap, this step was scheduled when the one before it began.
        is_scheduled = self._overlaps and (self._decoding or self._prefilling)
        until = self._seen if is_scheduled else self._number
        self._seen = self._number
        self._chunks = self._schedule(until)
        decoding = len(self._decoding)
        if not decoding and not self._chunks:
            self._timer = None
            return
        sim = self._sim
        seconds = sim.step_overhead_seconds
        seconds += sum(count for _, count in self._chunks) / sim.prefill_tokens_per_second
        if decoding:
            seconds += sim.decode_base_seconds + decoding * sim.decode_per_sequence_seconds
        self._length = seconds * sim.time_scale * self._slowness
        self._steps = 1
        if not self._chunks:
            room = self._capacity - self.cache.num_referenced - self._private
            until_full = max(1, int(room * self._size / decoding))
            self._steps = min(self._decoding[0][0] - self._step, until_full)
            if self._waiting and self._waiting[-1].number > until:
                self._steps = 1
        self._begun = self._now()
        self._set_timer()

    def _shorten(self) -> None:
        passed = int((self._now() - self._begun) / self._length) + 1 if self._length else 1
        if passed < self._steps and self._timer is not None:
            self._steps = passed
            self._timer.cancel()
            self._set_timer()

    def _set_timer(self) -> None:
        at = self._begun + self._steps * self._length
        self._timer = asyncio.get_running_loop().call_at(at, self._end)

    def _end(self) -> None:
        steps, now = self._steps, self._now()
        self._step += steps
        self._log.extend(array("d", [self._length]) * steps)
        self._private += steps * len(self._decoding) / self._size
        while self._decoding and self._decoding[0][0] <= self._step:
            self._finish(heappop(self._decoding)[2])
        for one, count in self._chunks:
            one.prefill_left -= count
            if not one.prefill_left:
                self._prefilling.remove(one)
                self._first(one, now)
        self.cache.flush()
        if len(self._log) > _LOG_STEPS:
            begun = (one.since for *_, one in self._decoding if one.since is not None)
            oldest = min(begun, default=self._step)
            del self._log[: oldest - self._logged]
            self._logged = oldest
        self._begin()

    def _first(self, one: _Sequence, now: float) -> None:
        fresh = one.hashes[one.held :]
        self._computing.difference_update(fresh)
        self.cache.stored(one.prompt, one.hashes, one.held, self._size)
        self.cache.refer(fresh)
        self._private -= len(fresh)
        one.held = len(one.hashes)
        if one.num_generated:
            one.gaps.append(now - one.last_at)
        else:
            one.first()
        one.num_generated += 1
        self._private += 1 / self._size
        one.since, one.last_at = self._step, now
        if one.num_generated >= one.num_output:
            self._finish(one)
        else:
            heappush(
                self._decoding, (self._step + one.num_output - one.num_generated, one.number, one)
            )

    def _finish(self, one: _Sequence) -> None:
        self._leave(one)
        at = one.number * 7919 % _RING_TOKENS
        answer = _RING[at : at + one.num_output].tolist()
        tokens = one.prompt + answer
        held = len(one.hashes)
        names = chain(tokens, self._size, one.hashes, (len(tokens) - 1) // self._size)
        self.cache.stored(tokens, names, held, self._size)
        self.cache.add_free(names[held:])
        self.cache.evict(self._capacity - self.cache.num_referenced - self._private)
        if not one.done.done():
            offer = self._offer(one)
            one.done.set_result(Answered(one.num_cached or 0, answer, one.gaps, offer))

    def _leave(self, one: _Sequence) -> None:
        since = self._step if one.since is None else one.since
        first = since - self._logged
        one.gaps.extend(self._log[first : self._step - self._logged])
        one.num_generated += self._step - since
        one.since, one.last_at = None, self._now()
        self._private -= self._own_blocks(one)
        self.cache.release(one.hashes[: one.held])

    def _own_blocks(self, one: _Sequence) -> float:
        num_generated = one.num_generated + (self._step - one.since if one.since is not None else 0)
        return _LAST_BLOCK + (len(one.prompt) + num_generated) / self._size - one.held

    # Admission

    def _make_room(self) -> None:
        while len(self._decoding) > 1:
            needed = len(self._decoding) / self._size
            if self.cache.num_referenced + self._private + needed <= self._capacity:
                break
            at = max(range(len(self._decoding)), key=lambda index: self._decoding[index][1])
            one = self._decoding.pop(at)[2]
            heapify(self._decoding)
            self._leave(one)
            self._waiting.appendleft(one)
        self.cache.evict(self._capacity - self.cache.num_referenced - self._private)

    def _schedule(self, until: int) -> list[tuple[_Sequence, int]]:
        budget = self._limits.max_num_batched_tokens - len(self._decoding)
        chunks: list[tuple[_Sequence, int]] = []
        for one in self._prefilling:
            count = min(budget, one.prefill_left)
            if count <= 0:
                break
            chunks.append((one, count))
            budget -= count
        bypassed: list[_Sequence] = []
        while self._waiting and budget > 0:
            running = len(self._decoding) + len(self._prefilling)
            if running >= self._limits.max_num_seqs or len(bypassed) > self._limits.max_bypasses:
                break
            if self._waiting[0].number > until:
                break
            one = self._waiting.popleft()
            if not self._admit(one):
                bypassed.append(one)
                continue
            count = min(budget, one.prefill_left)
            chunks.append((one, count))
            budget -= count
        self._waiting.extendleft(reversed(bypassed))
        return chunks

    def _admit(self, one: _Sequence) -> bool:
        num_tokens = len(one.prompt) + one.num_generated
        # The last token is computed in any case: the next one is drawn from its result.
        matched = self.cache.match(one.hashes, (num_tokens - 1) // self._size)
        part = None if one.pull is None else one.pull.part
        known = matched * self._size
        if part is not None and part.start <= known:
            known = max(known, min(part.end, num_tokens - 1))
        # Another prompt computes its next block, which will be a hit then.
        elif matched < len(one.hashes) and one.hashes[matched] in self._computing:
            return False
        total = math.ceil(num_tokens / self._size)
        referenced = self.cache.num_referenced
        self.cache.refer(one.hashes[:matched])
        free = self._capacity - self.cache.num_referenced - self._private
        # An empty worker admits any prompt; sums of fractions are not exactly 0.
        if total - matched > free and (referenced or self._private > 0.5):
            self.cache.release(one.hashes[:matched])
            return False
        one.held = matched
        if one.num_cached is None:
            one.num_cached = known
        one.prefill_left = num_tokens - known
        one.pull = None
        self._private += _LAST_BLOCK + num_tokens / self._size - matched
        self._computing.update(one.hashes[matched:])
        self._prefilling.append(one)
        self.cache.evict(self._capacity - self.cache.num_referenced - self._private)
        return True


def is_linear(settings: WorkerSettings) -> bool:
    """Check if a `FastWorker` models everything that decides the step times of this worker."""
    sim = settings.sim
    return sim.latency_model == "linear" and not (
        sim.prefill_context_seconds or sim.kv_read_seconds
    )
