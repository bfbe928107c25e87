"""From texts to a head that a worker can load, for a toy model in files."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from worker.models.draft_head import HEAD_FILE, fingerprint, load_draft_head
from worker.models.loader import load_model
from worker.training.__main__ import main
from worker.training.store import read_tensors

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
