"""How the C library is to treat the memory of a program that serves requests.

glibc hands blocks over 128 KiB back to the kernel when they are freed, and gets fresh pages for the
next one: each page is then cleared and mapped anew, which for a body of 400 KB takes longer than
deciding where it goes. It does learn from experience, but forgets whenever the top of the heap is
trimmed. Larger thresholds keep the pages; a program that has served large bodies stays that much
larger.

The garbage collector is left as it is. What requests make is freed without it: 5,000 decisions
cause three looks at the youngest objects, and none at all of them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

TRIM_THRESHOLD_BYTES = 64 * 2**20
MMAP_THRESHOLD_BYTES = 32 * 2**20  # the largest that glibc takes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
# With one of these set, somebody has thought about it.
_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed_pages(environment: Mapping[str, str]) -> bool:
    """Let freed memory be used again without the kernel; whether that took effect.

    It does not with other C libraries than glibc, nor where `environment` sets up the allocator.
    """
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
