"""Available memory, from files as kernels write them."""

from pathlib import Path
from typing import Any

import pytest

from worker.executor.kv_cache import available_bytes, read_file

MIB = 1 << 20
# A machine of 24 GiB whose page cache holds most of it.
MEMINFO = """\
MemTotal:       24684092 kB
MemFree:         1048576 kB
MemAvailable:   17825792 kB
Buffers:           53752 kB
Cached:         17301504 kB
SwapTotal:             0 kB
"""
MACHINE = 17408  # MiB
V2 = "/sys/fs/cgroup"
V2_MOUNT = "30 23 0:26 / /sys/fs/cgroup rw,nosuid,relatime shared:4 - cgroup2 cgroup2 rw\n"
V1 = "/sys/fs/cgroup/memory"
V1_MOUNTS = """\
31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct
35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
"""
V1_UNLIMITED = "9223372036854771712\n"


def v2(
    folder: str, limit: str, current: int, *, file: int = 0, high: str = "max"
) -> dict[str, str]:
    """Numbers are MiB, and `file` is page cache, in halves."""
    half = file * MIB // 2
    return {
        f"{folder}/memory.max": f"{limit}\n",
        f"{folder}/memory.high": f"{high}\n",
        f"{folder}/memory.current": f"{current * MIB}\n",
        f"{folder}/memory.stat": f"anon {current * MIB}\nfile {4 * half}\nshmem {2 * half}\n"
        f"inactive_anon 5\nactive_anon 7\ninactive_file {half}\nactive_file {half}\n"
        "workingset_refault_file 9\n",
    }


def v1(folder: str, limit: str, usage: int, *, file: int = 0) -> dict[str, str]:
    """The unprefixed statistics of version 1 leave out cgroups below."""
    half = file * MIB // 2
    return {
        f"{folder}/memory.limit_in_bytes": f"{limit}\n",
        f"{folder}/memory.usage_in_bytes": f"{usage * MIB}\n",
        f"{folder}/memory.stat": f"cache 1\ninactive_file 3\nactive_file 4\n"
        f"hierarchical_memory_limit {limit}\ntotal_inactive_file {half}\n"
        f"total_active_file {half}\n",
    }


def machine(cgroup: str, mounts: str, *folders: dict[str, str]) -> dict[str, str]:
    files = {
        "/proc/meminfo": MEMINFO,
        "/proc/self/cgroup": cgroup,
        "/proc/self/mountinfo": "22 1 254:0 / / rw,relatime - ext4 /dev/root rw\n" + mounts,
    }
    for folder in folders:
        files |= folder
    return files


def container(limit: int, current: int, **stat: Any) -> dict[str, str]:
    """A container of version 2, which sees its own cgroup as the root."""
    return machine("0::/\n", V2_MOUNT, v2(V2, str(limit * MIB), current, **stat))


V2_SERVICE = f"{V2}/user.slice/app.service"
SERVICE = "0::/user.slice/app.service\n"
# Files, and the MiB that are available.
CASES: dict[str, tuple[dict[str, str], int | None]] = {
    "no cgroups at all": ({"/proc/meminfo": MEMINFO}, MACHINE),
    "nothing says": ({}, None),
    "a kernel that does not say what is available": (
        {"/proc/meminfo": "MemTotal: 24684092 kB\nMemFree: 1048576 kB\n"},
        None,
    ),
    "v2, at the root, which has no limit": (machine("0::/\n", V2_MOUNT), MACHINE),
    "v2, in a container": (container(3072, 1000), 2072),
    "v2, page cache can be given up": (container(3072, 2900, file=2000), 2172),
    "v2, no limit": (machine("0::/\n", V2_MOUNT, v2(V2, "max", 1000)), MACHINE),
    "v2, a limit beyond the machine": (container(1 << 20, 1000), MACHINE),
    "v2, throttled before it is killed": (container(3072, 1000, high=str(2048 * MIB)), 1048),
    "v2, over its limit": (machine("0::/\n", V2_MOUNT, v2(V2, "4096", 1)), 0),
    "v2, a service whose parent is tighter": (
        machine(
            SERVICE,
            V2_MOUNT,
            v2(V2_SERVICE, str(4096 * MIB), 500),
            v2(f"{V2}/user.slice", str(5000 * MIB), 3000),
        ),
        2000,
    ),
    "v2, a service whose parents have no limit": (
        machine(
            SERVICE,
            V2_MOUNT,
            v2(V2_SERVICE, str(4096 * MIB), 500),
            v2(f"{V2}/user.slice", "max", 3000),
        ),
        3596,
    ),
    "v2, without the memory controller": (
        machine("0::/app\n", V2_MOUNT, {f"{V2}/app/cgroup.procs": "1\n"}),
        MACHINE,
    ),
    "v2, a process from outside the namespace": (
        machine("0::/../app\n", V2_MOUNT, v2(V2, str(3072 * MIB), 1000)),
        2072,
    ),
    "v2, no statistics": (
        machine(
            "0::/\n",
            V2_MOUNT,
            {f"{V2}/memory.max": str(900 * MIB), f"{V2}/memory.current": str(100 * MIB)},
        ),
        800,
    ),
    "v1, no limit anywhere": (
        machine(
            "4:memory:/user\n1:cpu,cpuacct:/\n0::/\n",
            V1_MOUNTS,
            v1(f"{V1}/user", V1_UNLIMITED, 300),
            v1(V1, V1_UNLIMITED, 4000),
        ),
        MACHINE,
    ),
    "v1, with page cache": (
        machine(
            "4:memory:/user\n0::/\n",
            V1_MOUNTS,
            v1(f"{V1}/user", str(3072 * MIB), 2000, file=500),
            v1(V1, V1_UNLIMITED, 4000),
        ),
        1572,
    ),
    "v1, nested": (
        machine(
            "4:memory:/kubepods/pod1/c1\n",
            V1_MOUNTS,
            v1(f"{V1}/kubepods/pod1/c1", V1_UNLIMITED, 100),
            v1(f"{V1}/kubepods/pod1", str(2048 * MIB), 1024),
            v1(f"{V1}/kubepods", str(1 << 40), 9000),
        ),
        1024,
    ),
    "v1, a container that sees only its own folder": (
        machine(
            "4:memory:/docker/abc\n",
            "35 31 0:32 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n",
            v1(V1, str(3072 * MIB), 72),
        ),
        3000,
    ),
    "v2 beside v1, which has the memory": (
        machine("4:memory:/app\n0::/app\n", V1_MOUNTS, v1(f"{V1}/app", str(2048 * MIB), 48)),
        2000,
    ),
}


@pytest.mark.parametrize(("files", "available"), CASES.values(), ids=CASES)
def test_available_memory_is_the_tightest_limit(
    files: dict[str, str], available: int | None
) -> None:
    found = available_bytes(files.get)
    assert found == (None if available is None else available * MIB)


def test_this_machine_says(tmp_path: Path) -> None:
    available = available_bytes(read_file)
    assert available is not None
    assert available >> 20
    assert read_file(str(tmp_path / "nothing")) is None
