"""Freed memory of large bodies is reused."""

import os
import platform
import subprocess
import sys

import pytest

FAULTS = """
import resource, sys
from picker.app.memory import keep_freed_pages
works = keep_freed_pages({})
for _ in range(3):
    bytes(bytearray(1_000_000))
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(100):
    bytes(bytearray(1_000_000))
print(int(works), resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has these thresholds")
def test_freed_pages_are_used_again() -> None:
    """Without reuse, a hundred buffers of a megabyte would fault 25,000 pages twice."""
    clean = {name: value for name, value in os.environ.items() if "MALLOC" not in name}
    output = subprocess.check_output([sys.executable, "-c", FAULTS], text=True, env=clean)
    works, faults = map(int, output.split())
    assert works
    assert faults < 5_000


@pytest.mark.parametrize(
    "name", ["MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"]
)
def test_the_variables_of_glibc_take_precedence(name: str) -> None:
    script = f"from picker.app.memory import keep_freed_pages as k; print(k({{'{name}': '1'}}))"
    assert subprocess.check_output([sys.executable, "-c", script], text=True).strip() == "False"
