"""Orders entries by last use, in many doubly linked lists that share two arrays.

An entry is a small number, a node; `_next` and `_prev` give its neighbours. Every list is a ring
with a node of its own, its anchor, between the newest entry and the oldest. Node 0 is unused. Free
nodes are chained through `_next`. The blocks of a prompt are linked last to first, so those that an
endpoint still holds form few runs of neighbours, which are unlinked at once.
"""

from collections.abc import Iterable

import numpy as np

from picker.prefix.pair_table import Values, grow

_FIRST_NODES = 64
_OUT = np.uint32(0xFFFF_FFFF)  # `_next` of a node that is being unlinked


class RecencyLists:
    def __init__(self) -> None:
        self._next = np.zeros(_FIRST_NODES, np.uint32)
        self._prev = np.zeros(_FIRST_NODES, np.uint32)
        self._next_view, self._prev_view = self._next.data, self._prev.data
        self._unused = 1  # the lowest node never used
        self._free = 0  # the first of the chain of free nodes

    def open(self) -> int:
        [anchor] = self.take(1)
        self._next_view[anchor] = self._prev_view[anchor] = anchor
        return anchor

    def take(self, count: int) -> list[int]:
        """Allocate `count` nodes, not yet in a list."""
        taken: list[int] = []
        node, links = self._free, self._next_view
        for _ in range(count):
            if not node:
                break
            taken.append(node)
            node = links[node]
        self._free = node
        left = count - len(taken)
        if left > 0:
            self._fit(self._unused + left)
            taken.extend(range(self._unused, self._unused + left))
            self._unused += left
        return taken

    def give_back(self, nodes: Iterable[int]) -> None:
        """Free nodes for reuse; they are in no list."""
        links, free = self._next_view, self._free
        for node in nodes:
            links[node] = free
            free = node
        self._free = free

    def unlink(self, nodes: Values) -> None:
        """Take distinct `nodes` out of their list; fastest for whole runs, newest first."""
        after, before = self._next[nodes], self._prev[nodes]
        # Run i goes from its newest node, nodes[newest[i]], to its oldest, nodes[oldest[i]].
        cut = (after[1:] != nodes[:-1]).nonzero()[0]
        if not len(cut):
            self._join(int(before[-1]), int(after[0]))
            return
        self._next[nodes] = _OUT
        newest = np.concatenate(([0], cut + 1))
        oldest = np.concatenate((cut, [len(nodes) - 1]))
        after_run, before_run = after[newest], before[oldest]
        if (self._next[after_run] == _OUT).any() or (self._next[before_run] == _OUT).any():
            # Two runs are neighbours in another order than the one given.
            self._next[nodes] = after
            for node in nodes.tolist():
                self.unlink_one(node)
            return
        self._next[before_run] = after_run
        self._prev[after_run] = before_run

    def unlink_one(self, node: int) -> None:
        self._join(self._prev_view[node], self._next_view[node])

    def append(self, anchor: int, nodes: Values) -> None:
        """Append `nodes`, at least one, to a list; the first becomes its newest."""
        self._next[nodes[1:]] = nodes[:-1]
        self._prev[nodes[:-1]] = nodes[1:]
        newest, oldest = int(nodes[0]), int(nodes[-1])
        last = self._prev_view[anchor]
        self._next_view[last] = oldest
        self._prev_view[oldest] = last
        self._next_view[newest] = anchor
        self._prev_view[anchor] = newest

    def append_new(self, anchor: int) -> int:
        """Allocate a node and make it the newest of a list."""
        node = self._free
        if node:
            self._free = self._next_view[node]
        else:
            node = self._unused
            if node >= len(self._next):
                self._fit(node + 1)
            self._unused += 1
        last = self._prev_view[anchor]
        self._next_view[last] = self._prev_view[anchor] = node
        self._prev_view[node] = last
        self._next_view[node] = anchor
        return node

    def refresh(self, anchor: int, node: int) -> None:
        """Make a node of a list its newest."""
        after, before = self._next_view, self._prev_view
        older, newer = before[node], after[node]
        after[older], before[newer] = newer, older
        last = before[anchor]
        after[last] = before[anchor] = node
        before[node], after[node] = last, anchor

    def cut_oldest(self, anchor: int, count: int) -> list[int]:
        """Unlink and return the `count` oldest nodes of a list, or all if it has fewer."""
        taken: list[int] = []
        node, links = self._next_view[anchor], self._next_view
        for _ in range(count):
            if node == anchor:
                break
            taken.append(node)
            node = links[node]
        self._join(anchor, node)
        return taken

    def length(self, anchor: int) -> int:
        """Count the nodes of a list, in linear time."""
        node, counted = self._next_view[anchor], 0
        while node != anchor:
            node = self._next_view[node]
            counted += 1
        return counted

    def check_integrity(self, anchor: int) -> None:
        node = anchor
        for _ in range(self._unused):
            after = self._next_view[node]
            if self._prev_view[after] != node:
                raise AssertionError("the links of a list disagree")
            node = after
            if node == anchor:
                return
        raise AssertionError("a list does not end")

    def _join(self, before: int, after: int) -> None:
        self._next_view[before] = after
        self._prev_view[after] = before

    def _fit(self, size: int) -> None:
        if size <= len(self._next):
            return
        self._next_view.release()
        self._prev_view.release()
        grow(self._next, size)
        grow(self._prev, size)
        self._next_view, self._prev_view = self._next.data, self._prev.data
