"""Blocks of KV in files: a directory of one engine's own, written and read by threads.

Each block has a file, named by the block's digest: MAGIC, lengths of facts and data, checksums of
facts and of both, facts (what the block is of, compared to the byte), data (its KV). It is written
under another name and renamed; checksums detect what a crash of the machine leaves. An invalid file
is deleted and reported as lost. The directory belongs to a model, its format and the seed of its
hashes (`identity`); each engine with the same identity locks a directory of its own. When a file or
the directory turns out to be gone, a directory is taken again, and what is left is reported.

One thread writes and deletes, in order; another reads. The engine never waits for them: a read that
is not done in time has failed, and while the thread hangs no other should be begun (`is_stuck`).
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import queue
import struct
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from io import FileIO
from pathlib import Path

from xxhash import xxh3_128, xxh3_128_digest

from worker.errors import ConfigError, KvTransferError
from worker.types import KvPart

logger = logging.getLogger(__name__)

READ_SECONDS = 5.0
_MARGIN_SECONDS = 0.5  # in which what was read is handed over
MAX_INBOUND_BYTES = 1 << 30
_MAX_ENGINES = 64
_CLOSE_SECONDS = 2.0
_MAGIC = b"PTSMKV2\n"
_PREFIX = struct.Struct("<8sIQ16s16s")
_MAX_FACTS_BYTES = 1 << 24
# What failed, as it is logged.
_LIST = "KV on disk cannot be listed"
_WRITE = "KV cannot be written to disk"
_READ = "KV on disk cannot be read"
_DELETE = "KV cannot be deleted from disk"
_PROBE_BYTES = 1 << 16
_GONE = (FileNotFoundError, NotADirectoryError)
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True, slots=True)
class StoredBlock:
    digest: bytes
    facts: bytes


@dataclass(frozen=True, slots=True)
class Written:
    """A write has ended: the block is on disk now, or could not be written."""

    slot: int
    is_there: bool
    generation: int


@dataclass(frozen=True, slots=True)
class Found:
    """The facts of the blocks that were on disk at the start, the least recently used first."""

    facts: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Lost:
    """A block that could not be read, or was invalid, and is on disk no more."""

    digest: bytes


@dataclass(frozen=True, slots=True)
class Left:
    """Files were deleted by others: the digests, in hexadecimal, of all files that are left."""

    names: frozenset[str]


class DiskRead:
    """A read of blocks that follow each other. Any thread may use `done`, `part` and `close`."""

    def __init__(
        self, disk: BlockFiles, blocks: Sequence[StoredBlock], start: int, end: int, until: float
    ) -> None:
        self._disk = disk
        self.blocks = blocks
        self.start = start
        self.end = end
        self.until_seconds = until
        self.num_reserved_bytes = 0  # the disk's
        self.is_finished = False
        self.is_closed = False
        self.part: KvPart | None = None  # once done; None: it failed

    @property
    def done(self) -> bool:
        return self.is_finished or self._disk.is_late(self)

    def close(self) -> None:
        self._disk.release(self)


class BlockFiles:
    """Owns a directory and its two threads. Blocks have `block_bytes` of data each. Raises
    ConfigError where files cannot be made in `parent`.
    """

    def __init__(
        self,
        parent: Path,
        identity: str,
        block_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._block_bytes = block_bytes
        self._clock = clock
        self._reports: deque[Written | Found | Lost | Left] = deque()
        self._inbound = threading.Condition()
        self._num_inbound_bytes = 0
        self._reading_since: float | None = None
        self._is_closed = False
        self._logged: set[str] = set()  # failures since the last success, each logged once
        self.bytes_written = 0
        self.bytes_read = 0
        self.num_failures = 0
        self._claim = partial(_claim, parent, identity)
        self.directory, self._lock = self._claim()
        self._writes: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._reads: queue.SimpleQueue[DiskRead | None] = queue.SimpleQueue()
        self._writes.put(self._scan)
        self._threads = [
            threading.Thread(target=self._run_writes, name="kv-disk-write", daemon=True),
            threading.Thread(target=self._run_reads, name="kv-disk-read", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    # ---- any thread -------------------------------------------------------------------------

    @property
    def is_stuck(self) -> bool:
        """True if a read takes so long that others should not be begun."""
        since = self._reading_since
        return since is not None and self._clock() - since > READ_SECONDS

    def is_late(self, read: DiskRead) -> bool:
        return self._clock() >= read.until_seconds

    def write(self, slot: int, block: StoredBlock, data: memoryview, generation: int) -> None:
        """Begin to write a block; `data` must not change until this is reported."""
        self._writes.put(lambda: self._write(slot, block, data, generation))

    def delete(self, digests: Sequence[bytes]) -> None:
        """Delete files, once earlier writes are done."""
        self._writes.put(lambda: self._delete(digests))

    def read(self, blocks: Sequence[StoredBlock], start: int, end: int) -> DiskRead:
        """Begin to read blocks that hold the tokens `start` to `end` − 1."""
        most = max(1, MAX_INBOUND_BYTES // self._block_bytes)
        if len(blocks) > most:
            end = start + (end - start) // len(blocks) * most
            blocks = blocks[:most]
        read = DiskRead(self, blocks, start, end, self._clock() + READ_SECONDS)
        self._reads.put(read)
        return read

    def release(self, read: DiskRead) -> None:
        with self._inbound:
            if read.is_closed:
                return
            read.is_closed = True
            if read.is_finished:
                self._give_back(read)
            elif self.is_late(read):
                self.num_failures += 1

    def take_reports(self) -> list[Written | Found | Lost | Left]:
        return [self._reports.popleft() for _ in range(len(self._reports))]

    def close(self) -> None:
        """End the threads and drop what was to be written (which is reported) or read. A hanging
        disk's threads are left behind. Idempotent.
        """
        if not self._is_closed:
            self._is_closed = True
            self._writes.put(None)
            self._reads.put(None)
            with self._inbound:
                self._inbound.notify_all()
            for thread in self._threads:
                thread.join(_CLOSE_SECONDS)
            self._lock.close()

    # ---- the writing thread -----------------------------------------------------------------

    def _run_writes(self) -> None:
        while (work := self._writes.get()) is not None:
            work()

    def _scan(self) -> None:
        found = []
        try:
            for entry in os.scandir(self.directory):
                if entry.name.endswith(".kv"):
                    if (facts := self._facts(entry.path)) is not None:
                        found.append((entry.stat().st_mtime, facts))
                elif entry.name.endswith(".tmp"):
                    # A crash interrupted the write of this block.
                    os.unlink(entry.path)
        except OSError as error:
            self._failed(_LIST, error)
        self._reports.append(Found(tuple(facts for _, facts in sorted(found))))

    def _facts(self, path: str) -> bytes | None:
        """Return the facts of a file that looks valid; delete any other file."""
        try:
            with open(path, "rb", buffering=0) as file:
                facts, _ = self._head(file.fileno())
                return facts
        except (OSError, KvTransferError) as error:
            self._failed(_READ, error, path)
            self._unlink(path)
            return None

    def _write(self, slot: int, block: StoredBlock, data: memoryview, generation: int) -> None:
        if self._is_closed:
            self._reports.append(Written(slot, False, generation))
            return
        is_there = False
        try:
            short, whole = _checksums(block.facts, data)
            prefix = _PREFIX.pack(_MAGIC, len(block.facts), data.nbytes, short, whole)
            try:
                self._put(block.digest, prefix + block.facts, data)
            except _GONE:
                self._look_again()
                self._put(block.digest, prefix + block.facts, data)
            is_there = True
            self.bytes_written += data.nbytes
            self._logged.discard(_WRITE)
        except (OSError, MemoryError) as error:
            self._failed(_WRITE, error)
            self._unlink(f"{self._path(block.digest)}.tmp")
        self._reports.append(Written(slot, is_there, generation))

    def _put(self, digest: bytes, head: bytes, data: memoryview) -> None:
        path = self._path(digest)
        # KV reveals prompts: only the worker's own user may read it.
        descriptor = os.open(f"{path}.tmp", os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600)
        try:
            for piece in (head, data):
                rest = memoryview(piece)
                while rest:
                    rest = rest[os.write(descriptor, rest) :]
        finally:
            os.close(descriptor)
        os.replace(f"{path}.tmp", path)

    def _look_again(self) -> None:
        """Look again after others deleted files. The lock may have been one of these, so another
        engine may take the same directory: claim one anew.
        """
        names: list[str] = []
        try:
            if not (self._is_closed or os.fstat(self._lock.fileno()).st_nlink):
                old, gone = self._lock, self.directory
                self.directory, self._lock = self._claim()
                old.close()
                logger.warning("%s was deleted: evicted KV goes to %s", gone, self.directory)
            names = os.listdir(self.directory)
            self._logged.discard(_LIST)
        except (*_GONE, ConfigError) as error:
            self._failed(_LIST, error)
        except OSError as error:  # what is left may be seen another time
            self._failed(_LIST, error)
            return
        self._reports.append(Left(frozenset(name.removesuffix(".kv") for name in names)))

    def _delete(self, digests: Sequence[bytes]) -> None:
        for digest in digests:
            self._unlink(self._path(digest))

    def _unlink(self, path: str) -> None:
        try:
            os.unlink(path)
        except _GONE:
            pass
        except OSError as error:
            self._failed(_DELETE, error, path)

    # ---- the reading thread -----------------------------------------------------------------

    def _run_reads(self) -> None:
        while (read := self._reads.get()) is not None:
            if self._reserve(read):
                self._reading_since = self._clock()
                try:
                    part = self._read(read)
                except MemoryError as error:
                    self._failed(_READ, error)
                    part = None
                self._reading_since = None
                with self._inbound:
                    read.part = part
                    read.is_finished = True
                    if read.is_closed or part is None:
                        self._give_back(read)

    def _reserve(self, read: DiskRead) -> bool:
        """Wait for room for what is read; return False if it is not wanted any more."""
        size = len(read.blocks) * self._block_bytes
        with self._inbound:
            while not (self._is_closed or read.is_closed or self.is_late(read)):
                total = self._num_inbound_bytes + size
                # A block larger than the limit is read alone, not never.
                if total <= max(size, MAX_INBOUND_BYTES):
                    self._num_inbound_bytes += size
                    read.num_reserved_bytes = size
                    return True
                self._inbound.wait(max(0.0, read.until_seconds - self._clock()))
        return False

    def _give_back(self, read: DiskRead) -> None:
        read.part = None
        self._num_inbound_bytes -= read.num_reserved_bytes
        read.num_reserved_bytes = 0
        self._inbound.notify_all()

    def _read(self, read: DiskRead) -> KvPart | None:
        """Return the blocks up to the first damaged one."""
        size = self._block_bytes
        data = memoryview(bytearray(len(read.blocks) * size))
        num_read = 0
        for block in read.blocks:
            is_given_up = read.is_closed or self._clock() > read.until_seconds - _MARGIN_SECONDS
            if is_given_up or not self._read_file(block, data[num_read * size :][:size]):
                break
            num_read += 1
        self.bytes_read += num_read * size
        if not num_read:
            return None
        num_tokens = (read.end - read.start) // len(read.blocks) * num_read
        return KvPart(read.start, read.start + num_tokens, data[: num_read * size])

    def _read_file(self, block: StoredBlock, into: memoryview) -> bool:
        path = self._path(block.digest)
        try:
            with open(path, "rb", buffering=0) as file:
                facts, whole = self._head(file.fileno())
                if facts != block.facts:
                    raise KvTransferError("it is of other tokens")
                _fill(file.fileno(), into)
                if _checksums(facts, into)[1] != whole:
                    raise KvTransferError("its bytes are damaged")
            # The next start orders blocks by this time, the least recently used first.
            os.utime(path)
        except _GONE:
            with self._inbound:
                self.num_failures += 1
            # The writing thread owns the directory and its lock.
            self._writes.put(self._look_again)
            return False
        except (OSError, KvTransferError) as error:
            self._failed(_READ, error, path)
            self.delete([block.digest])
            self._reports.append(Lost(block.digest))
            return False
        self._logged.discard(_READ)
        return True

    # ---- both -------------------------------------------------------------------------------

    def _head(self, descriptor: int) -> tuple[bytes, bytes]:
        """Return the facts of an open file and its checksum; its data come next. Raises
        KvTransferError if it is not a complete file of a block.
        """
        prefix = bytearray(_PREFIX.size)
        _fill(descriptor, memoryview(prefix))
        magic, num_facts, num_data, short, whole = _PREFIX.unpack(prefix)
        size = _PREFIX.size + num_facts + num_data
        is_right = (magic, num_data) == (_MAGIC, self._block_bytes)
        if not is_right or num_facts > _MAX_FACTS_BYTES or os.fstat(descriptor).st_size != size:
            raise KvTransferError("it is no file of a block, or not a whole one")
        facts = bytearray(num_facts)
        _fill(descriptor, memoryview(facts))
        if xxh3_128_digest(facts) != short:
            raise KvTransferError("its bytes are damaged")
        return bytes(facts), whole

    def _failed(self, what: str, error: Exception, path: str | None = None) -> None:
        with self._inbound:
            self.num_failures += 1
            level = logging.DEBUG if what in self._logged else logging.WARNING
            self._logged.add(what)
        reason = error.strerror if isinstance(error, OSError) else str(error) or "out of memory"
        logger.log(level, "%s: %s: %s", what, path or self.directory, reason)

    def _path(self, digest: bytes) -> str:
        return f"{self.directory}/{digest.hex()}.kv"


def check_directory(parent: Path) -> None:
    """Check that files can be made in `parent` before a model is loaded in vain. Raises
    ConfigError. A full disk is only logged: it may have room later, and its files can be read.
    """
    try:
        parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=parent) as file:
            file.write(bytes(_PROBE_BYTES))
    except OSError as error:
        if error.errno not in _FULL:
            raise _refused(parent, error) from error
        logger.warning("--kv-offloading-path %s: no KV is written: %s", parent, error.strerror)


def _refused(parent: Path, error: OSError) -> ConfigError:
    reason = "Not a directory" if isinstance(error, FileExistsError) else error.strerror
    fix = "give a directory that the worker may write to"
    return ConfigError(f"--kv-offloading-path {parent}: {reason}; {fix}")


def _claim(parent: Path, identity: str) -> tuple[Path, FileIO]:
    """Return a directory that no other engine has, and its lock, which holds while it is open."""
    try:
        for number in range(_MAX_ENGINES):
            directory = parent / f"{identity}.{number}"
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = FileIO(directory / "lock", "a", opener=partial(os.open, mode=0o600))
            try:
                # The kernel drops this lock with the process, however that ends.
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                lock.close()
            else:
                return directory, lock
    except OSError as error:
        raise _refused(parent, error) from error
    raise ConfigError(f"--kv-offloading-path {parent}: {_MAX_ENGINES} engines use it already")


def _fill(descriptor: int, data: memoryview) -> None:
    while data:
        size = os.readv(descriptor, [data])
        if not size:
            raise KvTransferError("it ends too early")
        data = data[size:]


def _checksums(facts: bytes, data: memoryview) -> tuple[bytes, bytes]:
    whole = xxh3_128(facts)
    short = whole.digest()
    whole.update(data)
    return short, whole.digest()
