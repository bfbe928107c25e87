"""Packs token ids: four bytes each, little endian."""

import sys
from array import array

_UINT32 = "I"


def pack_token_ids(value: object) -> bytes | None:
    """Pack `value` if it is a non-empty list of integers in [0, 2**32); else return None."""
    # By type, because isinstance accepts a bool; without a loop, because token lists are long.
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
    """Pack a list of token ids, or each list in a list of them; () for anything else."""
    packed = pack_token_ids(value)
    if packed is not None:
        return (packed,)
    if not isinstance(value, list) or set(map(type, value)) != {list}:
        return ()
    batch = [packed for ids in value if (packed := pack_token_ids(ids)) is not None]
    return tuple(batch) if len(batch) == len(value) else ()
