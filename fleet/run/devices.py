"""The GPUs of this machine, and their assignment to workers."""

import subprocess
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from fleet.errors import UsageError

# The share of a GPU's memory for all workers on it together; `vllm serve` takes the same.
_MEMORY_SHARE = 0.92
_QUERY = ("nvidia-smi", "--query-gpu=index,uuid,name,memory.total", "--format=csv,noheader,nounits")
_QUERY_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class Gpu:
    index: int
    uuid: str
    name: str
    memory_mebibytes: int

    def __str__(self) -> str:
        return f"GPU {self.index} ({self.name}, {self.memory_mebibytes / 1024:.0f} GiB)"


@dataclass(frozen=True, slots=True)
class GpuPlacement:
    """The devices of a worker (several if it is tensor-parallel) and its share of their memory."""

    gpus: tuple[Gpu, ...]
    memory_share: float


def place(num_workers: int, gpus: Sequence[Gpu], each: int = 1) -> list[GpuPlacement]:
    """Give `each` devices to every worker, in turn, with equal shares of their memory."""
    if len(gpus) < each:
        return []
    places = [[(i * each + rank) % len(gpus) for rank in range(each)] for i in range(num_workers)]
    counts = Counter(index for own in places for index in own)
    return [
        GpuPlacement(
            tuple(gpus[index] for index in own), _MEMORY_SHARE / max(counts[i] for i in own)
        )
        for own in places
    ]


def described(placements: Sequence[GpuPlacement]) -> list[str]:
    lines = []
    for gpu in dict.fromkeys(gpu for placement in placements for gpu in placement.gpus):
        mine = [i for i, placement in enumerate(placements) if gpu in placement.gpus]
        share = placements[mine[0]].memory_share
        names = ", ".join(f"worker-{i + 1}" for i in mine)
        each = " each" if len(mine) > 1 else ""
        lines.append(f"{gpu}: {names}, {share:.0%} of its memory{each}")
    return lines


def choose(wanted: str, gpus: Sequence[Gpu]) -> list[Gpu]:
    """Select the GPUs of `--devices`: "all", "cpu" or numbers, "0,2". Raises `UsageError`."""
    if wanted in ("all", "cpu"):
        return list(gpus) if wanted == "all" else []
    by_index = {str(gpu.index): gpu for gpu in gpus}
    names = [name.strip() for name in wanted.split(",")]
    there = ", ".join(by_index) or "none"
    for name in names:
        if name not in by_index:
            raise UsageError(
                f"--devices {wanted}: there is no GPU {name!r} here (there: {there}); it takes "
                "all, cpu, or numbers such as 0,2"
            )
    if len(set(names)) < len(names):
        raise UsageError(f"--devices {wanted} names a GPU twice")
    return [by_index[name] for name in names]


def find(environment: Mapping[str, str], query: Callable[[], str] | None = None) -> list[Gpu]:
    """Find the GPUs that `nvidia-smi`, if it runs, lists and CUDA_VISIBLE_DEVICES does not hide."""
    try:
        text = (query or _ask)()
    except (OSError, subprocess.SubprocessError):
        return []
    gpus = [_parsed(line) for line in text.splitlines() if line.count(",") >= 3]
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return gpus
    found: list[Gpu] = []
    for name in (name.strip() for name in visible.split(",")):
        match = [g for g in gpus if name and (name == str(g.index) or g.uuid.startswith(name))]
        # CUDA, too, hides every device after an invalid or repeated name.
        if len(match) != 1 or match[0] in found:
            break
        found += match
    return found


def _ask() -> str:
    done = subprocess.run(
        _QUERY, capture_output=True, text=True, timeout=_QUERY_SECONDS, check=True
    )
    return done.stdout


def _parsed(line: str) -> Gpu:
    index, uuid, *name, memory = (part.strip() for part in line.split(","))
    size = int(memory) if memory.isdecimal() else 0
    return Gpu(int(index), uuid, ", ".join(name), size)
