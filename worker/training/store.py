"""The files of a run: its directory, and numbered shards of text, each written atomically."""

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from worker.errors import ConfigError, ModelError
from worker.models.draft_head import FORMAT, HeadShape, fingerprint
from worker.models.llama import LlamaModel

_SUFFIX = ".safetensors"
# Below a run's directory: the files that are needed only until the head is complete.
WORK = "training"


@dataclass(frozen=True, slots=True)
class TrainingSample:
    """A token sequence with the target's hidden states.

    `token_ids` [T] int64; `is_target` [T] bool marks the tokens to learn to predict. `features`
    [T-1, hidden] are before the final norm; the one of the last token is not known.
    """

    token_ids: Tensor
    is_target: Tensor
    features: Tensor


def head_metadata(shape: HeadShape, target: LlamaModel) -> dict[str, str]:
    config = msgspec.json.encode(asdict(shape)).decode()
    return {"format": FORMAT, "fingerprint": fingerprint(target), "config": config}


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write a safetensors file atomically: a killed process leaves none or a complete one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        save_file(dict(tensors), partial, None if metadata is None else dict(metadata))
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path}: cannot be read ({error}); remove it to make it anew") from error


def shard_path(directory: Path, index: int) -> Path:
    return directory / f"{index:06d}{_SUFFIX}"


def shard_indices(directory: Path) -> list[int]:
    """Return the numbers of the existing shards, ascending."""
    names = (path.name.removesuffix(_SUFFIX) for path in directory.glob(f"[0-9]*{_SUFFIX}"))
    return sorted(int(name) for name in names if name.isdigit())


def write_samples(path: Path, samples: Sequence[TrainingSample]) -> None:
    """Write a shard, even an empty one: it records that its conversations gave no samples."""
    tensors = {"lengths": torch.tensor([len(s.token_ids) for s in samples], dtype=torch.int64)}
    if samples:
        tensors["token_ids"] = torch.cat([s.token_ids for s in samples])
        tensors["is_target"] = torch.cat([s.is_target for s in samples])
        tensors["features"] = torch.cat([s.features for s in samples])
    write_tensors(path, tensors)


def read_samples(path: Path) -> list[TrainingSample]:
    """Read the samples of a shard, in order."""
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
    return [TrainingSample(*part) for part in parts]


def num_targets(samples: Sequence[TrainingSample]) -> int:
    return sum(int(sample.is_target.sum()) for sample in samples)


def check_writable(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(b"?")
    except OSError as error:
        raise _unwritable(directory, error) from error


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Exclude other runs from `directory` during the block. Raises `ConfigError`."""
    try:
        (directory / WORK).mkdir(parents=True, exist_ok=True)
        with (directory / WORK / ".lock").open("w") as file:
            _lock(file.fileno(), directory)
            yield
    except (OSError, SafetensorError) as error:
        raise _unwritable(directory, error) from error


def _lock(descriptor: int, directory: Path) -> None:
    """Lock until the file is closed, at the latest by the end of the process."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ConfigError(
            f"another train-draft is running in {directory}; wait for it, or give another --out"
        ) from error


def _unwritable(directory: Path, error: OSError | SafetensorError) -> ConfigError:
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return ConfigError(
        f"--out {directory}: cannot be used ({reason}); make room there or make it writable, or"
        " give another --out"
    )
