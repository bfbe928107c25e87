"""The calls of the CUDA driver by which processes share device memory, for memory of the host.

Compiled from C, so that `KvPool` calls it as it calls the driver: by the same symbols, with a
handle of 64 bytes by value. Memory is a file without a name; a handle is its path below /proc.
"""

import ctypes
import subprocess
from pathlib import Path
from typing import Any

import torch

from worker.config import KvTransferConfig
from worker.executor.kv_cache import KvPool

# Memory begins inside its allocation, as that of torch's allocator does.
OFFSET = 4096
SOURCE = r"""
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

typedef unsigned long long Address;
typedef struct { char reserved[64]; } Handle;
static struct { char *base; size_t size; int fd; } regions[64];
static int context, count;
static _Thread_local void *current;
int opened, closed, copied;

static int add(int fd, size_t size) {
    void *base = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (base == MAP_FAILED || count == 64) return -1;
    regions[count].base = base, regions[count].size = size, regions[count].fd = fd;
    return count++;
}
static int find(Address inside) {
    for (int n = 0; n < count; n++) {
        Address base = (Address)regions[n].base;
        if (inside >= base && inside < base + regions[n].size) return n;
    }
    return -1;
}
Address allocate(size_t size) {
    int fd = memfd_create("device", 0);
    current = &context;
    return ftruncate(fd, size) ? 0 : (Address)regions[add(fd, size)].base;
}
int cuCtxGetCurrent(void **found) { *found = current; return current ? 0 : 201; }
int cuCtxSetCurrent(void *wanted) { current = wanted; return wanted == &context ? 0 : 201; }
int cuMemGetAddressRange_v2(Address *base, size_t *size, Address inside) {
    int n = find(inside);
    if (n < 0) return 1;
    *base = (Address)regions[n].base, *size = regions[n].size;
    return 0;
}
int cuIpcGetMemHandle(Handle *handle, Address base) {
    int n = find(base);
    if (n < 0 || base != (Address)regions[n].base) return 1;
    memset(handle, 0, 64);
    snprintf(handle->reserved, 64, "/proc/%d/fd/%d", getpid(), regions[n].fd);
    return 0;
}
int cuIpcOpenMemHandle_v2(Address *found, Handle handle, unsigned flags) {
    struct stat status;
    if (flags != 1 || current != &context) return 201;
    if (handle.reserved[63] || strncmp(handle.reserved, "/proc/", 6)) return 1;
    int fd = open(handle.reserved, O_RDWR);
    if (fd < 0 || fstat(fd, &status)) return 1;
    int n = add(fd, status.st_size);
    if (n < 0) return 2;
    opened++, *found = (Address)regions[n].base;
    return 0;
}
int cuIpcCloseMemHandle(Address base) {
    int n = find(base);
    if (n < 0) return 1;
    munmap(regions[n].base, regions[n].size);
    close(regions[n].fd);
    regions[n].base = NULL, regions[n].size = 0, closed++;
    while (count && !regions[count - 1].base) count--;
    return 0;
}
int cuMemcpyDtoDAsync_v2(Address into, Address from, size_t size, void *stream) {
    if (find(from) < 0 || find(from) != find(from + size - 1)) return 1;
    memcpy((void *)into, (void *)from, size);
    copied++;
    return 0;
}
int cuStreamSynchronize(void *stream) { return 0; }
"""


def build(folder: Path) -> Path:
    source, library = folder / "driver.c", folder / "libdriver.so"
    source.write_text(SOURCE)
    command = ["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(source)]
    subprocess.run(command, check=True)
    return library


def load(library: Path) -> Any:
    driver = ctypes.CDLL(str(library))
    driver.allocate.restype = ctypes.c_uint64
    driver.allocate.argtypes = [ctypes.c_size_t]
    return driver


def device_memory(driver: Any, num_bytes: int) -> torch.Tensor:
    """Memory that the driver can share; it lasts as long as the process."""
    address = driver.allocate(num_bytes + OFFSET) + OFFSET
    memory = (ctypes.c_char * num_bytes).from_address(address)
    return torch.frombuffer(memory, dtype=torch.uint8)


def cuda_pool(runner: Any) -> KvPool:
    """The pool of a model runner on a GPU."""
    return runner.kv_pool(KvTransferConfig(kv_buffer_size=1 << 24))


def pool_of(
    driver: Any, runner: Any, num_bytes: int = 1 << 20, made: type[KvPool] = KvPool
) -> KvPool:
    """The pool of a model runner on a CPU."""
    memory = device_memory(driver, num_bytes)
    return made(driver._name, memory, num_bytes, runner.read_kv, runner._cache[:, 0].nbytes)
