"""Broken metadata of a checkpoint's text side is refused by name."""

from pathlib import Path
from typing import Any

import gguf
import msgspec
import pytest

from worker.errors import ModelError
from worker.tokenizer.checkpoint import read_checkpoint
from worker.tokenizer.tokenizer import Tokenizer, build_tokenizer

KEY = "tokenizer.ggml."
MERGED = {f"{KEY}model": "gpt2", f"{KEY}tokens": ["a", "b", "ab", "x y:1", "$A"]}
SCORED = {f"{KEY}model": "llama", f"{KEY}tokens": ["<unk>", "a"], f"{KEY}scores": [0.0, -1.0]}


def read(folder: Path, metadata: dict[str, Any]) -> Tokenizer:
    writer = gguf.GGUFWriter(folder / "x.gguf", "llama")
    for key, value in {"llama.context_length": 64, **metadata}.items():
        kind = gguf.GGUFValueType.get_type(value)
        writer.add_key_value(key, value, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return build_tokenizer(read_checkpoint(folder / "x.gguf"))


@pytest.mark.parametrize(
    ("base", "key", "value"),
    [
        (MERGED, f"{KEY}tokens", [1, 2]),
        (MERGED, f"{KEY}merges", [5, 6]),
        (MERGED, f"{KEY}merges", "a b"),
        (MERGED, f"{KEY}token_type", ["x"] * 5),
        (MERGED, f"{KEY}token_type", 3),
        (MERGED, "llama.vocab_size", "zz"),
        (MERGED, "tokenizer.chat_template", 3),
        (MERGED, "tokenizer.chat_template.tool_use", 3),
        (SCORED, f"{KEY}scores", ["x", "y"]),
        (SCORED, f"{KEY}token_type", 3),
    ],
)
def test_a_key_of_the_wrong_type_is_named(
    base: dict[str, Any], key: str, value: object, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=key.removeprefix("llama.")):
        read(tmp_path, {**base, key: value})


@pytest.mark.parametrize("bos", [3, 4])
def test_a_begin_token_may_have_any_text(bos: int, tmp_path: Path) -> None:
    """The library would parse a blank, colon or dollar in it as template syntax."""
    added = {f"{KEY}bos_token_id": bos, f"{KEY}add_bos_token": True, f"{KEY}merges": ["a b"]}
    built = read(tmp_path, {**MERGED, **added})
    assert built.encode("ab", add_special_tokens=True) == [bos, 2]


@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"]
)
def test_json_nested_too_deeply_is_refused_by_file(name: str, tmp_path: Path) -> None:
    config = {"model_type": "llama", "max_position_embeddings": 32, "vocab_size": 60}
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(config))
    (tmp_path / "tokenizer.json").write_bytes(b"{}")
    (tmp_path / name).write_bytes(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}")
    with pytest.raises(ModelError, match=name):
        read_checkpoint(tmp_path)


def test_a_template_that_is_not_utf_8_is_named(tmp_path: Path) -> None:
    config = {"model_type": "llama", "max_position_embeddings": 32, "vocab_size": 60}
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(config))
    (tmp_path / "tokenizer.json").write_bytes(b"{}")
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ModelError, match=r"chat_template\.jinja"):
        read_checkpoint(tmp_path)
