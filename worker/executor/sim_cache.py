"""The simulator's KV cache: it remembers token ids, so that an echo can only say what the blocks
really hold.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence

from worker.types import ScheduledSequence

_MAX_REMEMBERED = 4096
_LINE_BREAK = 10  # in the simulator's own tokenizer


class TokenCache:
    """Owns one token id for each slot of every block."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._slots = array("i", bytes(4 * num_blocks * block_size))
        # Echoes read before, by sequence; only spares the reading.
        self._echoes: OrderedDict[int, tuple[int, ...]] = OrderedDict()

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks (source, destination); all are read before any is written."""
        size = self._block_size
        contents = [self._slots[source * size : (source + 1) * size] for source, _ in pairs]
        for (_, target), content in zip(pairs, contents, strict=True):
            self._slots[target * size : (target + 1) * size] = content

    def write(self, sequence: ScheduledSequence) -> None:
        """Keep the tokens that a sequence runs in this step."""
        size, position = self._block_size, sequence.start
        tokens = array("i", sequence.token_ids)
        done = 0
        while done < len(tokens):
            block, offset = divmod(position + done, size)
            count = min(size - offset, len(tokens) - done)
            slot = sequence.block_table[block] * size + offset
            self._slots[slot : slot + count] = tokens[done : done + count]
            done += count

    def echo(
        self, sequence: ScheduledSequence, num_prompt: int, turn: int | None, end: int | None
    ) -> tuple[int, ...]:
        """What an echo of the sequence's prompt says; see `spoken`."""
        known = self._echoes.get(sequence.seq_id)
        if known is None:
            known = spoken(self._read(sequence.block_table, num_prompt), turn, end)
            self._echoes[sequence.seq_id] = known
            if len(self._echoes) > _MAX_REMEMBERED:
                self._echoes.popitem(last=False)
        return known

    def _read(self, block_table: Sequence[int], num_tokens: int) -> list[int]:
        size = self._block_size
        tokens: list[int] = []
        for block in block_table[: -(-num_tokens // size)]:
            tokens += self._slots[block * size : (block + 1) * size]
        return tokens[:num_tokens]


def spoken(prompt: Sequence[int], turn: int | None, end: int | None) -> tuple[int, ...]:
    """What an echo says of a prompt: in a conversation (turns are `turn`, role, line break, text,
    `end`) the text of the last turn that ended, else all of it; control tokens never.
    """
    tokens = list(prompt)
    if turn is not None and end in tokens and turn in tokens:
        last = len(tokens) - 1 - tokens[::-1].index(end)
        starts = [i for i in range(last) if tokens[i] == turn]
        if starts:
            head = tokens[starts[-1] + 1 : last]
            tokens = head[head.index(_LINE_BREAK) + 1 :] if _LINE_BREAK in head else head
    return tuple(t for t in tokens if t not in (turn, end))
