"""Tiers below the device: what the prefix cache evicts goes to host memory, and from there to disk.

The host tier is a number of slots, each the size of a block. The step that takes an evicted block
copies it to a slot first (`save`); the step that admits a waiting sequence loads the slots that
continue its prefix. So no step waits, and within a step saves are read before loads are written; a
slot that a step loads is held until that step is scheduled.

When few slots are free, a thread writes the coldest to disk; meanwhile they are held, and can still
be hit. A slot is written to disk only after a step later than the one that fills it has ended: by
then its bytes are there, on any device. Blocks that cannot be read in time are computed. KV of
adapters stays off the disk: the files behind an adapter's name may have changed by the next start.
"""

import itertools
import logging
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from typing import Protocol

import msgspec

from worker.engine.cache.block_hash import BlockHash, key_of
from worker.engine.cache.block_manager import Evicted
from worker.engine.cache.cache_events import CPU, STORAGE, BlockRemoved, BlocksStored, CacheEvent
from worker.engine.cache.free_queue import FreeQueue
from worker.engine.cache.segmented_queue import NUM_LEVELS, SegmentedQueue
from worker.errors import IntegrityError
from worker.kv.disk import Found, Left, Lost, StoredBlock, Written
from worker.kv.pull import Pull
from worker.types import KvSave, TierStats

logger = logging.getLogger(__name__)

# One of this number of host slots stays free: others are written to disk.
_FREE_SHARE = 8


_Facts = tuple[bytes, bytes, tuple[int, ...], tuple[tuple[str, ...], ...] | None]
_decoder = msgspec.msgpack.Decoder(_Facts)


class Disk(Protocol):
    """Files of blocks, written and read by threads; see `worker.kv.disk`. Nothing here blocks."""

    bytes_written: int
    bytes_read: int
    num_failures: int

    @property
    def is_stuck(self) -> bool: ...

    def write(self, slot: int, block: StoredBlock, data: memoryview, generation: int) -> None: ...

    def read(self, blocks: Seq[StoredBlock], start: int, end: int) -> Pull: ...

    def delete(self, digests: Seq[bytes]) -> None: ...

    def take_reports(self) -> Seq[Written | Found | Lost | Left]: ...

    def close(self) -> None: ...


class _Tier:
    """Sole owner of the contents of some slots, of their order and of the events about them."""

    def __init__(
        self, num_slots: int, policy: str, medium: str, record: Callable[[CacheEvent], None]
    ) -> None:
        self.num_slots = num_slots
        self._policy = policy
        self._medium = medium
        self._record = record
        self.clear()

    def clear(self) -> None:
        """Forget everything, without an event."""
        self.order: FreeQueue | SegmentedQueue
        if self._policy in NUM_LEVELS:
            self.order = SegmentedQueue(self.num_slots, self._policy)
        else:
            self.order = FreeQueue(self.num_slots, fair=self._policy == "tenant")
        self.slots: dict[bytes, int] = {}
        self.contents: dict[int, BlockHash] = {}
        self.tenants: dict[int, str] = {}

    def find(self, content: BlockHash) -> int | None:
        """Return the slot of a content; whole contents are compared, as digests are not trusted."""
        slot = self.slots.get(content.digest)
        return slot if slot is not None and self.contents[slot] == content else None

    def take(self, tenant: str) -> tuple[int | None, BlockHash | None]:
        """Hold a slot from now on; return it and the content evicted for it, if one is free."""
        if not len(self.order):
            return None, None
        slot = self.order.take(tenant)
        loser = self.forget(slot)
        self.tenants[slot] = tenant
        return slot, loser

    def put(self, slot: int, content: BlockHash, is_first: bool) -> None:
        self.slots[content.digest] = slot
        self.contents[slot] = content
        self._record(self._event(content, is_first))

    def forget(self, slot: int) -> BlockHash | None:
        """Remove the content of a slot and return it; the order does not change."""
        content = self.contents.pop(slot, None)
        if content is not None:
            del self.slots[content.digest]
            self._record(BlockRemoved(content.digest, self._medium))
        return content

    def check_integrity(self, held: set[int]) -> None:
        if {self.slots[c.digest]: c for c in self.contents.values()} != self.contents:
            raise IntegrityError(f"names and contents of tier {self._medium} differ")
        if len(self.order) != self.num_slots - len(held):
            raise IntegrityError(f"tier {self._medium} miscounts its idle slots")
        if self.order.num_empty != self.num_slots - len(held | self.contents.keys()):
            raise IntegrityError(f"tier {self._medium} miscounts its empty slots")

    def events(self, root: bytes) -> dict[bytes, tuple[BlockHash, CacheEvent]]:
        return {c.digest: (c, self._event(c, c.parent == root)) for c in self.contents.values()}

    def _event(self, content: BlockHash, is_first: bool) -> BlocksStored:
        return BlocksStored((content,), None if is_first else content.parent, self._medium)


class Tiers:
    """Decides what is saved, loaded, written and read, and owns the host's memory: slots of
    `block_bytes` each. `root` is the parent of first blocks, `record` receives events,
    `num_on_disk` is the capacity of `disk` in blocks. Pure: no clock, and no I/O but the disk's.
    """

    def __init__(
        self,
        memory: memoryview,
        block_bytes: int,
        root: bytes,
        policy: str,
        record: Callable[[CacheEvent], None],
        disk: Disk | None = None,
        num_on_disk: int = 0,
    ) -> None:
        self._memory = memory
        self._block_bytes = block_bytes
        self._root = root
        self._host = _Tier(memory.nbytes // block_bytes, policy, CPU, record)
        self._on_disk = _Tier(num_on_disk, policy, STORAGE, record)
        self._disk = disk
        self._saved_by: dict[int, int] = {}  # slot → the step that fills it
        self._loading: dict[int, None] = {}  # slots that the step being scheduled loads
        self._writing: dict[int, int | None] = {}  # slot → its place on disk
        self._last_ended = 0
        self._most_saved = 1  # by one step
        self._generation = 0
        self._bytes_saved = 0
        self._bytes_loaded = 0
        self._num_skipped = 0  # blocks that were not saved, as all slots were held

    # ---- look-ups and loads -----------------------------------------------------------------

    def find(self, chain: Iterable[BlockHash]) -> tuple[int, ...]:
        """Return the host's slots that hold the longest possible beginning of `chain`."""
        slots = []
        for content in chain:
            slot = self._host.find(content)
            if slot is None:
                break
            slots.append(slot)
        return tuple(slots)

    def peek(self, chain: Iterable[BlockHash]) -> list[memoryview]:
        """Return the longest beginning of `chain` in host memory; it is valid in this step."""
        slots = self.find(chain)
        there = itertools.takewhile(lambda slot: self._saved_by[slot] < self._last_ended, slots)
        return [self._view(slot) for slot in there]

    def is_on_disk(self, content: BlockHash) -> bool:
        return self._disk is not None and self._on_disk.find(content) is not None

    def load(self, slots: Seq[int]) -> list[memoryview]:
        """Load slots in the step that is being scheduled; return the memory that the step reads."""
        for slot in reversed(slots):  # the tail of the chain gives way first
            if slot not in self._loading and slot not in self._writing:
                self._host.order.touch(slot)
                self._host.order.remove(slot)
                self._loading[slot] = None
        self._bytes_loaded += len(slots) * self._block_bytes
        return [self._view(slot) for slot in slots]

    def read(self, chain: Iterable[BlockHash], first: int, block_tokens: int) -> Pull | None:
        """Start reading the longest leading part of `chain` that is on disk; `first` other blocks
        precede it.
        """
        if self._disk is None or self._disk.is_stuck:
            return None
        found = list(itertools.takewhile(self.is_on_disk, chain))
        for content in reversed(found):
            self._on_disk.order.touch(self._on_disk.slots[content.digest])
        if not found:
            return None
        start = first * block_tokens
        end = start + len(found) * block_tokens
        return self._disk.read([_file_of(content) for content in found], start, end)

    # ---- steps ------------------------------------------------------------------------------

    def save(self, evicted: Seq[Evicted], step: int) -> tuple[KvSave, ...]:
        """Return the saves of the step being scheduled: evicted contents and their slots."""
        host = self._host
        blocks: list[int] = []
        slots: list[int] = []
        for one in reversed(evicted):  # parents first: who hears of a block must know its parent
            slot = host.slots.get(one.content.digest)
            if slot is not None:
                if slot not in self._loading and slot not in self._writing and slot not in slots:
                    host.order.touch(slot)
                continue
            slot, _ = host.take(one.tenant)
            if slot is None:
                self._num_skipped += 1
                continue
            host.put(slot, one.content, one.content.parent == self._root)
            self._saved_by[slot] = step
            blocks.append(one.block)
            slots.append(slot)
        # Of what is evicted together, the end of a chain is evicted again first.
        for slot in (*reversed(slots), *self._loading):
            host.order.put_cached(slot)
        self._loading.clear()
        self._most_saved = max(self._most_saved, len(slots))
        self._bytes_saved += len(slots) * self._block_bytes
        if self._disk is not None:
            self._write_out(self._disk)
        return (KvSave(tuple(blocks), tuple(map(self._view, slots))),) if slots else ()

    def ended(self, step: int) -> None:
        self._last_ended = step

    def look(self) -> None:
        """Process what the disk's threads have done. Not while a step is being scheduled."""
        for report in [] if self._disk is None else self._disk.take_reports():
            if isinstance(report, Written):
                self._written(report)
            elif isinstance(report, Found):
                self._found([_content(facts) for facts in report.facts])
            elif isinstance(report, Lost):
                self._lost(report.digest)
            else:
                self._left(report)

    def reset(self) -> None:
        """Forget everything, on disk too. Call `announce` once the loss was reported."""
        if self._disk is not None:
            writing = (self._host.contents.get(slot) for slot in self._writing)
            gone = [*self._on_disk.contents.values(), *(c for c in writing if c is not None)]
            self._disk.delete([content.digest for content in gone])
        self._forget()

    def leave_disk(self) -> None:
        """Forget everything, and use the disk no more: the model may change."""
        if self._disk is not None:
            self._disk.close()
            self.look()
            self._disk = None
        self._forget()

    def announce(self) -> list[CacheEvent]:
        """Return events that report every content of the tiers, parents before children."""
        events: dict[bytes, list[CacheEvent]] = {}
        contents: dict[bytes, BlockHash] = {}
        for tier in (self._host, self._on_disk):
            for digest, (content, event) in tier.events(self._root).items():
                contents[digest] = content
                events.setdefault(digest, []).append(event)
        ordered = _parents_first(contents.values())
        return [event for content in ordered for event in events[content.digest]]

    def close(self) -> None:
        if self._disk is not None:
            self._disk.close()

    @property
    def totals(self) -> tuple[int, ...]:
        return len(self._on_disk.contents), *self._disk_counts()

    def stats(self) -> TierStats:
        written, read, failures = self._disk_counts()
        return TierStats(
            host_blocks=len(self._host.contents),
            host_usage=len(self._host.contents) / self._host.num_slots,
            host_bytes_saved=self._bytes_saved,
            host_bytes_loaded=self._bytes_loaded,
            num_host_saves_skipped=self._num_skipped,
            disk_blocks=len(self._on_disk.contents),
            disk_bytes_written=written,
            disk_bytes_read=read,
            num_disk_failures=failures,
        )

    def check_integrity(self) -> None:
        places = {place for place in self._writing.values() if place is not None}
        self._host.check_integrity({*self._loading, *self._writing})
        self._on_disk.check_integrity(places)
        if any(slot not in self._saved_by for slot in self._host.contents):
            raise IntegrityError("a slot holds what no step has saved")

    # ---- within -----------------------------------------------------------------------------

    def _disk_counts(self) -> tuple[int, int, int]:
        if self._disk is None:
            return 0, 0, 0
        return self._disk.bytes_written, self._disk.bytes_read, self._disk.num_failures

    def _view(self, slot: int) -> memoryview:
        return self._memory[slot * self._block_bytes : (slot + 1) * self._block_bytes]

    def _write_out(self, disk: Disk) -> None:
        """Have the coldest slots written, until enough are free or about to be."""
        host = self._host
        wanted = min(max(host.num_slots // _FREE_SHARE, self._most_saved), host.num_slots // 2)
        while host.order.num_empty + len(self._writing) < wanted:
            slot = host.order.coldest()
            # The bytes of a save are there, on any device, when the step after it has ended.
            if slot is None or self._saved_by[slot] >= self._last_ended:
                return
            content = host.contents[slot]
            place = None
            is_adapters = key_of(content.extra, "lora") is not None
            if content.digest not in self._on_disk.slots and not is_adapters:
                place, loser = self._on_disk.take(host.tenants[slot])
                if loser is not None:
                    disk.delete([loser.digest])
            if place is None:  # it is there already, or cannot be
                host.forget(slot)
                host.order.empty(slot)
                continue
            host.order.remove(slot)
            self._writing[slot] = place
            disk.write(slot, _file_of(content), self._view(slot), self._generation)

    def _written(self, report: Written) -> None:
        place = self._writing.pop(report.slot)
        self._host.order.put_empty(report.slot)
        # The content was forgotten while it was written.
        if report.generation != self._generation or place is None:
            return
        content = self._host.contents[report.slot]
        if report.is_there:
            self._on_disk.put(place, content, content.parent == self._root)
            self._on_disk.order.put_cached(place)
        else:
            self._on_disk.order.put_empty(place)
        self._host.forget(report.slot)

    def _found(self, contents: Seq[BlockHash]) -> None:
        # What the scan of the start reports after a reset no longer counts.
        num_places = 0 if self._generation else len(self._on_disk.order)
        superfluous = contents[: max(0, len(contents) - num_places)]
        if superfluous and self._disk is not None:
            self._disk.delete([content.digest for content in superfluous])
        rest = contents[len(superfluous) :]
        places = {}
        for content in _parents_first(rest):
            if content.digest not in self._on_disk.slots:
                place, _ = self._on_disk.take("")
                if place is not None:
                    self._on_disk.put(place, content, content.parent == self._root)
                    places[content.digest] = place
        for content in rest:
            if content.digest in places:
                self._on_disk.order.put_cached(places[content.digest])

    def _left(self, report: Left) -> None:
        gone = [digest for digest in self._on_disk.slots if digest.hex() not in report.names]
        for digest in gone:
            self._lost(digest)
        if gone:
            logger.warning("%d blocks of KV were deleted from disk, not by this worker", len(gone))

    def _lost(self, digest: bytes) -> None:
        place = self._on_disk.slots.get(digest)
        if place is not None:
            self._on_disk.forget(place)
            self._on_disk.order.empty(place)

    def _forget(self) -> None:
        self._generation += 1
        self._host.clear()
        self._on_disk.clear()
        self._saved_by.clear()
        self._loading.clear()
        # The disk's thread still reads these slots.
        if self._writing:
            self._hold_again()

    def _hold_again(self) -> None:
        taken = [self._host.order.take("") for _ in range(self._host.num_slots)]
        for slot in reversed(taken):
            if slot not in self._writing:
                self._host.order.put_empty(slot)
        self._writing = dict.fromkeys(self._writing)


def _parents_first(contents: Iterable[BlockHash]) -> list[BlockHash]:
    waiting: dict[bytes, list[BlockHash]] = {}
    known = {content.digest: content for content in contents}
    for content in known.values():
        waiting.setdefault(content.parent, []).append(content)
    ordered = []
    ready = [content for content in known.values() if content.parent not in known]
    while ready:
        content = ready.pop()
        ordered.append(content)
        ready += waiting.get(content.digest, [])
    return ordered


def _file_of(content: BlockHash) -> StoredBlock:
    facts: _Facts = (content.digest, content.parent, content.token_ids, content.extra)
    return StoredBlock(content.digest, msgspec.msgpack.encode(facts))


def _content(facts: bytes) -> BlockHash:
    return BlockHash(*_decoder.decode(facts))
