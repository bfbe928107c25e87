"""Shards return their samples, a run has its directory alone, and errors name the remedy."""

import errno
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from worker.errors import ConfigError, ModelError
from worker.training.store import (
    WORK,
    TrainingSample,
    check_writable,
    locked,
    read_samples,
    shard_indices,
    shard_path,
    write_samples,
    write_tensors,
)


def sample(length: int) -> TrainingSample:
    ids = torch.randint(0, 99, (length,))
    return TrainingSample(ids, ids % 2 == 0, torch.randn(length - 1, 3).bfloat16())


def test_samples_are_read_as_they_were_written(tmp_path: Path) -> None:
    written = [sample(5), sample(2), sample(9)]
    write_samples(shard_path(tmp_path, 4), written)
    for one, other in zip(read_samples(shard_path(tmp_path, 4)), written, strict=True):
        assert torch.equal(one.token_ids, other.token_ids)
        assert torch.equal(one.is_target, other.is_target)
        assert torch.equal(one.features, other.features)


def test_an_empty_shard_exists(tmp_path: Path) -> None:
    """An empty shard is not made again."""
    write_samples(shard_path(tmp_path, 0), [])
    assert shard_indices(tmp_path) == [0]
    assert read_samples(shard_path(tmp_path, 0)) == []


def test_a_partial_file_is_no_shard(tmp_path: Path) -> None:
    """A killed process leaves one behind."""
    write_samples(shard_path(tmp_path, 10), [sample(3)])
    write_samples(shard_path(tmp_path, 2), [sample(3)])
    (tmp_path / ".000003.safetensors.77.partial").write_bytes(b"half")
    (tmp_path / "notes.txt").write_text("x")
    assert shard_indices(tmp_path) == [2, 10]


def test_a_broken_shard_is_named_with_the_remedy(tmp_path: Path) -> None:
    shard_path(tmp_path, 1).write_bytes(b"not a shard")
    with pytest.raises(ModelError, match=r"000001\.safetensors: cannot be read .*; remove it"):
        read_samples(shard_path(tmp_path, 1))


def test_a_failed_write_leaves_no_file_behind(tmp_path: Path) -> None:
    in_the_way = tmp_path / "shard"
    in_the_way.mkdir()
    with pytest.raises(OSError, match="directory"):
        write_tensors(in_the_way, {"x": torch.zeros(9)})
    assert list(tmp_path.iterdir()) == [in_the_way]


def test_a_directory_is_made_and_left_empty(tmp_path: Path) -> None:
    check_writable(tmp_path / "a" / "b")
    assert list((tmp_path / "a" / "b").iterdir()) == []


def test_an_unusable_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match=r"--out .*file/out: .*Not a directory.* another --out"):
        check_writable(tmp_path / "file" / "out")


def test_two_runs_do_not_share_a_directory(tmp_path: Path) -> None:
    with (
        locked(tmp_path),
        pytest.raises(ConfigError, match="another train-draft is running"),
        locked(tmp_path),
    ):
        pytest.fail("both are at work")
    with locked(tmp_path):
        assert (tmp_path / WORK).is_dir()


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        SafetensorError("I/O error: No space left on device (os error 28)"),
    ],
)
def test_a_full_disk_is_named_with_the_remedy(tmp_path: Path, error: Exception) -> None:
    """Every library that writes has an error of its own."""
    with pytest.raises(ConfigError, match=r"--out .*No space left.*make room"), locked(tmp_path):
        raise error


def test_other_errors_pass_unchanged(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="as it was"), locked(tmp_path):
        raise ModelError("as it was")
