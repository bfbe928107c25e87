"""Random numbers of the simulator: functions of their keys, independent of the order of calls."""

from functools import lru_cache
from math import cos, log, sqrt, tau

_MASK = (1 << 64) - 1
_HALF = 0.5**32


def scramble(value: int) -> int:
    """Apply SplitMix64's finalizer (Steele et al. 2014): each input bit moves every output bit."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


@lru_cache(maxsize=1 << 14)
def stream(seed: int, request_seed: int, purpose: int) -> int:
    """Return the 64-bit base of the numbers of one request and purpose."""
    return scramble(scramble(scramble(seed) + request_seed) + purpose)


def bits(base: int, position: int, salt: int = 0) -> int:
    """Return 64 random bits for a position of a stream; `salt` is below 2**32."""
    value = (base + (position << 32) + salt) & _MASK  # `scramble`, spelled out: the hot path
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def normal(random_bits: int) -> float:
    """Turn 64 random bits into a standard normal number (Box and Muller 1958)."""
    first = ((random_bits >> 32) + 1) * _HALF
    return sqrt(-2.0 * log(first)) * cos(tau * (random_bits & 0xFFFFFFFF) * _HALF)
