"""Runs from texts to a head respect their model, their time and their directory."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from worker.models.draft_head import HEAD_FILE, fingerprint, load_draft_head
from worker.models.loader import load_model
from worker.training.__main__ import main
from worker.training.flags import Settings
from worker.training.pipeline import TrainingRun
from worker.training.progress import ProgressLine
from worker.training.store import WORK, locked, read_tensors

TOY = ["--steps", "2", "--num-rows", "32", "--intermediate-size", "8", "--dtype", "float32"]
TOY += ["--draft-vocab-size", "200", "--num-threads", "1"]


@pytest.fixture
def text(tmp_path: Path) -> Callable[[str, str], str]:
    def make(folder: str, word: str) -> str:
        path = tmp_path / folder / "text.txt"
        path.parent.mkdir()
        path.write_text("".join(f"{word} number {n} of {word * 2}. " for n in range(100)))
        return str(path)

    return make


def card(out: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((out / "card.json").read_text())
    return result


def test_a_tuned_model_learns_nothing_from_its_base(
    make_model: Callable[[int], Path],
    text: Callable[[str, str], str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In one directory, the second run uses neither the head nor the text of the first."""
    argv = ["--tokens", "40", "--text", text("a", "boat"), "--out", str(tmp_path / "out"), *TOY]
    assert main(["--model", str(make_model(1)), *argv]) == 0
    base = card(tmp_path / "out")
    stored = set((tmp_path / "out" / WORK).iterdir())
    capsys.readouterr()
    tuned = ["--model", str(make_model(2)), *argv]
    assert main(tuned) == 1
    assert "not for this model; give another --out" in capsys.readouterr().err
    assert main([*tuned, "--overwrite"]) == 0
    assert card(tmp_path / "out")["fingerprint"] != base["fingerprint"]
    made = set((tmp_path / "out" / WORK).iterdir()) - stored
    assert sorted(path.name.split("-")[0] for path in made) == ["checkpoint", "own", "text"]


def test_texts_of_one_name_are_all_read(
    make_model: Callable[[int], Path], text: Callable[[str, str], str], tmp_path: Path
) -> None:
    one, other = text("a", "boat"), text("b", "library")
    argv = ["--model", str(make_model(1)), "--tokens", "0", "--out", str(tmp_path / "out"), *TOY]
    assert main([*argv, "--text", one, "--text", other, "--text", one]) == 0
    assert set(card(tmp_path / "out")["data"]["texts"]) == {one, other}


def test_writing_and_reading_take_half_of_the_time_for_any_number_of_texts(
    make_model: Callable[[int], Path], text: Callable[[str, str], str], tmp_path: Path
) -> None:
    now = [0.0]

    def clock() -> float:
        now[0] += 1.0
        return now[0]

    texts = tuple(Path(text(folder, folder * 9)) for folder in ("a", "b"))
    settings = Settings(
        model=make_model(1),
        text=texts,
        tokens=1_000_000,
        steps=20,
        out=tmp_path / "out",
        minutes=10.0,
        num_rows=32,
        draft_vocab_size=200,
        intermediate_size=8,
        dtype="float32",
    )
    TrainingRun(settings, ProgressLine(io.StringIO(), lambda: 0.0), clock).run()
    written = card(tmp_path / "out")
    assert written["training"]["steps"] == 20
    assert written["training"]["seconds"] < 400
    assert written["data"]["own_tokens"] > 0
    assert all(count > 1000 for count in written["data"]["texts"].values())


def test_without_time_left_nothing_is_trained(
    make_model: Callable[[int], Path],
    text: Callable[[str, str], str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    argv = ["--model", str(make_model(1)), "--tokens", "0", "--text", text("a", "boat")]
    argv += ["--out", str(tmp_path / "out"), *TOY]
    assert main(argv) == 0
    before = (tmp_path / "out" / HEAD_FILE).read_bytes()
    assert main([*argv, "--minutes", "1e-9", "--learning-rate", "0.1"]) == 1
    assert "--minutes 1e-09 were over before training began" in capsys.readouterr().err
    assert (tmp_path / "out" / HEAD_FILE).read_bytes() == before


def test_a_better_head_is_not_replaced(
    make_model: Callable[[int], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    argv = ["--model", str(make_model(1)), "--tokens", "4000", "--out", str(out), *TOY]
    argv += ["--steps", "12"]
    assert main(argv) == 0
    assert card(out)["acceptance"]["by_position"][0] > 0
    better = read_tensors(out / HEAD_FILE)["fuse"]
    poor = [*argv, "--learning-rate", "1e4"]
    capsys.readouterr()
    assert main(poor) == 0
    assert f"the head in {out} stays" in capsys.readouterr().err
    assert torch.equal(read_tensors(out / HEAD_FILE)["fuse"], better)
    worse = read_tensors(out / WORK / "worse" / HEAD_FILE)["fuse"]
    assert not torch.equal(worse, better)
    assert main([*poor, "--overwrite"]) == 0
    assert torch.equal(read_tensors(out / HEAD_FILE)["fuse"], worse)


def test_an_unusable_setting_is_an_error_before_any_text_is_written(
    make_model: Callable[[int], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, model = tmp_path / "out", str(make_model(1))
    (tmp_path / "no-head").write_text("x")
    (tmp_path / "file").write_text("x")
    argv = ["--model", model, "--tokens", "40", "--out", str(out), *TOY]
    assert main([*argv, "--start-from", str(tmp_path / "no-head")]) == 1
    assert "no-head: cannot be read as a draft head" in capsys.readouterr().err
    assert main([*argv, "--out", str(tmp_path / "file")]) == 1
    assert f"--out {tmp_path / 'file'}: cannot be used" in capsys.readouterr().err
    with locked(out):
        assert main(argv) == 1
    assert f"another train-draft is running in {out}" in capsys.readouterr().err
    assert [path.name for path in (out / WORK).iterdir()] == [".lock"]


TEXTS = (
    "The boats came back at noon, and the boats went out again at night, and so it was every day.",
    "A library lends books. A reader brings books back. A library lends books to the next reader.",
)


def test_a_head_is_trained_and_a_second_run_has_nothing_left_to_do(
    make_model: Callable[[int], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model_path = make_model(1)
    argv = ["--model", str(model_path), "--out", str(tmp_path), "--tokens", "0", "--steps", "3"]
    argv += ["--num-rows", "2", "--draft-vocab-size", "50", "--intermediate-size", "16"]
    argv += ["--dtype", "float32", "--num-threads", "1"]
    for number, text in enumerate(TEXTS):
        path = tmp_path / f"{number}.txt"
        path.write_text(text)
        argv += ["--text", str(path)]
    assert main(argv) == 0
    shown = capsys.readouterr()
    assert "position by position" in shown.out
    written = read_tensors(tmp_path / HEAD_FILE)
    card = json.loads((tmp_path / "card.json").read_text())
    assert card["model"] == model_path.name
    assert set(card["data"]["texts"]) == {str(tmp_path / "0.txt"), str(tmp_path / "1.txt")}
    assert (card["training"]["steps"], card["data"]["held_out"]) == (3, 1)
    assert len(card["acceptance"]["by_position"]) == 4

    (tmp_path / HEAD_FILE).unlink()
    assert main(argv) == 0
    again = read_tensors(tmp_path / HEAD_FILE)
    assert again.keys() == written.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in written.items())

    further = ["--start-from", str(tmp_path / HEAD_FILE), "--draft-vocab-size", "7", "--steps", "1"]
    assert main([*argv, *further, "--overwrite"]) == 0
    further_on = read_tensors(tmp_path / HEAD_FILE)
    assert torch.allclose(further_on["fuse"], written["fuse"], atol=0.02)
    assert not torch.equal(further_on["fuse"], written["fuse"])

    target = load_model(model_path, torch.float32, torch.device("cpu"), 64)
    head = load_draft_head(tmp_path / HEAD_FILE, target)
    assert head.logits(torch.randn(2, target.config.hidden_size)).shape == (2, 7)
    assert card["fingerprint"] == fingerprint(target)
