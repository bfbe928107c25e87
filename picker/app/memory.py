"""Settings of the C library's allocator for a program that serves requests.

glibc returns blocks over 128 KiB to the kernel when they are freed, and gets fresh pages for the
next one: clearing and mapping them takes longer for a body of 400 KB than the routing decision. Its
dynamic thresholds adapt, but are reset whenever the top of the heap is trimmed.
"""

import ctypes
from collections.abc import Mapping

TRIM_THRESHOLD_BYTES = 64 * 2**20  # after large bodies the process stays that much larger
MMAP_THRESHOLD_BYTES = 32 * 2**20  # the largest that glibc takes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
# Set by an operator who tunes the allocator.
_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed_pages(environment: Mapping[str, str]) -> bool:
    """Let the allocator retain freed memory; return whether that took effect."""
    if any(environment.get(name) for name in _SETTINGS):
        return False
    try:
        library = ctypes.CDLL(None)
        _ = library.gnu_get_libc_version  # other libraries have a mallopt that does nothing
        mallopt = library.mallopt
    except (AttributeError, OSError, TypeError):  # TypeError: Windows has no such library
        return False
    mallopt.argtypes, mallopt.restype = (ctypes.c_int, ctypes.c_int), ctypes.c_int
    trims = mallopt(_M_TRIM_THRESHOLD, TRIM_THRESHOLD_BYTES)
    maps = mallopt(_M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES)
    return bool(trims and maps)
