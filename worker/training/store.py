"""What the target said and thought, on disk: numbered shards, each written once and whole."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from worker.errors import ModelError

_SUFFIX = ".safetensors"


@dataclass(frozen=True, slots=True)
class Sample:
    """One token sequence, and what the target made of it.

    `token_ids` [T] int64; `is_target` [T] bool marks the tokens worth learning to foresee: those
    that the model said itself, or all of a text. `features` [T-1, hidden] are the target's hidden
    states before its final norm; that of the last token is not known.
    """

    token_ids: Tensor
    is_target: Tensor
    features: Tensor


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write a safetensors file so that it is there whole or not at all, whenever we are killed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        save_file(dict(tensors), partial, None if metadata is None else dict(metadata))
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Every tensor of a safetensors file; `ModelError` names a file that is none."""
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path}: cannot be read ({error}); remove it to make it anew") from error


def shard_path(directory: Path, index: int) -> Path:
    """Where a shard lies."""
    return directory / f"{index:06d}{_SUFFIX}"


def shard_indices(directory: Path) -> list[int]:
    """The shards that are there, ascending."""
    names = (path.name.removesuffix(_SUFFIX) for path in directory.glob(f"[0-9]*{_SUFFIX}"))
    return sorted(int(name) for name in names if name.isdigit())


def write_samples(path: Path, samples: Sequence[Sample]) -> None:
    """Write a shard; one without samples says that there were none."""
    tensors = {"lengths": torch.tensor([len(s.token_ids) for s in samples], dtype=torch.int64)}
    if samples:
        tensors["token_ids"] = torch.cat([s.token_ids for s in samples])
        tensors["is_target"] = torch.cat([s.is_target for s in samples])
        tensors["features"] = torch.cat([s.features for s in samples])
    write_tensors(path, tensors)


def read_samples(path: Path) -> list[Sample]:
    """The sequences of a shard, in order."""
    tensors = read_tensors(path)
    lengths = tensors["lengths"].tolist()
    if not lengths:
        return []
    parts = zip(
        torch.split(tensors["token_ids"], lengths),
        torch.split(tensors["is_target"], lengths),
        torch.split(tensors["features"], [length - 1 for length in lengths]),
        strict=True,
    )
    return [Sample(*part) for part in parts]
