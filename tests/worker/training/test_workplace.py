"""A run's directory is its own, and what goes wrong there is said in one line."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from safetensors import SafetensorError

from worker.errors import ConfigError, ModelError
from worker.training.workplace import WORK, occupied, probe


def test_a_directory_is_made_and_left_empty(tmp_path: Path) -> None:
    """Whatever depth it has."""
    probe(tmp_path / "a" / "b")
    assert list((tmp_path / "a" / "b").iterdir()) == []


def test_what_is_no_directory_is_refused(tmp_path: Path) -> None:
    """With the flag, the reason and the remedy."""
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match=r"--out .*file/out: .*Not a directory.* another --out"):
        probe(tmp_path / "file" / "out")


def test_two_runs_do_not_share_a_directory(tmp_path: Path) -> None:
    """The second is told; when the first has ended, the next one may."""
    with (
        occupied(tmp_path),
        pytest.raises(ConfigError, match="another train-draft is at work"),
        occupied(tmp_path),
    ):
        pytest.fail("both are at work")
    with occupied(tmp_path):
        assert (tmp_path / WORK).is_dir()


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        SafetensorError("I/O error: No space left on device (os error 28)"),
    ],
)
def test_a_full_disk_is_named_with_the_remedy(tmp_path: Path, error: Exception) -> None:
    """Whichever library meets it."""
    with (
        pytest.raises(ConfigError, match=r"--out .*No space left.*make room"),
        occupied(tmp_path),
    ):
        raise error


def test_other_errors_pass(tmp_path: Path) -> None:
    """They name what they are about themselves."""
    with pytest.raises(ModelError, match="as it was"), occupied(tmp_path):
        raise ModelError("as it was")
