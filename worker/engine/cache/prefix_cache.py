"""The contents of blocks, found by name or by the longest common beginning.

A *full* block is cached under its digest. The cache keeps a `_Name` for each digest:

    a name lives  ⇔  some block holds its content, or a name or partial block has it as parent

While it lives, other contents with the same digest are neither stored nor found: whatever is found
below a name was computed after exactly the tokens that the chain says, however weak the hash
function is. Equal contents may exist twice; a look-up returns the first that is left.

A *partial* block is idle and has no digest. Like a full block it is listed under its parent and its
first token, where `find_beginning` looks for the longest beginning to copy. A partial block is
dropped when another block begins with all of its tokens.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from worker.engine.cache.block_hash import BlockHash, ExtraKeys, PartialBlock
from worker.engine.cache.cache_events import BlockRemoved, BlocksStored, CacheCleared, CacheEvent
from worker.errors import IntegrityError

# Blocks compared in one search for a common beginning, the latest first.
MAX_CANDIDATES = 16

_BeginningKey = tuple[bytes, ExtraKeys | None, int]


@dataclass(slots=True)
class _Name:
    content: BlockHash
    blocks: list[int] = field(default_factory=list)
    num_children: int = 0


class PrefixCache:
    """Sole owner of the contents of blocks, their names and the record of changes. With `partial`
    off only whole blocks are found. With `record` off `take_events` returns nothing.
    """

    def __init__(self, num_blocks: int, partial: bool, record: bool) -> None:
        self._contents: list[BlockHash | PartialBlock | None] = [None] * num_blocks
        self._names: dict[bytes, _Name] = {}
        self._beginnings: dict[_BeginningKey, list[int]] = {}
        self._partial = partial
        self._record = record
        self._root: bytes | None = None  # the parent of first blocks, learnt from the first of them
        self._events: list[CacheEvent] = []
        self.num_collisions = 0

    def holds(self, block: int) -> bool:
        return self._contents[block] is not None

    def find_chain(self, chain: Sequence[BlockHash]) -> list[int]:
        found: list[int] = []
        for wanted in chain:
            name = self._names.get(wanted.digest)
            if name is None or not name.blocks:
                break
            if name.content != wanted:
                self.num_collisions += 1
                break
            found.append(name.blocks[0])
        return found

    def find_beginning(
        self, parent: BlockHash | None, token_ids: Sequence[int], extra: ExtraKeys | None
    ) -> tuple[int, int] | None:
        """Return the block after `parent` (None: at the start) that has the longest beginning in
        common with `token_ids`, and the length of that beginning.
        """
        best: tuple[int, int] | None = None
        digest = self._root if parent is None else parent.digest
        if digest is None or not token_ids:
            return None
        for block in self._candidates(digest, extra, token_ids[0]):
            length = _common_length(self._content(block).token_ids, token_ids)
            if best is None or length > best[1]:
                best = (block, length)
                if length == len(token_ids):
                    break
        return best

    def store(
        self, blocks: Sequence[int], chain: Sequence[BlockHash], start: int
    ) -> tuple[int, list[int]]:
        """Let lookups of `chain[start:]` find `blocks[start:]`, whose KV is written, up to a
        collision.

        A block that has contents already is skipped: the other side of a fork was first. Return how
        many of `blocks` hold their contents now, and the partial blocks that lost theirs.
        """
        if start == 0 and chain:
            self._root = chain[0].parent
        run: list[BlockHash] = []
        superseded: list[int] = []
        index = start
        for index in range(start, len(blocks)):
            block, content = blocks[index], chain[index]
            if self._contents[block] is not None:
                self._record_run(run, chain, index)
                run = []
                continue
            if not self._name(block, content):
                break
            superseded += self._list(block, content)
            run.append(content)
        else:
            index = len(blocks)
        self._record_run(run, chain, index)
        return index, superseded

    def store_partial(
        self, block: int, content: PartialBlock, after: int | None
    ) -> tuple[bool, list[int]]:
        """Make an idle block after the full block `after` (None: at the start) available for hits.

        Return whether it is (partial hits must be on, `content` must follow `after`, and no other
        block may begin with the same tokens), and the partial blocks that lost their contents.
        """
        before = self._root if after is None else self._digest(after)
        if not self._partial or not content.token_ids or before != content.parent:
            return False, []
        token_ids = content.token_ids
        for other in self._candidates(content.parent, content.extra, token_ids[0]):
            if self._content(other).token_ids[: len(token_ids)] == token_ids:
                return False, []
        self._contents[block] = content
        self._add_child(content.parent)
        return True, self._list(block, content)

    def drop(self, block: int) -> bool:
        """Forget a block's contents; return whether it had any."""
        content = self._contents[block]
        if content is None:
            return False
        self._contents[block] = None
        self._unlist(block, content)
        if isinstance(content, PartialBlock):
            self._remove_child(content.parent)
            return True
        name = self._names[content.digest]
        name.blocks.remove(block)
        self._release(name)
        if self._record:
            self._events.append(BlockRemoved(content.digest))
        return True

    def clear(self) -> list[int]:
        """Forget everything; return the blocks that held something."""
        held = [block for block, content in enumerate(self._contents) if content is not None]
        self._contents = [None] * len(self._contents)
        self._names.clear()
        self._beginnings.clear()
        if self._record:
            self._events.append(CacheCleared())
        return held

    def last_copy(self, block: int) -> BlockHash | None:
        """Return the content of a full block if no other block has the same."""
        content = self._contents[block]
        if isinstance(content, BlockHash) and len(self._names[content.digest].blocks) == 1:
            return content
        return None

    def record(self, event: CacheEvent) -> None:
        if self._record:
            self._events.append(event)

    def take_events(self) -> list[CacheEvent]:
        events, self._events = self._events, []
        return events

    def full_blocks(self) -> list[tuple[BlockHash, bool]]:
        """Return each cached full block's content and whether it begins a chain, parents first."""
        # A name is made after its parent's and outlived by it, so the order of making will do.
        return [
            (name.content, name.content.parent == self._root)
            for name in self._names.values()
            for _ in name.blocks
        ]

    def check_chain(self, blocks: Sequence[int]) -> None:
        """Raise IntegrityError unless `blocks` hold one chain of full contents from its start."""
        parent = self._root
        for block in blocks:
            content = self._contents[block]
            if not isinstance(content, BlockHash) or content.parent != parent:
                raise IntegrityError(f"sealed block {block} does not continue its chain")
            parent = content.digest

    def check_integrity(self) -> tuple[set[int], set[int]]:
        """Check names and lists; return the blocks with contents, and which of them are partial."""
        full = {b: c for b, c in enumerate(self._contents) if isinstance(c, BlockHash)}
        partial = {b: c for b, c in enumerate(self._contents) if isinstance(c, PartialBlock)}
        named = [(block, n.content) for n in self._names.values() for block in n.blocks]
        if len(named) != len(full) or dict(named) != full:
            raise IntegrityError("the names do not list exactly the full blocks")
        children = dict.fromkeys(self._names, 0)
        for digest, name in self._names.items():
            if name.content.digest != digest:
                raise IntegrityError("a content is filed under a digest not its own")
            self._count_child(children, name.content.parent)
        for content in partial.values():
            self._count_child(children, content.parent)
        for digest, name in self._names.items():
            if children[digest] != name.num_children or not (name.blocks or name.num_children):
                raise IntegrityError("a name miscounts its children or names nothing")
        self._check_beginnings({**full, **partial} if self._partial else {})
        return full.keys() | partial.keys(), set(partial)

    def _count_child(self, children: dict[bytes, int], parent: bytes) -> None:
        if parent in children:
            children[parent] += 1
        elif parent != self._root:
            raise IntegrityError("a name's parent has no name")

    def _check_beginnings(self, contents: dict[int, BlockHash | PartialBlock]) -> None:
        listed = [block for blocks in self._beginnings.values() for block in blocks]
        if sorted(listed) != sorted(contents):
            raise IntegrityError("the beginnings do not list exactly the blocks with contents")
        for key, blocks in self._beginnings.items():
            if not blocks or any(_beginning_key(contents[block]) != key for block in blocks):
                raise IntegrityError("a block is listed under a beginning not its own")

    def _content(self, block: int) -> BlockHash | PartialBlock:
        content = self._contents[block]
        if content is None:
            raise IntegrityError(f"block {block} is listed but holds nothing")
        return content

    def _digest(self, block: int) -> bytes | None:
        content = self._contents[block]
        return content.digest if isinstance(content, BlockHash) else None

    def _candidates(self, parent: bytes, extra: ExtraKeys | None, first: int) -> Iterable[int]:
        """Return the latest blocks listed under a beginning, latest first."""
        return self._beginnings.get((parent, extra, first), [])[: -MAX_CANDIDATES - 1 : -1]

    def _name(self, block: int, content: BlockHash) -> bool:
        """Attach a full block to its name, made if need be; return False at a collision."""
        name = self._names.get(content.digest)
        if name is None:
            name = self._names[content.digest] = _Name(content)
            self._add_child(content.parent)
        elif name.content != content:
            self.num_collisions += 1
            return False
        name.blocks.append(block)
        self._contents[block] = name.content
        return True

    def _list(self, block: int, content: BlockHash | PartialBlock) -> list[int]:
        """List a block under its beginning; return the partial blocks that it made superfluous."""
        if not self._partial:
            return []
        key = _beginning_key(content)
        listed = self._beginnings.get(key)
        if listed is None:
            self._beginnings[key] = [block]
            return []
        superseded = [
            other
            for other in self._candidates(*key)
            if isinstance(known := self._contents[other], PartialBlock)
            and content.token_ids[: len(known.token_ids)] == known.token_ids
        ]
        listed.append(block)
        for other in superseded:
            self.drop(other)
        return superseded

    def _unlist(self, block: int, content: BlockHash | PartialBlock) -> None:
        if self._partial:
            key = _beginning_key(content)
            listed = self._beginnings[key]
            listed.remove(block)
            if not listed:
                del self._beginnings[key]

    def _add_child(self, parent: bytes) -> None:
        name = self._names.get(parent)
        if name is not None:  # None: the root, which needs no name
            name.num_children += 1

    def _remove_child(self, parent: bytes) -> None:
        name = self._names.get(parent)
        if name is not None:
            name.num_children -= 1
            self._release(name)

    def _release(self, name: _Name) -> None:
        """Drop a name if nothing needs it any more, and the names that existed only for it."""
        current: _Name | None = name
        while current is not None and not current.blocks and not current.num_children:
            del self._names[current.content.digest]
            current = self._names.get(current.content.parent)
            if current is not None:
                current.num_children -= 1

    def _record_run(self, run: list[BlockHash], chain: Sequence[BlockHash], end: int) -> None:
        if run and self._record:
            first = end - len(run)
            parent = chain[first - 1].digest if first else None
            self._events.append(BlocksStored(tuple(run), parent))


def _beginning_key(content: BlockHash | PartialBlock) -> _BeginningKey:
    return content.parent, content.extra, content.token_ids[0]


def _common_length(left: Sequence[int], right: Sequence[int]) -> int:
    length = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        length += 1
    return length
