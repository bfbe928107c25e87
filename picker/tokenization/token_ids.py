"""Token ids as the picker keeps them: packed, four bytes each, little endian."""

from __future__ import annotations

import sys
from array import array

_UINT32 = "I"


def pack_token_ids(value: object) -> bytes | None:
    """`value` packed if it is a list, not empty, of integers in [0, 2**32); else None."""
    # By type, as a bool is an int to isinstance; without a loop, as token lists are long.
    if not isinstance(value, list) or set(map(type, value)) != {int}:
        return None
    try:
        packed = array(_UINT32, value)
    except OverflowError:
        return None
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def packed_prompts(value: object) -> tuple[bytes, ...]:
    """The prompts in a list of token ids, or in a list of such lists; none in anything else."""
    packed = pack_token_ids(value)
    if packed is not None:
        return (packed,)
    if not isinstance(value, list) or set(map(type, value)) != {list}:
        return ()
    batch = [packed for ids in value if (packed := pack_token_ids(ids)) is not None]
    return tuple(batch) if len(batch) == len(value) else ()
