"""A disk of blocks without threads, whose every operation takes as long as a test says."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.support.worker.moving_kv import MadeUpPull
from worker.kv.disk import Found, Left, Lost, StoredBlock, Written
from worker.types import KvPart


@dataclass
class MadeUpDisk:
    """Implements `tiers.Disk`. `writes` and `reads` give the outcomes of operations in turn; a read
    takes `looks` looks. It checks that a block does not change while it is written.
    """

    files: dict[bytes, tuple[bytes, bytes]] = field(default_factory=dict)  # facts, data
    writes: Sequence[bool] = (True,)
    reads: Sequence[bool] = (True,)
    looks: int = 0
    delay: int = 0  # looks until a write is reported
    is_stuck: bool = False
    bytes_written: int = 0
    bytes_read: int = 0
    num_failures: int = 0
    num_writes: int = 0
    pulls: list[MadeUpPull] = field(default_factory=list)
    reports: list[Written | Found | Lost | Left] = field(default_factory=list)
    queue: list[tuple[int, int, StoredBlock, memoryview, bytes, int]] = field(default_factory=list)
    unwanted: list[tuple[int, int, StoredBlock, memoryview, bytes, int]] = field(
        default_factory=list
    )  # what is being written and is to be deleted then
    now: int = 0

    def __post_init__(self) -> None:
        self.reports.append(Found(tuple(facts for facts, _ in self.files.values())))

    def write(self, slot: int, block: StoredBlock, data: memoryview, generation: int) -> None:
        due = self.now + self.delay
        self.queue.append((due, slot, block, data, bytes(data), generation))

    def read(self, blocks: Sequence[StoredBlock], start: int, end: int) -> MadeUpPull:
        found = b""
        for block in blocks:
            facts, data = self.files.get(block.digest, (b"", b""))
            if facts != block.facts or not self.reads[len(self.pulls) % len(self.reads)]:
                self.files.pop(block.digest, None)
                self.reports.append(Lost(block.digest))
                self.num_failures += 1
                break
            found += data
        size = (end - start) // len(blocks)
        num_right = len(found) // len(data) if found else 0
        part = KvPart(start, start + num_right * size, memoryview(found)) if found else None
        self.pulls.append(MadeUpPull(self.looks, part))
        return self.pulls[-1]

    def delete(self, digests: Sequence[bytes]) -> None:
        for digest in digests:
            self.files.pop(digest, None)
            self.unwanted += [one for one in self.queue if one[2].digest == digest]

    def take_reports(self) -> list[Written | Found | Lost | Left]:
        self.now += 1
        while self.queue and self.queue[0][0] <= self.now:
            _, slot, block, data, before, generation = self.queue.pop(0)
            assert bytes(data) == before
            is_there = self.writes[self.num_writes % len(self.writes)]
            self.num_writes += 1
            if is_there and not any(one[3] is data for one in self.unwanted):
                self.files[block.digest] = (block.facts, before)
            self.reports.append(Written(slot, is_there, generation))
        reports, self.reports = self.reports, []
        return reports

    def close(self) -> None: ...
